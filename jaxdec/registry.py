"""Factories by the names and fields that configs give, with errors that say what to write."""

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

Factory = TypeVar("Factory", bound=Callable[..., Any])


def suggestion(name: str, choices: Iterable[str]) -> str:
    """The closest choice and the full list, as the end of an error message.

    >>> suggestion("rnig", ["ring", "star"])
    'did you mean ring? choices: ring, star'
    """
    choices = sorted(choices)
    close = difflib.get_close_matches(name, choices, n=1)
    return (f"did you mean {close[0]}? " if close else "") + f"choices: {', '.join(choices)}"


def lookup(
    kind: str, table: Mapping[str, Factory], name: str, fields: Collection[str], given: int
) -> Factory:
    """The factory called `name`, once every field is one of its parameters.

    Args:
      kind: what the table holds, as the error should call it ("topology", "algorithm", ...).
      table: factories by name.
      name: the wanted one.
      fields: keyword arguments the caller is about to pass.
      given: number of leading parameters that the caller fills positionally.

    Raises:
      ValueError: the name is unknown, the factory lacks a field, or needs another one.
    """
    if name not in table:
        raise ValueError(f"{kind}.name={name!r} is unknown; {suggestion(name, table)}")
    factory = table[name]
    if isinstance(factory, type):  # nnx.Module hides the signature of its subclasses
        signature, given = inspect.signature(vars(factory)["__init__"]), given + 1
    else:
        signature = inspect.signature(factory)
    parameters = list(signature.parameters.values())[given:]
    taken = [parameter.name for parameter in parameters]
    for parameter in parameters:
        if parameter.default is inspect.Parameter.empty and parameter.name not in fields:
            raise ValueError(f"{kind}.{parameter.name} is not set; {kind} {name!r} needs it")
    for field in fields:
        if field not in taken:
            takes = f"it takes: {', '.join(taken)}" if taken else "it takes no further fields"
            raise ValueError(
                f"{kind}.{field} is set, but {kind} {name!r} does not take it; {takes}"
            )
    return factory
