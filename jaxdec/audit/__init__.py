"""Compile a config for machines that are not here, and tell whether its gossip is hidden there.

All figures are a compiler's and a roofline's: nothing is run.
"""

import dataclasses
import itertools
import math
import time

import numpy as np
from ml_collections import ConfigDict

from jaxdec import config as configs
from jaxdec.audit import hlo
from jaxdec.audit.schedule import Prediction, Schedule, predict, read
from jaxdec.audit.targets import Target
from jaxdec.compiler import Options
from jaxdec.config import ConfigError
from jaxdec.gossip import all_reduce_bytes
from jaxdec.run import Run, build
from jaxdec.topology import Topology

# Without a device, kernels cannot be timed against each other.
AHEAD_OF_TIME: dict[str, Options] = {
    "cuda": {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0},
}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One compiled step.

    Attributes:
      schedule: in which order it computes and communicates.
      prediction: its replay on the target.
      memory: bytes a device, by kind, by the compiler's own figure.
      seconds: that compiling took.
    """

    schedule: Schedule
    prediction: Prediction
    memory: dict[str, int]
    seconds: float

    @property
    def peak_memory(self) -> int:
        """Bytes a device: arguments and temporaries, and results that take no argument's place."""
        memory = self.memory
        return memory["argument"] + memory["output"] - memory["alias"] + memory["temporary"]


@dataclasses.dataclass(frozen=True)
class Audit:
    """What a config's step is on a target.

    Attributes:
      target: the machine.
      options: of XLA, that the trainer would give too.
      phases: each distinct round's compiled step.
      least_host_bytes: for each of them, the fewest that must leave the busiest host.
      allreduce: the same step with all-reduce in place of gossip; None: it is one already.
    """

    target: Target
    options: Options
    phases: dict[int, Compiled]
    least_host_bytes: dict[int, float]
    allreduce: Compiled | None


def audit(config: ConfigDict, target: Target) -> Audit:
    """Compile every distinct round of a config's step for a target.

    Raises:
      ConfigError: the config cannot run, or not on that many devices.
    """
    run = _build(config, target)
    phases = sorted(set(run.phases))
    is_allreduce = config.algorithm.name == "allreduce"
    return Audit(
        target=target,
        options=run.placement.compiler_options or {},
        phases={phase: _compile(run, phase, target) for phase in phases},
        least_host_bytes={phase: _least_host_bytes(run, phase, target) for phase in phases},
        allreduce=None if is_allreduce else _compile(_build(_allreduce(config), target), 0, target),
    )


def _build(config: ConfigDict, target: Target) -> Run:
    each = math.prod(configs.mesh_sizes(config).values()) // config.nodes
    if config.nodes * each != len(target.devices):
        raise ConfigError(
            f"config.nodes={config.nodes} take {each} devices each, and --target={target.name} has "
            f"{len(target.devices)}; write --config.nodes={len(target.devices) // each}"
        )
    config = config.copy_and_resolve_references()
    config.lift = "mesh"
    return build(config, abstract=True, devices=target.devices)


def _allreduce(config: ConfigDict) -> ConfigDict:
    """The baseline of a config: the same optimizer, its gradients averaged over all nodes."""
    config = config.copy_and_resolve_references()
    own = config.algorithm.to_dict()
    optimizer = "adamw" if "adam" in own["name"] else "momentum"
    kept = ("learning_rate", "weight_decay", "decay", "clip_norm", "b1", "b2", "eps", "momentum")
    config.algorithm.update({field: None for field in own if field not in kept})
    config.algorithm.update({"name": "allreduce", "optimizer": optimizer})
    return config


def _compile(run: Run, phase: int, target: Target) -> Compiled:
    mesh = run.placement.mesh
    assert mesh is not None
    lowered = run.lower(phase)
    start = time.perf_counter()
    compiled = lowered.compile(compiler_options=AHEAD_OF_TIME.get(target.platform))
    seconds = time.perf_counter() - start
    schedule = read(hlo.Module(str(compiled.as_text())), mesh, _hosts(run, target))
    memory = compiled.memory_analysis()
    return Compiled(
        schedule,
        predict(schedule, target.chip),
        {
            kind: getattr(memory, f"{name}_size_in_bytes")
            for kind, name in (
                ("argument", "argument"),
                ("output", "output"),
                ("alias", "alias"),
                ("temporary", "temp"),
            )
        },
        seconds,
    )


def _hosts(run: Run, target: Target) -> tuple[int, ...]:
    """The host of each device of the run's mesh, in its order."""
    mesh = run.placement.mesh
    assert mesh is not None
    host = {device.id: host for device, host in zip(target.devices, target.hosts, strict=True)}
    return tuple(host[device.id] for device in mesh.devices.flat)


def _least_host_bytes(run: Run, phase: int, target: Target) -> float:
    params, topology = run.model.params, run.topology
    hosts = len(set(target.hosts))
    if run.config.algorithm.name == "allreduce" or topology.is_mean(phase):
        return all_reduce_bytes(params, hosts)
    exchanges = topology.rounds[phase]
    messages = sum(s != i for exchange in exchanges for i, s in enumerate(exchange.source))
    flat = dataclasses.replace(run.gossip, local_axis=None, specs=None)
    model = flat.bytes_sent(params, phase) * topology.n / max(messages, 1)
    of_devices = _hosts(run, target)
    return model * least_messages(topology, phase, of_devices[:: len(of_devices) // topology.n])


def least_messages(topology: Topology, phase: int, hosts: tuple[int, ...]) -> int:
    """The fewest models that must leave the busiest host in a round, and cross to others.

    What host a's nodes need of host b's is W[a, b] x_b: as many vectors as that block has ranks.

    Args:
      topology: over nodes.
      phase: of the round.
      hosts: the host of each node.

    >>> import jaxdec
    >>> aer = jaxdec.topology.alternating_exponential_ring(8, local=4)
    >>> [least_messages(aer, phase, (0,) * 4 + (1,) * 4) for phase in range(2)]
    [0, 1]
    """
    matrix, of = topology.matrix(phase), np.array(hosts)
    blocks = {
        (to, host): matrix[np.ix_(of == to, of == host)]
        for to, host in itertools.permutations(set(hosts), 2)
    }
    sent = dict.fromkeys(hosts, 0)
    for (_, host), block in blocks.items():
        sent[host] += int(np.linalg.matrix_rank(block))
    return max(sent.values())
