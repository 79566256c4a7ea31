"""What a compiled step does in which order, and how long that takes on a machine: a replay."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxdec.audit import hlo
from jaxdec.audit.targets import Chip
from jaxdec.nodes import MANUAL_AXES

# Nothing is computed by them, or it is done beside the rest (a TPU's own copies to fast memory).
_FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
        *("partition-id", "iota", "copy-start", "copy-done", "slice-start", "slice-done"),
        *("async-update", "async-done"),
    )
)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective of the step.

    Attributes:
      kind: of `hlo.COLLECTIVES`.
      axes: the mesh axes over which it runs.
      bytes: what a device puts in.
      device_bytes: what a device sends, by a ring where there are many.
      host_bytes: the most that leaves a host.
      start: index of the operation that starts it.
      done: index of the one that waits for it; `start` where they are one.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    device_bytes: float
    host_bytes: float
    start: int
    done: int

    @property
    def is_gossip(self) -> bool:
        """It runs between replicas of the model."""
        return any(axis in MANUAL_AXES for axis in self.axes)


class Operation(NamedTuple):
    """Anything scheduled that is no collective: its matrix FLOPs, and bytes read and written."""

    flops: float = 0.0
    bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A step's operations in scheduled order; those of transfers take no time of their own."""

    operations: Sequence[Operation]
    transfers: Sequence[Transfer]

    @property
    def gossip(self) -> list[Transfer]:
        """The transfers between replicas."""
        return [transfer for transfer in self.transfers if transfer.is_gossip]

    @property
    def gossip_bytes(self) -> int:
        """What a device puts into gossip."""
        return sum(transfer.bytes for transfer in self.gossip)

    @property
    def exposed_bytes(self) -> int:
        """Of it, what has no matrix product scheduled while it is in flight."""
        return sum(each.bytes for each in self.gossip if not self.share_in_flight([each]))

    @property
    def host_bytes(self) -> float:
        """What gossip takes out of a host, the most of each transfer."""
        return sum(transfer.host_bytes for transfer in self.gossip)

    def share_in_flight(self, transfers: Iterable[Transfer]) -> float:
        """The share of the step's FLOPs that are scheduled while any of the transfers is."""
        flops = np.array([operation.flops for operation in self.operations])
        covered = np.zeros(len(flops), bool)
        for transfer in transfers:
            covered[transfer.start : transfer.done] = True
        total = flops.sum()
        return float(flops[covered].sum() / total) if total else 0.0

    def spans_all_products(self, transfers: Sequence[Transfer]) -> bool:
        """One starts before the first matrix product, and one ends after the last."""
        products = [i for i, operation in enumerate(self.operations) if operation.flops]
        if not products or not transfers:
            return False
        starts, ends = zip(*((each.start, each.done) for each in transfers), strict=True)
        return min(starts) < products[0] and max(ends) > products[-1]


def read(module: hlo.Module, mesh: Mesh, hosts: Sequence[int]) -> Schedule:
    """The schedule of a compiled step.

    Args:
      module: of the compiled step.
      mesh: that it was compiled for.
      hosts: the host of each device of the mesh, in its order.
    """
    operations: list[Operation] = []
    transfers: list[Transfer] = []
    open_starts: dict[str, tuple[str, hlo.Instruction, str, int]] = {}
    for computation, each in module.scheduled():
        index = len(operations)
        if (kind := module.collective(each)) is not None:
            operations.append(Operation())
            if each.opcode.endswith("-start"):
                open_starts[each.name] = (computation, each, kind, index)
            else:
                transfers.append(
                    _transfer(module, computation, each, kind, mesh, hosts, index, index)
                )
        elif each.opcode.endswith("-update") and each.operands[0] in open_starts:
            open_starts[each.name] = open_starts.pop(each.operands[0])
        elif each.opcode.endswith("-done") and each.operands[0] in open_starts:
            computation, begun, kind, start = open_starts.pop(each.operands[0])
            operations.append(Operation())
            transfers.append(_transfer(module, computation, begun, kind, mesh, hosts, start, index))
        elif each.opcode not in _FREE:
            moved = _bytes(module, computation, each)
            operations.append(Operation(module.flops(computation, each), moved))
    return Schedule(operations, sorted(transfers, key=lambda transfer: transfer.start))


def _bytes(module: hlo.Module, computation: str, instruction: hlo.Instruction) -> float:
    if instruction.opcode in ("while", "call"):
        inner = [
            _bytes(module, name, each)
            for name in instruction.called
            for each in module.computations[name].values()
            if each.opcode not in _FREE
        ]
        return instruction.trips * sum(inner)
    # A library's call has its workspace as a second result.
    results = instruction.result[: 1 if instruction.opcode == "custom-call" else None]
    written = sum(array.bytes for array in results)
    return module.bytes_read(computation, instruction) + written


def _transfer(
    module: hlo.Module,
    computation: str,
    instruction: hlo.Instruction,
    kind: str,
    mesh: Mesh,
    hosts: Sequence[int],
    start: int,
    done: int,
) -> Transfer:
    wrapped = instruction
    if instruction.opcode == "async-start":
        inner = module.computations[instruction.called[0]].values()
        wrapped = next(each for each in inner if module.collective(each))
    size = sum(array.bytes for array in module.read(computation, instruction))
    groups = hlo.groups_of(wrapped, mesh.devices.size)
    coordinates = np.array(np.unravel_index(np.arange(mesh.devices.size), mesh.devices.shape))
    differ = [np.ptp(coordinates[:, group], axis=1) > 0 for group in groups]
    axes = tuple(np.array(mesh.axis_names)[np.any(differ, axis=0)].tolist())
    leaving = np.zeros(max(hosts) + 1)
    for group in groups:
        for host, sent in _leaving(kind, size, [hosts[device] for device in group]):
            leaving[host] += sent
    device_bytes = max(_sent(kind, size, len(group)) for group in groups)
    return Transfer(kind, axes, size, device_bytes, float(leaving.max()), start, done)


def _sent(kind: str, size: float, members: int) -> float:
    """Bytes that a member of a group sends, of `size` that it puts in."""
    match kind:
        case "collective-permute":
            return size
        case "all-gather":
            return (members - 1) * size
        case "all-reduce":
            return 2 * (members - 1) / members * size
        case _:
            return (members - 1) / members * size


def _leaving(kind: str, size: float, hosts: list[int]) -> list[tuple[int, float]]:
    """(host, bytes that leave it) for a group whose members are on these hosts."""
    if kind == "collective-permute":
        source, target = hosts
        return [] if source == target else [(source, size)]
    distinct = sorted(set(hosts))
    if "all-to-all" in kind:
        here = [hosts.count(host) for host in distinct]
        return [
            (host, own * size * (len(hosts) - own) / len(hosts))
            for host, own in zip(distinct, here, strict=True)
        ]
    whole = size * len(hosts) if kind == "all-gather" else size
    sent = _sent("reduce-scatter", whole, len(distinct)) * (2 if kind == "all-reduce" else 1)
    return [(host, sent) for host in distinct] if len(distinct) > 1 else []


class Span(NamedTuple):
    """Something that took time: on which lane, from when, for how long (seconds)."""

    lane: str
    start: float
    seconds: float


class Prediction(NamedTuple):
    """A replay of a schedule.

    Attributes:
      step_s: seconds a step.
      exposed_s: of these, waiting for gossip.
      compute_s: seconds of all that is no transfer.
      transfer_s: seconds of gossip, were it alone.
      ideal_s: the larger of computing, other waits included, and gossip.
      spans: what took time, in order.
    """

    step_s: float
    exposed_s: float
    compute_s: float
    transfer_s: float
    ideal_s: float
    spans: list[Span]


def predict(schedule: Schedule, chip: Chip) -> Prediction:
    """Replay a schedule on a roofline and links of given rates.

    An operation takes the longer of its FLOPs at the chip's rate and its bytes at its memory's, one
    after another; a transfer takes a latency and its bytes at the link's rate, beside them, after
    those that the same link had before.
    """
    begins = {transfer.start: i for i, transfer in enumerate(schedule.transfers)}
    ends: dict[int, list[int]] = {}
    for i, transfer in enumerate(schedule.transfers):
        ends.setdefault(transfer.done, []).append(i)
    lasts = [_seconds(transfer, chip) for transfer in schedule.transfers]
    free: dict[str, float] = {}
    until = [0.0] * len(lasts)
    now = exposed = other = 0.0
    spans: list[Span] = []
    for index, operation in enumerate(schedule.operations):
        seconds = max(operation.flops / chip.flops, operation.bytes / chip.memory_rate)
        if seconds:
            spans.append(Span("compute", now, seconds))
            now += seconds
        if index in begins:
            i = begins[index]
            lane = _lane(schedule.transfers[i])
            start = max(now, free.get(lane, 0.0))
            until[i] = free[lane] = start + lasts[i]
            spans.append(Span(lane, start, lasts[i]))
        for i in ends.get(index, ()):
            wait = max(0.0, until[i] - now)
            now += wait
            if schedule.transfers[i].is_gossip:
                exposed += wait
            else:
                other += wait
    compute = now - exposed - other
    gossip = sum(
        seconds
        for transfer, seconds in zip(schedule.transfers, lasts, strict=True)
        if transfer.is_gossip
    )
    return Prediction(now, exposed, compute, gossip, max(compute + other, gossip), spans)


def _seconds(transfer: Transfer, chip: Chip) -> float:
    inside = transfer.device_bytes / chip.link_rate
    between = 0.0 if chip.network_rate is None else transfer.host_bytes / chip.network_rate
    return chip.latency + max(inside, between)


def _lane(transfer: Transfer) -> str:
    what = "gossip" if transfer.is_gossip else "+".join(transfer.axes)
    return f"{what}, {'between' if transfer.host_bytes else 'inside'} hosts"
