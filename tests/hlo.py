"""Collectives of a compiled program, read from its text."""

import math
import re

KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
_WIDTHS = {
    "f64": 8,
    "f32": 4,
    "bf16": 2,
    "f16": 2,
    "u16": 2,
    "s32": 4,
    "u32": 4,
    "s8": 1,
    "u8": 1,
    "pred": 1,
}
_LINE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\(")


def collectives(text: str) -> dict[str, int]:
    """Bytes that one device puts into each kind of collective, by kind; absent: none.

    Args:
      text: `compiled.as_text()`; of start/done pairs the start is counted, a tuple result as its
        first half (operands and results stand side by side).
    """
    total: dict[str, int] = {}
    for result, kind in _LINE.findall(text):
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", result)
        if f"{kind}-start" in text:
            shapes = shapes[: max(1, len(shapes) // 2)]
        size = sum(
            _WIDTHS[dtype] * math.prod(int(d) for d in dims.split(",") if d)
            for dtype, dims in shapes
        )
        total[kind] = total.get(kind, 0) + size
    return total
