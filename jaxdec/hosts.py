"""Many processes as one run: how they find each other, agree, and end together."""

import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxdec.link import GRACE, HostsError, Watch, meet

__all__ = ["HostsError", "Job", "any_of", "connect", "find", "on_first", "taken"]


@dataclasses.dataclass(frozen=True)
class Job:
    """One process among those of a run; None: not said."""

    coordinator: str | None = None  # HOST:PORT of process 0
    processes: int | None = None
    process: int | None = None


def find(given: Job, environment: Mapping[str, str]) -> Job | None:
    """The job that this process belongs to; None: it runs alone.

    What flags leave open is taken from the variables of Open MPI 5, Slurm or a Kubernetes Indexed
    Job, and the coordinator from JAX_COORDINATOR_ADDRESS. Slurm says where process 0 is; the
    others do not. An Indexed Job has no variable for its size: without --processes, each pod runs
    alone.

    Raises:
      HostsError: flags and variables that do not make one job.

    >>> find(Job(), {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3",
    ...              "SLURM_STEP_NODELIST": "gpu[07-09,11]"})
    Job(coordinator='gpu07:61447', processes=4, process=3)
    >>> find(Job(), {}) is None
    True
    """
    there = _open_mpi(environment) or _slurm(environment) or _kubernetes(environment) or Job()
    address = environment.get("JAX_COORDINATOR_ADDRESS") or there.coordinator
    job = Job(
        given.coordinator or address,
        there.processes if given.processes is None else given.processes,
        there.process if given.process is None else given.process,
    )
    if job.processes == 1 or (given == Job() and job.processes is None):
        return None
    flags = {"coordinator": "HOST:PORT", "processes": "N", "process": "I"}
    missing = [
        f"--{field}={value}" for field, value in flags.items() if getattr(job, field) is None
    ]
    if missing:
        raise HostsError(
            f"{', '.join(missing)} missing; --coordinator, --processes and --process belong "
            "together, see experiments/launch/README.md"
        )
    assert job.processes is not None
    assert job.process is not None
    if not 0 <= job.process < job.processes:
        raise HostsError(
            f"--process={job.process} must be in [0, --processes) = [0, {job.processes})"
        )
    return job


def _open_mpi(environment: Mapping[str, str]) -> Job | None:
    if int(environment.get("OMPI_COMM_WORLD_SIZE", 1)) == 1:
        return None
    rank = environment["OMPI_COMM_WORLD_RANK"]
    return Job(processes=int(environment["OMPI_COMM_WORLD_SIZE"]), process=int(rank))


def _slurm(environment: Mapping[str, str]) -> Job | None:
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) == 1:
        return None
    first = re.match(r"([^,\[]+)(?:\[(\d+))?", environment["SLURM_STEP_NODELIST"])
    assert first is not None
    # Jobs that share a host meet at different ports, above the ephemeral ones.
    port = 61440 + int(environment["SLURM_JOB_ID"]) % 4096
    return Job(
        f"{first[1]}{first[2] or ''}:{port}",
        int(environment["SLURM_STEP_NUM_TASKS"]),
        int(environment["SLURM_PROCID"]),
    )


def _kubernetes(environment: Mapping[str, str]) -> Job | None:
    index = environment.get("JOB_COMPLETION_INDEX")
    return None if index is None else Job(process=int(index))


_watch: Watch | None = None  # of this process, as jax.distributed is


@contextlib.contextmanager
def connect(
    job: Job | None,
    timeout: float,
    watchdog_seconds: float,
    alike: tuple[type[BaseException], ...] = (),
) -> Iterator[None]:
    """Inside, this process and the others of its job are one run, and end together.

    Before anything else is done with JAX. Where one process dies, is silent for
    `watchdog_seconds`, or leaves with an exception, the others end with exit code 1 and one line
    that names it.

    Args:
      job: of `find`; None: nothing is done.
      timeout: seconds for all processes to meet.
      watchdog_seconds: as said.
      alike: exceptions that all processes leave with: no failure of one.

    Raises:
      HostsError: they did not meet.
    """
    global _watch
    if job is None:
        yield
        return
    assert job.coordinator is not None
    assert job.processes is not None
    assert job.process is not None
    if not watchdog_seconds > 0:
        raise HostsError(f"config.watchdog_seconds={watchdog_seconds} must be above 0")
    peers, service = meet(job.coordinator, job.processes, job.process, timeout)
    _watch = Watch(peers, watchdog_seconds)
    try:
        # SIGTERM is the trainer's; and JAX's own watchdog, with its stack traces, must be slower.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            service,
            job.processes,
            job.process,
            cluster_detection_method="deactivate",
            initialization_timeout=int(timeout),
            heartbeat_timeout_seconds=int(2 * watchdog_seconds) + 100,
            shutdown_timeout_seconds=60,
        )
        yield
    except alike:
        _watch.stop()
        raise
    except BaseException as error:
        # What devices raise when a peer is gone does not say which; the watch, which soon knows,
        # ends this process.
        time.sleep(GRACE / 4)
        if _watch.is_ending:
            time.sleep(2 * GRACE)
        _watch.stop(" ".join(str(error).split())[:300] or type(error).__name__)
        raise
    _watch.stop()


def taken(step: int) -> None:
    """Note how many steps this process has taken, for the others' error messages."""
    if _watch is not None:
        _watch.step(step)


def any_of(flag: bool) -> bool:
    """Whether the flag is set on any process; a collective where there are several."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


def on_first(f: Callable[[], Any], error: type[Exception]) -> Any:
    """What f, called on process 0 alone, returns there (as JSON) or raises; a collective.

    >>> on_first(lambda: {"a": 1}, ValueError)
    {'a': 1}

    Args:
      f: called on process 0.
      error: that all processes raise where f does; others are process 0's alone.
    """
    if jax.process_count() == 1:
        return f()
    outcome = ""
    if jax.process_index() == 0:
        try:
            outcome = json.dumps({"value": f()})
        except error as raised:
            outcome = json.dumps({"error": str(raised)})
    data = np.frombuffer(outcome.encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    padded = np.resize(data, length) if len(data) else np.zeros(length, np.uint8)
    result = json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))))
    if "error" in result:
        raise error(result["error"])
    return result["value"]
