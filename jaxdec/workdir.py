"""The folder of a run: one run each, files written whole or not at all."""

import json
import os
import pathlib
from typing import Any

from ml_collections import ConfigDict

from jaxdec.config import ConfigError, differences

OUTPUTS = ("summary.json", "metrics.jsonl", "checkpoints", "plots")


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
            found = differences(_read(saved), ours)
            if found:
                raise ConfigError(
                    f"--workdir={workdir} holds another run, with {'; '.join(found)}; "
                    "write another --workdir, or remove that one"
                )
        elif found := [name for name in OUTPUTS if (workdir / name).exists()]:
            raise ConfigError(
                f"--workdir={workdir} holds {', '.join(found)} of an unknown run, without its "
                "config.json; write another --workdir"
            )
        else:
            write_json(saved, ours)
        summary = workdir / "summary.json"
        return json.loads(summary.read_text()) if summary.exists() else None
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"--workdir={workdir} cannot be used: {error}; write another") from error


def check_shared(workdir: pathlib.Path) -> None:
    """Check that this process sees what process 0 claimed.

    Raises:
      ConfigError: it does not.
    """
    if not (workdir / "config.json").exists():
        raise ConfigError(
            f"--workdir={workdir} is not here what it is to process 0; write one on a file system "
            "that all hosts share"
        )


def source_nodes(folder: pathlib.Path, config: ConfigDict, field: str = "config.restore") -> int:
    """The number of nodes of the run in `folder`, whose checkpoint a run of `config` starts from.

    Args:
      folder: of the other run.
      config: of this run.
      field: that named the folder, for errors.

    Raises:
      ConfigError: no run is there, or one of another model or algorithm.
    """
    theirs = read_config(folder, f"{field}={folder}")
    ours = json.loads(config.to_json())
    found = differences(_shape_of(theirs), _shape_of(ours))
    if found:
        raise ConfigError(
            f"{field}={folder} is of another run, with {'; '.join(found)}; make them equal"
        )
    return theirs["nodes"]


def read_config(folder: pathlib.Path, named: str) -> dict[str, Any]:
    """The config of the run in a folder, which errors call `named`.

    Raises:
      ConfigError: no run is there.
    """
    try:
        return _read(folder / "config.json")
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{named} holds no run ({error}); write the --workdir of one") from error


def _read(path: pathlib.Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise OSError(f"{path.name} is not a config")
    return content


def _shape_of(config: dict[str, Any]) -> dict[str, Any]:
    """What decides the shapes of a run's state, beside the number of nodes."""
    return {"model": config["model"], "algorithm": {"name": config["algorithm"]["name"]}}


def write_whole(path: pathlib.Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, path)


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    write_whole(path, json.dumps(content, indent=2) + "\n")
