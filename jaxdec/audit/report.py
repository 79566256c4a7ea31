"""An audit as tables, as JSON, and as a picture of its schedule."""

import collections
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from jaxdec.audit import Audit, Compiled
from jaxdec.audit.schedule import Transfer

COLORS = {"compute": "#1f4e79", "gossip": "#c0392b"}
OTHER = "#7f8c9a"


def to_json(audit: Audit) -> dict[str, Any]:
    """Everything that was found, in bytes, seconds and shares."""
    link_rate = audit.target.chip.leaving_rate
    return {
        "target": audit.target.name,
        "flags": audit.options,
        "phases": [
            {"phase": phase, "least_host_bytes": audit.least_host_bytes[phase]}
            | _phase(compiled, link_rate)
            for phase, compiled in audit.phases.items()
        ],
        "allreduce": None if audit.allreduce is None else _phase(audit.allreduce, link_rate),
    }


def _phase(compiled: Compiled, link_rate: float) -> dict[str, Any]:
    schedule, prediction = compiled.schedule, compiled.prediction
    gossip = schedule.gossip
    return {
        "collectives": [
            {
                "kind": transfer.kind,
                "axis": "+".join(transfer.axes),
                "bytes": transfer.bytes,
                "host_bytes": transfer.host_bytes,
                "flops_in_flight_share": schedule.share_in_flight([transfer]),
            }
            for transfer in schedule.transfers
        ],
        "counts": {
            "gossip": _counts(gossip),
            "other": _counts([each for each in schedule.transfers if not each.is_gossip]),
        },
        "gossip_bytes": schedule.gossip_bytes,
        "exposed_gossip_bytes": schedule.exposed_bytes,
        "flops_in_flight_share": schedule.share_in_flight(gossip),
        "spans_all_products": schedule.spans_all_products(gossip),
        "host_bytes": schedule.host_bytes,
        "predicted": {
            "step_s": prediction.step_s,
            "exposed_s": prediction.exposed_s,
            "compute_s": prediction.compute_s,
            "transfer_s": prediction.transfer_s,
            "ideal_s": prediction.ideal_s,
            "link_bytes_per_s": link_rate,
        },
        "memory_bytes": compiled.memory,
        "peak_memory_bytes": compiled.peak_memory,
        "compile_s": compiled.seconds,
    }


def _counts(transfers: list[Transfer]) -> dict[str, int]:
    return dict(collections.Counter(transfer.kind for transfer in transfers))


def tables(audit: Audit) -> list[Table]:
    """What is sent, and what a step takes: a row a phase, and one for it with all-reduce."""
    sent = Table(
        title=f"{audit.target.name}: collectives, as the compiler scheduled them",
        caption="hidden: share of the step's matrix FLOPs scheduled while gossip is in flight",
    )
    takes = Table(title="a step in ms, by that schedule on a roofline; GB a device")
    sent.add_column("phase")
    sent.add_column("collectives", ratio=1)
    for name in ("MB", "hidden", "exposed MB", "MB a host (least)"):
        sent.add_column(name, justify="right")
    takes.add_column("phase")
    for name in ("step", "computing", "gossip", "exposed", "ideal", "GB", "compiled"):
        takes.add_column(name, justify="right")
    rows = {str(phase): compiled for phase, compiled in audit.phases.items()}
    least = {str(phase): size for phase, size in audit.least_host_bytes.items()}
    if audit.allreduce is not None:
        rows["allreduce"] = audit.allreduce
    for name, compiled in rows.items():
        schedule, found = compiled.schedule, compiled.prediction
        kinds = collections.Counter((each.kind, each.axes) for each in schedule.transfers)
        lowest = f" ({least[name] / 1e6:.1f})" if name in least else ""
        sent.add_row(
            name,
            ", ".join(f"{n} {kind} ({'+'.join(axes)})" for (kind, axes), n in kinds.items()),
            f"{schedule.gossip_bytes / 1e6:.1f}",
            f"{100 * schedule.share_in_flight(schedule.gossip):.1f} %",
            f"{schedule.exposed_bytes / 1e6:.1f}",
            f"{schedule.host_bytes / 1e6:.1f}{lowest}",
        )
        times = (found.step_s, found.compute_s, found.transfer_s, found.exposed_s, found.ideal_s)
        takes.add_row(
            name,
            *(f"{1e3 * seconds:.3g}" for seconds in times),
            f"{compiled.peak_memory / 1e9:.2f}",
            f"{compiled.seconds:.0f} s",
        )
    return [sent, takes]


def timeline(audit: Audit) -> Figure:
    """What is computed and what is in flight over a step's time, a row a phase."""
    shown = list(audit.phases.items())[:4]
    figure = Figure(figsize=(9, 1.2 + 1.3 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (phase, compiled) in zip(panels, shown, strict=True):
        lanes: dict[str, list[tuple[float, float]]] = {"compute": []}
        for span in compiled.prediction.spans:
            lanes.setdefault(span.lane, []).append((1e3 * span.start, 1e3 * span.seconds))
        for row, (lane, spans) in enumerate(lanes.items()):
            color = COLORS.get(lane.partition(",")[0], OTHER)
            axes.broken_barh(spans, (-row - 0.4, 0.8), facecolors=color)
        axes.set_yticks([-row for row in range(len(lanes))], list(lanes), fontsize=8)
        axes.set_title(f"phase {phase}", fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("ms, predicted")
    figure.suptitle(f"a step on {audit.target.name}", fontsize=11)
    return figure
