"""Collectives of a compiled program."""

from jaxdec.audit.hlo import Module


def collectives(text: str) -> dict[str, int]:
    """Bytes that one device puts into each kind of collective, by kind; absent: none."""
    module, total = Module(text), {}
    for computation, each in module.scheduled():
        if kind := module.collective(each):
            size = sum(array.bytes for array in module.read(computation, each))
            total[kind] = total.get(kind, 0) + size
    return total
