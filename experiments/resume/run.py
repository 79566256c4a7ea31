"""Kill -9 at twenty random moments: does every run end as if nothing had happened?

Run: python -m experiments.resume.run   (about six minutes on two cores)

Each run is the same command, killed at a moment drawn over the length of an uninterrupted run, and
started again until it ends. Exits with 1 if one differs, in parameters, optimizer state or any
metric but timings, by a single bit.
"""

import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from configs import quickstart
from jaxdec import run as runs
from jaxdec.checkpoint import Checkpoints

KILLS = 20
FIELDS = {
    "steps": 300,
    "checkpoint_every": 20,
    "eval_every": 50,
    "log_every": 7,
    "lift": "simulate",
}
TIMES = ("steps_per_second", "examples_per_second")


def command(folder: pathlib.Path) -> list[str]:
    flags = [f"--config.{name}={value}" for name, value in FIELDS.items()]
    files = ["--config=configs/quickstart.py", f"--workdir={folder}"]
    return [sys.executable, "-m", "jaxdec", *files, *flags]


def end_of(folder: pathlib.Path) -> dict[str, str]:
    """Hashes of all that a run ends with, timings aside."""
    config = quickstart.get_config()
    config.update_from_flattened_dict(FIELDS)
    checkpoints = Checkpoints(folder, read_only=True)
    state, _ = checkpoints.restore(FIELDS["steps"], runs.build(config).initial_state())
    arrays = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        arrays.update(np.asarray(leaf).tobytes())
    hashes = {"state": arrays.hexdigest()}
    for name in ("metrics.jsonl", "summary.json"):
        text = (folder / name).read_text()
        lines = text.splitlines() if name.endswith("l") else [text]
        records = [{k: v for k, v in json.loads(x).items() if k not in TIMES} for x in lines]
        hashes[name] = hashlib.sha256(json.dumps(records).encode()).hexdigest()
    return hashes


def run_to_the_end(folder: pathlib.Path) -> float:
    start = time.monotonic()
    subprocess.run(command(folder), check=True, capture_output=True)
    return time.monotonic() - start


def main() -> int:
    rng = np.random.default_rng(0)
    table = Table("kill", "after s", "newest checkpoint then", "state", "metrics", "summary")
    same = 0
    with tempfile.TemporaryDirectory() as temporary:
        whole = pathlib.Path(temporary, "whole")
        run_to_the_end(whole)  # fills the compilation cache
        again = pathlib.Path(temporary, "again")
        seconds = run_to_the_end(again)
        expected = end_of(whole)
        for kill in range(KILLS):
            folder = pathlib.Path(temporary, str(kill))
            process = subprocess.Popen(command(folder), stdout=subprocess.DEVNULL)
            after = rng.uniform(0.05, 1.0) * seconds
            time.sleep(after)
            process.kill()
            process.wait()
            saved = folder / "checkpoints"
            steps = [int(path.name) for path in saved.glob("[0-9]*") if path.name.isdigit()]
            run_to_the_end(folder)
            found = end_of(folder)
            equal = {name: found[name] == expected[name] for name in expected}
            same += all(equal.values())
            verdicts = ["equal" if each else "DIFFERS" for each in equal.values()]
            table.add_row(str(kill), f"{after:.1f}", str(max(steps, default="none")), *verdicts)
    Console().print(table)
    print(f"{same} of {KILLS} killed runs end bit-identical to an uninterrupted one")
    return 0 if same == KILLS else 1


if __name__ == "__main__":
    sys.exit(main())
