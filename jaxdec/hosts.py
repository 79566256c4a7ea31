"""Many processes as one run: how they find each other, agree to stop, and notice who is gone."""

import dataclasses
import json
import os
import pathlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxdec.workdir import write_whole


class HostsError(RuntimeError):
    """The processes of a run do not find each other."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One process among those of a run; None: whatever the cluster's own variables say."""

    coordinator: str | None = None  # HOST:PORT of process 0
    processes: int | None = None
    process: int | None = None


def find(given: Job, environment: Mapping[str, str]) -> Job | None:
    """The job that this process belongs to; None: it runs alone.

    Flags go first; then Open MPI 5, whose variables name ranks but no coordinator; then Slurm and
    Kubernetes, which JAX reads by itself.

    Raises:
      HostsError: flags or variables that do not fit together.

    >>> find(Job(), {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1",
    ...              "JAX_COORDINATOR_ADDRESS": "node0:9999"})
    Job(coordinator='node0:9999', processes=2, process=1)
    """
    address = given.coordinator or environment.get("JAX_COORDINATOR_ADDRESS")
    if given.processes is not None or given.process is not None:
        if given.processes is None or given.process is None or address is None:
            raise HostsError(
                "--coordinator=HOST:PORT, --processes and --process belong together; write all "
                "three, or none under Slurm, Kubernetes or mpirun"
            )
        if not 0 <= given.process < given.processes:
            raise HostsError(
                f"--process={given.process} must be in [0, --processes) = [0, {given.processes})"
            )
        return Job(address, given.processes, given.process) if given.processes > 1 else None
    size = int(environment.get("OMPI_COMM_WORLD_SIZE", 1))
    if size > 1:
        if address is None:
            raise HostsError(
                f"mpirun started {size} processes, and does not say where process 0 is; write "
                "--coordinator=HOST:PORT, as experiments/launch/mpirun.sh does"
            )
        return Job(address, size, int(environment["OMPI_COMM_WORLD_RANK"]))
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return Job(given.coordinator)
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        return Job(given.coordinator)
    return None


def connect(job: Job | None, timeout: int) -> None:
    """Join the other processes of a job, before anything else is done with JAX.

    Raises:
      HostsError: they did not all meet within `timeout` seconds.
    """
    if job is None:
        return
    where = job.coordinator or "the address that the cluster gives"
    _check_reachable(job, timeout)
    try:
        jax.distributed.initialize(
            job.coordinator, job.processes, job.process, initialization_timeout=timeout
        )
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise HostsError(
            f"process {job.process} did not meet the others at {where} within {timeout} s; check "
            f"--coordinator, and that every process says the same --processes ({reason})"
        ) from error


def _check_reachable(job: Job, timeout: int) -> None:
    # JAX's own client ends the process with a stack trace where nobody answers.
    if job.coordinator is None or not job.process:
        return
    host, _, port = job.coordinator.rpartition(":")
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline:
                raise HostsError(
                    f"nobody answers at --coordinator={job.coordinator} after {timeout} s "
                    f"({error}); write the HOST:PORT of process 0, and see that it runs"
                ) from error
            time.sleep(0.2)
        else:
            return


def any_of(flag: bool) -> bool:
    """Whether the flag is set on any process; a collective where there are several."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


class Watchdog:
    """Ends this process when another one of the run is gone; a context manager.

    A device that waits for a lost peer waits for ever. So each process counts in a file of the
    shared folder, in a thread, and watches the others' files.

    Args:
      folder: shared by all processes.
      seconds: without a beat, and a process is taken for lost.
      end: what is called with the message; in its place, ends the process with exit code 1.
    """

    def __init__(
        self, folder: pathlib.Path, seconds: float, end: Callable[[str], None] | None = None
    ):
        self._folder = folder
        self._seconds = seconds
        self._end = end or _end_process
        self._count = 0
        self._step = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watchdog":
        if jax.process_count() > 1:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._beat("runs")
            multihost_utils.sync_global_devices("watchdog")  # nobody reads a former run's beats
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread.is_alive():
            self._stopped.set()
            self._thread.join()
            self._beat("ended" if error is None else f"failed: {error}")

    def step(self, step: int) -> None:
        """Note how far this process is."""
        self._step = step

    def _beat(self, state: str) -> None:
        self._count += 1
        beat = {
            "count": self._count,
            "step": self._step,
            "state": state,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        write_whole(self._folder / f"{jax.process_index()}.json", json.dumps(beat))

    def _watch(self) -> None:
        others = set(range(jax.process_count())) - {jax.process_index()}
        start = time.monotonic()
        seen = dict.fromkeys(others, (-1, start))
        while not self._stopped.wait(min(1.0, self._seconds / 4)):
            self._beat("runs")
            now = time.monotonic()
            for process in others:
                beat = json.loads((self._folder / f"{process}.json").read_text())
                where = (
                    f"process {process} (pid {beat['pid']} on {beat['host']}, step {beat['step']})"
                )
                if beat["state"].startswith("failed"):
                    self._end(f"{where} {beat['state']}")
                    return
                if beat["count"] != seen[process][0] or beat["state"] == "ended":
                    seen[process] = (beat["count"], now)
                elif now - seen[process][1] > self._seconds:
                    self._end(
                        f"{where} gave no sign for {self._seconds:g} s: it died or is stuck; "
                        "rerun the same command to continue from the newest checkpoint"
                    )
                    return


def _end_process(message: str) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(1)
