"""Audit a config: python -m jaxdec.audit --config=configs/NAME.py --target=cuda:h100:2x8.

Targets: cuda:h100|a100:HOSTSxDEVICES, tpu:v5e|v5p|v6e:AxB[xC], cpu:DEVICES.
"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Sequence

from absl import app, flags
from rich.console import Console

from jaxdec import command
from jaxdec.audit import audit, report, targets
from jaxdec.config import ConfigError

TARGET = flags.DEFINE_string("target", None, "The machine to compile for.")
JSON = flags.DEFINE_string("json", None, "File for all that was found.")
TIMELINE = flags.DEFINE_string("timeline", None, "File (.png) for a picture of the schedule.")
LINK = flags.DEFINE_string("link", None, "Rate at which bytes leave a host, such as 25Gbit/s.")

UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def rate(text: str) -> float:
    """Bytes a second.

    Raises:
      ConfigError: it is no rate.

    >>> rate("25Gbit/s"), rate("400 MB/s")
    (3125000000.0, 400000000.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(bit|B)/s", text)
    if found is None or not float(found[1]):
        raise ConfigError(f"--link={text} is no rate; write one such as 25Gbit/s or 400MB/s")
    number, prefix, unit = found.groups()
    return float(number) * UNITS.get(prefix, 1.0) / (8 if unit == "bit" else 1)


def main(_: Sequence[str]) -> None:
    """Audit. Exits with 2 where the config or the target cannot be."""
    with command.failures():
        target = targets.find(str(TARGET.value))
        if LINK.value is not None:
            linked = dataclasses.replace(target.chip, network_rate=rate(LINK.value))
            target = dataclasses.replace(target, chip=linked)
        found = audit(command.CONFIG.value, target)
        for table in report.tables(found):
            Console().print(table)
        if JSON.value is not None:
            pathlib.Path(JSON.value).write_text(json.dumps(report.to_json(found), indent=1))
        if TIMELINE.value is not None:
            report.timeline(found).savefig(TIMELINE.value, dpi=150)


if __name__ == "__main__":
    needed = (command.CONFIG, TARGET)
    app.run(main, flags_parser=lambda argv: command.parse(argv, str(__doc__), needed))
