"""Ten minutes on a new pod: do the links carry what a config needs, correctly and fast enough?

Run, as the run itself: python experiments/launch/local.py --processes=2 --devices=4 \
    --module=experiments.launch.pod_check -- --config=configs/quickstart.py

Every exchange of the config's rounds and an all-reduce are checked against NumPy and timed over a
range of sizes; then each link between two processes that the rounds use, on its own; then training
steps with gossip and without. Writes nothing. Exits: 0 healthy, 1 not, 2 it cannot start.
"""

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from jax.experimental import multihost_utils
from ml_collections import ConfigDict, config_flags
from rich.console import Console
from rich.table import Table

from jaxdec import hosts, nodes
from jaxdec import run as runs
from jaxdec.config import ConfigError
from jaxdec.gossip import exchange
from jaxdec.placement import Placement

Exchange = Callable[[jax.Array], jax.Array]


def sources(run: runs.Run) -> dict[str, tuple[int, ...]]:
    """Each distinct exchange of the rounds: in words → from whom each node receives."""
    found: dict[tuple[int, ...], str] = {}
    if run.config.algorithm.name == "allreduce":
        return {}
    for phase in sorted(set(run.phases)):
        if not run.topology.is_mean(phase):
            for i, (source, _) in enumerate(run.topology.rounds[phase]):
                found.setdefault(source, f"round {phase}, exchange {i}")
    return {name: source for source, name in found.items()}


def links(
    found: Sequence[tuple[int, ...]], process_of: Sequence[int]
) -> dict[tuple[int, int], tuple[int, ...]]:
    """For each two processes, an exchange of all pairs of nodes between them that one round has.

    >>> links([(3, 0, 1, 2)], process_of=[0, 0, 1, 1])
    {(0, 0): (0, 0, 2, 3), (0, 1): (0, 1, 1, 3), (1, 0): (3, 1, 2, 3), (1, 1): (0, 1, 2, 2)}
    """
    best: dict[tuple[int, int], tuple[int, ...]] = {}
    for source in found:
        ends = {(process_of[s], process_of[i]) for i, s in enumerate(source) if s != i}
        for link in ends:
            pairs = tuple(
                s if (process_of[s], process_of[i]) == link else i for i, s in enumerate(source)
            )
            if link not in best or _moved(pairs) > _moved(best[link]):
                best[link] = pairs
    return dict(sorted(best.items()))


def slow_links(speed: dict[tuple[int, int], float], share: float) -> Iterator[str]:
    """The links far below the median of their kind: inside a process, or between two.

    >>> list(slow_links({(0, 1): 10.0, (1, 2): 9.0, (2, 0): 1.0, (0, 0): 99.0}, share=0.5))
    ['process 2 → 0 is slow: 1.00 GB/s, and the median between processes is 9.00']
    """
    for inside, kind in ((True, "inside a process"), (False, "between processes")):
        alike = {link: s for link, s in speed.items() if (link[0] == link[1]) == inside}
        for (a, b), s in alike.items():
            median = float(np.median(list(alike.values())))
            if s < share * median:
                yield (
                    f"process {a} → {b} is slow: {s:.2f} GB/s, and the median {kind} is "
                    f"{median:.2f}"
                )


def _moved(source: tuple[int, ...]) -> int:
    return sum(s != i for i, s in enumerate(source))


class Check:
    """Measures; all processes call the same methods in the same order."""

    def __init__(self, placement: Placement, sizes: Sequence[int], repeats: int):
        self._placement = placement
        self._sizes = sizes  # bytes a node
        self._repeats = repeats
        self.problems: list[str] = []

    def collective(
        self, name: str, f: Exchange, expected: Callable[[np.ndarray], np.ndarray]
    ) -> list[float]:
        """Check a collective, and time it: seconds by size, of the slowest process."""
        placement = self._placement
        lifted = placement.lift(f, donate_argnums=())
        numbers = np.arange(placement.n, dtype=np.float32)[:, np.newaxis] + 1
        found = placement.fetch(lifted(placement.put(numbers)))
        wrong = np.flatnonzero(~np.isclose(found, expected(numbers), rtol=1e-6).all(axis=1))
        if len(wrong):
            self.problems.append(f"{name} brings node {', '.join(map(str, wrong))} wrong numbers")
        return [self._seconds(lifted, size) for size in self._sizes]

    def _seconds(self, lifted: Exchange, size: int) -> float:
        placement = self._placement
        x = placement.spread(np.ones(size // 4, np.float32))
        jax.block_until_ready(lifted(x))
        times = []
        for _ in range(self._repeats):
            start = time.perf_counter()
            jax.block_until_ready(lifted(x))
            times.append(time.perf_counter() - start)
        return self._slowest(min(times))

    def step(self, run: runs.Run, steps: int) -> float:
        """Seconds a training step takes; the median, of the slowest process."""
        state, train_step, batches = run.initial_state(), run.train_step(), run.batches()
        times: list[float] = []
        for t in range(len(run.phases) + steps):
            batch = run.placement.put_batch(next(batches))
            start = time.perf_counter()
            state, metrics = train_step(state, batch, phase=run.phases[t % len(run.phases)])
            jax.block_until_ready((state, metrics))
            times.append(time.perf_counter() - start)
        norms = run.placement.fetch(metrics["train/gradient_norm_nodes"])
        bad = np.flatnonzero(~np.isfinite(norms))
        if len(bad):
            self.problems.append(
                f"after {len(times)} steps on {run.topology.name} the gradient of node "
                f"{', '.join(map(str, bad))} is not finite"
            )
        return self._slowest(float(np.median(times[len(run.phases) :])))

    def _slowest(self, seconds: float) -> float:
        if jax.process_count() == 1:
            return seconds
        return float(np.max(multihost_utils.process_allgather(np.float32(seconds))))


def check(config: ConfigDict, sizes: Sequence[int], repeats: int, steps: int, slow: float) -> int:
    """Check the pod for a config, and print what was found; the exit code."""
    console = Console(quiet=jax.process_index() != 0)
    config.lift = "mesh"
    config.steps = max(config.steps, steps + config.max_executables)
    run = runs.build(config)
    mesh = run.placement.mesh
    assert mesh is not None
    # Of each replica the first device: exchanges are between replicas, whatever shares them.
    firsts = mesh.devices.reshape(config.nodes, -1)[:, 0]
    process_of = [device.process_index for device in firsts]
    flat = Placement(config.nodes, nodes.make_mesh(node=config.nodes, devices=firsts))
    devices = jax.devices()
    console.print(
        f"{run.topology.name}: {config.nodes} nodes on {jax.process_count()} processes × "
        f"{jax.local_device_count()} {devices[0].device_kind}, jax {jax.__version__}"
    )
    table = Table(title="pod check", title_justify="left")
    table.add_column("collective")
    table.add_column("nodes", justify="right")
    table.add_column(f"µs at {_size(sizes[0])}", justify="right")
    for size in sizes[1:]:
        table.add_column(f"GB/s at {_size(size)}", justify="right")

    checks = Check(flat, sizes, repeats)

    def row(name: str, count: int, seconds: Sequence[float]) -> None:
        rates = (f"{rate:.2f}" for rate in _rates(sizes, seconds)[1:])
        table.add_row(name, str(count), f"{1e6 * seconds[0]:.0f}", *rates)

    def permutation(name: str, source: tuple[int, ...]) -> list[float]:
        console.print(f"measuring {name}", style="dim")
        f = functools.partial(exchange, source=source, axis_name="node")
        seconds = checks.collective(name, f, lambda x: x[np.asarray(source)])
        row(name, _moved(source), seconds)
        return seconds

    found = sources(run)
    for name, source in found.items():
        permutation(name, source)
    table.add_section()
    speed = {
        (a, b): _rates(sizes, permutation(f"process {a} → {b}", source))[-1]
        for (a, b), source in links(list(found.values()), process_of).items()
    }
    table.add_section()
    console.print("measuring all-reduce", style="dim")
    mean = functools.partial(jax.lax.pmean, axis_name="node")
    seconds = checks.collective(
        "all-reduce",
        lambda x: jnp.broadcast_to(mean(x), x.shape),
        lambda x: np.broadcast_to(x.mean(axis=0), x.shape),
    )
    row("all-reduce", config.nodes, seconds)
    console.print("measuring training steps", style="dim")
    with_gossip = checks.step(run, steps)
    without = checks.step(runs.build(_isolated(config)), steps)
    checks.problems += slow_links(speed, slow)

    console.print(table)
    console.print(
        f"a step takes {1e3 * with_gossip:.2f} ms, and {1e3 * without:.2f} ms without gossip: "
        f"gossip costs {1e3 * (with_gossip - without):.2f} ms"
    )
    for problem in checks.problems:
        console.print(f"not healthy: {problem}", style="bold red", soft_wrap=True)
    if not checks.problems:
        console.print("healthy", style="bold green")
    return 1 if checks.problems else 0


def _isolated(config: ConfigDict) -> ConfigDict:
    """The config without gossip; an algorithm that has no other all-reduces all the same."""
    config = config.copy_and_resolve_references()
    config.allow_unstable = True
    config.mesh.update({"node": None, "local": 1})
    for field in config.topology:
        config.topology[field] = {"name": "isolated", "lazy": False}.get(field)
    return config


def _rates(sizes: Sequence[int], seconds: Sequence[float]) -> list[float]:
    return [size / s / 1e9 for size, s in zip(sizes, seconds, strict=True)]


def _size(size: int) -> str:
    return f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size / 2**10:g} KiB"


def _define_flags() -> None:
    config_flags.DEFINE_config_file("config", None, "The run to check the pod for.")
    flags.mark_flag_as_required("config")
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, of several.")
    flags.DEFINE_integer("processes", None, "Number of processes.")
    flags.DEFINE_integer("process", None, "Which of them this is.")
    flags.DEFINE_integer("connect_timeout", 300, "Seconds for processes to meet.")
    flags.DEFINE_list("sizes", ["64", "1024", "16384", "65536"], "KiB a node sends.")
    flags.DEFINE_integer("repeats", 10, "Times that each is measured; the best counts.")
    flags.DEFINE_integer("steps", 20, "Training steps that are timed, once all are compiled.")
    flags.DEFINE_float("slow", 0.5, "Share of the median speed below which a link is slow.")


def main(_: Sequence[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    given = flags.FLAGS
    try:
        job = hosts.Job(given.coordinator, given.processes, given.process)
        job = hosts.find(job, os.environ)
        with hosts.connect(job, given.connect_timeout, given.config.watchdog_seconds):
            sizes = [1024 * int(size) for size in given.sizes]
            code = check(given.config, sizes, given.repeats, given.steps, given.slow)
    except (ConfigError, hosts.HostsError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(2)  # at its usual end, JAX would wait for the other processes
    sys.exit(code)


if __name__ == "__main__":
    _define_flags()
    app.run(main)
