"""Prepare data sets: python -m jaxdec.data prepare NAME [--data_dir=DIR] [--source=FOLDER].

`python -m jaxdec.data list [--data_dir=DIR]` shows the names, what they need, and what is there.
"""

import argparse
import pathlib
import sys
from typing import Protocol

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from jaxdec import registry
from jaxdec.data import (
    cifar10,
    ding,
    fashion_mnist,
    imagenet,
    prepared,
    stdlib,
    token_files,
    wmt14,
)


class Preparable(Protocol):
    """What a module of a set offers here."""

    NEEDS: str

    def prepare(self, data_dir: pathlib.Path, source: pathlib.Path | None) -> object: ...
    def splits(self, data_dir: pathlib.Path) -> list[prepared.Split] | None: ...


PREPARABLE: dict[str, Preparable] = {
    "cifar10": cifar10,
    "fashion_mnist": fashion_mnist,
    "imagenet2012": imagenet,
    "stdlib": stdlib,
    "trans_de_en": ding,
    "wmt14_en_de": wmt14,
}


def prepare(name: str, data_dir: pathlib.Path, source: pathlib.Path | None) -> Table:
    """Prepare a set, unless it is; a table of its splits."""
    if name == "digits":
        raise prepared.DataError("digits comes with scikit-learn; there is nothing to prepare")
    if name == token_files.NAME:
        raise prepared.DataError(f"tokens needs {token_files.NEEDS}")
    if name not in PREPARABLE:
        raise prepared.DataError(f"{name!r} is unknown; {registry.suggestion(name, PREPARABLE)}")
    if source is not None and not source.exists():
        raise prepared.DataError(f"there is no --source={source}")
    module = PREPARABLE[name]
    if module.splits(data_dir) is None:
        module.prepare(data_dir, source)
    table = Table(name, "holds", "bytes")
    for split in module.splits(data_dir) or ():
        table.add_row(split.name, split.holds, decimal(split.bytes))
    return table


def listed(data_dir: pathlib.Path) -> Table:
    """A table of all sets."""
    table = Table("name", "prepared", "needs")
    table.add_row("digits", "yes", "nothing: scikit-learn brings it")
    for name, module in PREPARABLE.items():
        try:
            splits = module.splits(data_dir)
            size = "no" if splits is None else decimal(sum(split.bytes for split in splits))
        except prepared.DataError:
            size = "damaged"
        table.add_row(name, size, module.NEEDS)
    table.add_row(token_files.NAME, "–", token_files.NEEDS)
    return table


def main(argv: list[str] | None = None) -> int:
    """Run a command. Returns 2, after one line on stderr, where it could not."""
    parser = argparse.ArgumentParser(prog="python -m jaxdec.data", description=__doc__)
    parser.add_argument("command", choices=["prepare", "list"])
    parser.add_argument("name", nargs="?", help="of a set, to prepare")
    parser.add_argument("--data_dir", help="default: $TFDS_DATA_DIR, or ~/tensorflow_datasets")
    parser.add_argument("--source", type=pathlib.Path, help="folder of the raw files")
    args = parser.parse_args(argv)
    data_dir = prepared.root(args.data_dir)
    try:
        if args.command == "list":
            table = listed(data_dir)
        elif args.name is None:
            raise prepared.DataError("write prepare NAME; `list` shows the names")
        else:
            table = prepare(args.name, data_dir, args.source)
    except (prepared.DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console(markup=False)  # "jaxdec[tf]" is no markup
    console.print(table)
    console.print(f"in {data_dir}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
