"""The folder of a run: one run each, files written whole or not at all."""

import json
import os
import pathlib
from typing import Any

from ml_collections import ConfigDict

from jaxdec.config import ConfigError, differences


def claim(workdir: pathlib.Path, config: ConfigDict) -> dict[str, Any] | None:
    """Make the folder this run's, by its config.json.

    Returns:
      The summary of this very run where it has finished; otherwise None.

    Raises:
      ConfigError: the folder holds another run, or cannot be written.
    """
    ours = json.loads(config.to_json())
    saved = workdir / "config.json"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if saved.exists():
            found = differences(json.loads(saved.read_text()), ours)
            if found:
                raise ConfigError(
                    f"--workdir={workdir} holds another run, with {'; '.join(found)}; "
                    "write another --workdir, or remove that one"
                )
        else:
            write_json(saved, ours)
        summary = workdir / "summary.json"
        return json.loads(summary.read_text()) if summary.exists() else None
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"--workdir={workdir} cannot be used: {error}; write another") from error


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Write a file whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(partial, path)
