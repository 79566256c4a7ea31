"""Compiled programs, read from their text: instructions in scheduled order, FLOPs and bytes."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_CALLED = re.compile(
    r"\b(?:body|calls|to_apply|true_computation|false_computation|branch_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
# Comments between operands; and what the source says, in which anything may stand.
_NOISE = re.compile(r'/\*.*?\*/|, metadata=\{(?:[^"}]|"(?:\\.|[^"\\])*")*\}')
# What a matrix product is called once a library computes it.
_LIBRARY_DOT = re.compile(r'custom_call_target="__cublas\$[^"]*')
_LIBRARY_CONVOLUTION = re.compile(r'custom_call_target="__cudnn\$conv(\w+)"')


class Array(NamedTuple):
    """An array's element type and shape."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Of its elements, without padding; a token has none."""
        if self.dtype == "pred":
            return self.size
        bits = re.search(r"\d+", self.dtype)
        return 0 if bits is None else self.size * int(bits[0]) // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a computation.

    Attributes:
      name: unique in its module.
      opcode: as in the text, "-start" and "-done" included.
      result: its arrays, those of nested tuples in a row.
      operands: the names of what it reads; of a parameter, its number.
      attributes: the rest of the line.
    """

    name: str
    opcode: str
    result: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str

    @property
    def called(self) -> tuple[str, ...]:
        """The computations that it runs, one after another or one of them; not its condition."""
        found = _CALLED.findall(self.attributes)
        names = [name for text in found for name in text.strip("{}").split(",")]
        return tuple(name.strip(" %") for name in names)

    @property
    def trips(self) -> int:
        """How often the body of a while runs; 1 where XLA does not know."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.attributes)
        return 1 if found is None else int(found[1])

    def attribute(self, name: str) -> str:
        """The text of an attribute, up to the next one; empty: there is none."""
        found = re.search(rf"\b{name}=(.*?)(?=, \w+=|$)", self.attributes)
        return "" if found is None else found[1]


class Module:
    """A scheduled module: its computations, each in the order in which it runs.

    Args:
      text: `compiled.as_text()`.

    Raises:
      ValueError: it is not a scheduled module.

    Attributes:
      computations: instructions by the name of the computation.
      entry: the name of the one that runs first.
    """

    def __init__(self, text: str):
        head, _, rest = text.partition("\n")
        if "is_scheduled=true" not in head:
            raise ValueError(f"not the text of a scheduled module: {head[:60]!r}")
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        body: dict[str, Instruction] = {}
        for line in rest.splitlines():
            if line.endswith("{") and " -> " in line:
                words = line.split()
                is_entry = words[0] == "ENTRY"
                name = words[is_entry].lstrip("%")
                self.entry = name if is_entry else self.entry
                body = self.computations[name] = {}
            elif line.startswith("  ") and " = " in line:
                found = _instruction(line)
                body[found.name] = found

    def scheduled(self, computation: str | None = None) -> Iterator[tuple[str, Instruction]]:
        """(computation, instruction) as they run, those that hold collectives taken apart.

        A loop with a collective is unrolled; without, it is one instruction, and so is a fusion.
        Of a conditional, the branch of most FLOPs runs.
        """
        name = self.entry if computation is None else computation
        for instruction in self.computations[name].values():
            below = instruction.called
            if instruction.opcode == "conditional":
                below = (max(below, key=self._computation_flops),)
            if instruction.opcode == "async-start" or not any(map(self._communicates, below)):
                yield name, instruction
                continue
            trips = instruction.trips if instruction.opcode == "while" else 1
            for inner in itertools.chain.from_iterable(itertools.repeat(below, trips)):
                yield from self.scheduled(inner)

    def collective(self, instruction: Instruction) -> str | None:
        """The kind of collective that an instruction is or starts; None: it does not."""
        if instruction.opcode.endswith(("-done", "-update")):
            return None
        if instruction.opcode == "async-start":
            wrapped = self.computations[instruction.called[0]].values()
            return next(filter(None, map(self.collective, wrapped)), None)
        kind = instruction.opcode.removesuffix("-start")
        return kind if kind in COLLECTIVES else None

    def read(self, computation: str, instruction: Instruction) -> tuple[Array, ...]:
        """The arrays that an instruction reads."""
        lines = self.computations[computation]
        return tuple(array for name in instruction.operands for array in lines[name].result)

    def bytes_read(self, computation: str, instruction: Instruction) -> int:
        """Bytes that an instruction reads: of what a fusion only takes slices of, these."""
        if instruction.opcode != "fusion":
            return sum(array.bytes for array in self.read(computation, instruction))
        lines, inside = self.computations[computation], instruction.called[0]
        return sum(
            self._bytes_taken(inside, str(number))
            or sum(array.bytes for array in lines[name].result)
            for number, name in enumerate(instruction.operands)
        )

    def _bytes_taken(self, computation: str, number: str) -> int:
        """Bytes of the slices that a computation takes of a parameter; 0 where it takes it all."""
        lines = self.computations[computation].values()
        names = {e.name for e in lines if e.opcode == "parameter" and e.operands == (number,)}
        taken = 0
        for each in lines:
            if each.operands[:1] and names.intersection(each.operands):
                if each.opcode == "bitcast":
                    names.add(each.name)
                elif each.opcode in ("slice", "dynamic-slice") and each.operands[0] in names:
                    taken += sum(array.bytes for array in each.result)
                else:
                    return 0
        return taken

    def flops(self, computation: str, instruction: Instruction) -> float:
        """Of its matrix products and convolutions, two for each multiplication and addition."""
        if instruction.opcode == "while":
            return instruction.trips * self._flops_of(instruction.called)
        if instruction.opcode == "conditional":
            return max(map(self._computation_flops, instruction.called))
        if instruction.called:
            return self._flops_of(instruction.called)
        if instruction.opcode not in ("dot", "convolution", "custom-call"):
            return 0.0
        operands = self.read(computation, instruction)
        if instruction.opcode == "dot":
            contracted = _integers(instruction.attribute("lhs_contracting_dims"))
            return _dot_flops(instruction.result[0], operands[0], contracted)
        if instruction.opcode == "convolution":
            return _convolution_flops(instruction, operands[0], operands[1], instruction.result[0])
        if _LIBRARY_DOT.search(instruction.attributes):
            contracted = _integers(_after(instruction.attributes, '"lhs_contracting_dimensions":'))
            return _dot_flops(instruction.result[0], operands[0], contracted)
        if found := _LIBRARY_CONVOLUTION.search(instruction.attributes):
            given = (*operands[:2], instruction.result[0])
            # As the forward convolution of which it is a derivative: (input, filter, output).
            order = {"BackwardInput": (2, 1, 0), "BackwardFilter": (0, 2, 1)}
            lhs, rhs, out = (given[i] for i in order.get(found[1], (0, 1, 2)))
            return _convolution_flops(instruction, lhs, rhs, out)
        return 0.0

    @functools.cache  # noqa: B019 a module lives as short as its answers
    def _computation_flops(self, name: str) -> float:
        return sum(self.flops(name, each) for each in self.computations[name].values())

    def _flops_of(self, names: Iterable[str]) -> float:
        return sum(map(self._computation_flops, names))

    @functools.cache  # noqa: B019
    def _communicates(self, name: str) -> bool:
        return any(
            self.collective(each) is not None or any(map(self._communicates, each.called))
            for each in self.computations[name].values()
        )


def _instruction(line: str) -> Instruction:
    """Read `  [ROOT] %name = type opcode(operands), attributes`."""
    left, _, right = _NOISE.sub("", line).partition(" = ")
    end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    opening = right.index("(", end)
    closing = _closing(right, opening)
    opcode, operands = right[end:opening].strip(), right[opening + 1 : closing]
    is_parameter = opcode == "parameter"
    return Instruction(
        name=left.split()[-1].lstrip("%"),
        opcode=opcode,
        result=_arrays(right[:end]),
        operands=(operands,) if is_parameter else tuple(re.findall(r"%([\w.\-]+)", operands)),
        attributes=right[closing + 1 :].lstrip(", "),
    )


def _closing(text: str, opening: int) -> int:
    """The index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index
    raise ValueError(f"a parenthesis is not closed: {text[opening : opening + 60]!r}")


def _arrays(text: str) -> tuple[Array, ...]:
    return tuple(Array(dtype, _integers(dims)) for dtype, dims in _ARRAY.findall(text))


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def _after(text: str, key: str) -> str:
    """The list that follows a key of JSON."""
    return text.partition(key)[2].partition("]")[0]


def _dot_flops(result: Array, lhs: Array, contracted: tuple[int, ...]) -> float:
    return 2.0 * result.size * math.prod(lhs.dims[axis] for axis in contracted)


def _convolution_flops(convolution: Instruction, lhs: Array, rhs: Array, out: Array) -> float:
    """Multiplications with padding, and with the zeros of dilated inputs, are not counted."""
    labels = re.split("_|->", convolution.attribute("dim_labels"))
    window = dict(part.split("=") for part in convolution.attribute("window").strip("{}").split())
    groups = [
        int(convolution.attribute(name) or 1)
        for name in ("feature_group_count", "batch_group_count")
    ]
    spatial = [label for label in labels[0] if label.isdigit()]
    positions = 1
    for axis in sorted(spatial):
        at = int(axis)
        size, taps, outputs = (
            array.dims[label.index(axis)]
            for array, label in zip((lhs, rhs, out), labels, strict=True)
        )
        low = int(window["pad"].split("x")[at].split("_")[0]) if "pad" in window else 0
        stride, dilated, spread = (
            int(window[name].split("x")[at]) if name in window else 1
            for name in ("stride", "lhs_dilate", "rhs_dilate")
        )
        positions *= _products(size, taps, outputs, low, stride, dilated, spread)
    inputs, features = lhs.dims[labels[0].index("f")], rhs.dims[labels[1].index("o")]
    batch = lhs.dims[labels[0].index("b")]
    return 2.0 * positions * (inputs // groups[0]) * features * (batch // groups[1])


def _products(
    size: int, taps: int, outputs: int, low: int, stride: int, dilated: int, spread: int
) -> int:
    """How many pairs of an output and a tap meet an element of the input, along one axis."""
    at = np.arange(outputs)[:, None] * stride + np.arange(taps)[None] * spread - low
    return int(np.sum((at >= 0) & (at <= (size - 1) * dilated) & (at % dilated == 0)))


def groups_of(instruction: Instruction, devices: int) -> list[list[int]]:
    """Which devices a collective brings together: pairs for a permute, else replica groups.

    >>> [line] = Module('''HloModule m, is_scheduled=true
    ... ENTRY %main (x: f32[2]) -> f32[2] {
    ...   ROOT %r = f32[2]{0} all-reduce(%x), replica_groups=[2,2]<=[2,2]T(1,0)
    ... }''').computations["main"].values()
    >>> groups_of(line, 4)
    [[0, 2], [1, 3]]
    """
    if pairs := instruction.attribute("source_target_pairs"):
        return [list(map(int, pair)) for pair in re.findall(r"(\d+),(\d+)", pairs)]
    text = instruction.attribute("replica_groups")
    if "<=" in text:
        shape, _, order = text.partition("<=")
        sizes, _, transposed = order.partition("T")
        ids: Any = np.arange(math.prod(_integers(sizes))).reshape(_integers(sizes))
        if transposed:
            ids = ids.transpose(_integers(transposed))
        return ids.reshape(_integers(shape)).tolist()
    found = [list(_integers(group)) for group in re.findall(r"\{([\d,]+)\}", text)]
    return found or [list(range(devices))]
