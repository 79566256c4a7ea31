"""Two processes are one run: they meet, save and end together, or say which is to blame."""

import contextlib
import itertools
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from configs import quickstart
from jaxdec import link, train
from jaxdec.checkpoint import Checkpoints
from jaxdec.config import ConfigError, lift_of, validate
from jaxdec.hosts import HostsError, Job, find
from jaxdec.link import Watch, meet
from jaxdec.run import build
from jaxdec.train import TrainingInterruptedError, train_and_evaluate
from tests import runs

ROOT = pathlib.Path(__file__).parent.parent
FIELDS = {
    "steps": 80,
    "log_every": 5,
    "eval_every": 40,
    "checkpoint_every": 30,
    "batch_size": 32,
    "model.hidden": (16,),
    "topology.name": "ring",
    "algorithm.learning_rate": 3e-3,
    "watchdog_seconds": 20.0,
}


def _config(**fields):
    config = quickstart.get_config()
    config.update_from_flattened_dict(FIELDS | fields)
    return config


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def _environment(devices=4):
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }


class _Pair:
    """Two processes × four devices of a run."""

    def __init__(self, folder, **fields):
        address = f"--coordinator=127.0.0.1:{_free_port()}"
        flags = [f"--config.{key}={value}" for key, value in (FIELDS | fields).items()]
        run = ["--config=configs/quickstart.py", f"--workdir={folder}", *flags]
        self.folder = folder
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "jaxdec", *run, address, "--processes=2", f"--process={i}"],
                cwd=ROOT,
                env=_environment(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for i in range(2)
        ]

    def wait_for_records(self, count=1):
        """Wait until metrics.jsonl has so many."""
        path = self.folder / "metrics.jsonl"
        deadline = time.monotonic() + 50
        while not path.exists() or path.read_text().count("\n") < count:
            assert time.monotonic() < deadline
            assert all(process.poll() is None for process in self.processes), self.end()
            time.sleep(0.01)

    def end(self, timeout=50):
        """Exit codes and error lines of both."""
        ends = []
        for process in self.processes:
            try:
                _, errors = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                _, errors = process.communicate()
                errors += "timed out"
            ends.append((process.returncode, errors))
        return ends


def _params(folder):
    manager = Checkpoints(folder, read_only=True)._manager
    assert manager.latest_step() == FIELDS["steps"]
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = build(_config()).initial_state()
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), like)
    restored, _ = Checkpoints(folder, read_only=True).restore(FIELDS["steps"], like)
    return jax.tree.leaves(restored)


def _assert_same_end(folder, other):
    ours, theirs = runs.records(folder), runs.records(other)
    assert [sorted(record) for record in ours] == [sorted(record) for record in theirs]
    for left, right in zip(ours, theirs, strict=True):
        for key, value in left.items():
            np.testing.assert_allclose(value, right[key], rtol=1e-6, atol=1e-6, err_msg=key)
    for left, right in zip(_params(folder), _params(other), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run, uninterrupted, in one process with eight devices."""
    folder = tmp_path_factory.mktemp("alone")
    train_and_evaluate(_config(), folder)
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Two processes with four devices each; the first is killed. What the second says to that."""
    pair = _Pair(tmp_path_factory.mktemp("together") / "run")
    pair.wait_for_records()
    pair.processes[0].kill()
    start = time.monotonic()
    _, (code, error) = pair.end()
    return pair, code, error, time.monotonic() - start


@pytest.fixture(scope="module")
def together(killed):
    """The same command again."""
    pair = _Pair(killed[0].folder)
    assert pair.end() == [(0, ""), (0, "")]
    return pair.folder


def test_a_death_brings_the_others_down_and_is_named(killed):
    pair, code, error, seconds = killed
    assert seconds < FIELDS["watchdog_seconds"]
    victim = f"process 0 (pid {pair.processes[0].pid} on {socket.gethostname()}, step "
    assert error.startswith(f"error: {victim}")
    assert error.endswith(") died; the same command continues from the newest checkpoint\n")
    assert error.count("\n") == code == 1


def test_two_processes_are_the_same_run_as_one(alone, together):
    _assert_same_end(together, alone)
    ours, theirs = runs.summary(together), runs.summary(alone)
    assert (ours.pop("processes"), theirs.pop("processes")) == (2, 1)
    assert ours.keys() == theirs.keys()
    assert ours["eval/loss"] == pytest.approx(theirs["eval/loss"], rel=1e-6)
    for name in ("loss", "consensus_distance", "topology"):
        assert (together / "plots" / f"{name}.png").exists()
    assert len(list(together.glob("events.out.tfevents.*"))) == 1
    assert not list(together.rglob("*.partial"))


def test_a_run_goes_from_one_process_to_two_and_back(alone, tmp_path, monkeypatch):
    """Each hands it over by SIGTERM; of the two, one gets it, and both save and end."""
    count = itertools.count(1)
    advance = train.RunLog.advance

    def advance_or_terminate(log):
        if next(count) == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        advance(log)

    monkeypatch.setattr(train.RunLog, "advance", advance_or_terminate)
    with pytest.raises(TrainingInterruptedError):
        train_and_evaluate(_config(), tmp_path)
    monkeypatch.undo()
    assert Checkpoints(tmp_path, read_only=True).latest_step() == 8

    pair = _Pair(tmp_path)
    pair.wait_for_records(2)  # of steps 5 and 10
    pair.processes[1].send_signal(signal.SIGTERM)
    (first, first_error), (second, second_error) = pair.end()
    assert (first, second) == (75, 75), (first_error, second_error)
    assert first_error == second_error
    step = Checkpoints(tmp_path, read_only=True).latest_step()
    assert 8 < step < FIELDS["steps"]
    assert f"SIGTERM at step {step}; the state is saved" in first_error

    train_and_evaluate(_config(), tmp_path)
    _assert_same_end(tmp_path, alone)


def test_a_stopped_process_brings_the_others_down(tmp_path):
    pair = _Pair(tmp_path / "run", steps=100_000, watchdog_seconds=4.0)
    pair.wait_for_records()
    victim = pair.processes[1]
    victim.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    code = pair.processes[0].wait(timeout=30)
    assert 3 < time.monotonic() - start < 8
    victim.kill()
    (_, error), _ = pair.end()
    assert code == 1
    assert error.count("\n") == 1, error
    assert f"process 1 (pid {victim.pid} on {socket.gethostname()}, step " in error
    assert "gave no sign for 4 s: it is stuck, or its host is gone" in error


def test_a_process_that_raises_gives_the_others_its_reason(tmp_path):
    (tmp_path / "metrics.partial").mkdir()  # process 0 cannot write its log; process 1 has none
    (first, own), (second, theirs) = _Pair(tmp_path).end()
    assert (first, second) == (1, 1)
    assert "metrics.partial" in own
    assert "error: process 0 (pid" in theirs
    assert "failed: [Errno 21] Is a directory" in theirs
    assert (own.count("\n"), theirs.count("\n")) == (1, 1)


def test_two_processes_start_from_half_the_nodes(tmp_path):
    four = {"nodes": 4, "steps": 20, "lift": "simulate"}
    source = train_and_evaluate(_config(**four), tmp_path / "four")
    pair = _Pair(
        tmp_path / "eight",
        steps=24,
        restore=tmp_path / "four",
        **{"algorithm.learning_rate": 0.0},
    )
    assert [code for code, _ in pair.end()] == [0, 0]
    summary = runs.summary(tmp_path / "eight")
    assert summary["nodes"] == 8
    assert summary["eval/loss"] == pytest.approx(source["eval/loss"], rel=1e-6)


def _gather(*calls):
    """Call all at once; their results or errors."""
    outcomes = [None] * len(calls)

    def call(i):
        try:
            outcomes[i] = meet(*calls[i])
        except HostsError as error:
            outcomes[i] = str(error)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return outcomes


@contextlib.contextmanager
def _wires(n):
    """The peers of n processes that have met, all in this one."""
    address = f"127.0.0.1:{_free_port()}"
    outcomes = _gather(*[(address, n, i, 10) for i in range(n)])
    peers = [found for found, _ in outcomes]
    yield peers
    for peer in itertools.chain(*peers):
        peer.wire.close()


def test_processes_of_other_counts_do_not_meet():
    address = f"127.0.0.1:{_free_port()}"
    first, second = _gather((address, 2, 0, 10), (address, 3, 1, 10))
    assert first == second
    assert "process 1 (pid" in first
    assert "came with --processes=3, and process 0 has --processes=2" in first


def test_two_processes_of_one_number_do_not_meet():
    address = f"127.0.0.1:{_free_port()}"
    outcomes = _gather((address, 3, 0, 10), (address, 3, 1, 10), (address, 3, 1, 10))
    assert all("--process=1 came twice" in outcome for outcome in outcomes)


def test_a_process_that_does_not_come_is_named():
    address = f"127.0.0.1:{_free_port()}"
    outcomes = _gather((address, 3, 0, 1.5), (address, 3, 2, 1.5))
    assert all("process 1 of 3 did not come" in outcome for outcome in outcomes)


def test_strangers_at_the_port_are_turned_away():
    port = _free_port()
    results = []
    thread = threading.Thread(
        target=lambda: results.append(_gather((f"127.0.0.1:{port}", 2, 0, 10)))
    )
    thread.start()
    for greeting in (b"GET / HTTP/1.1\n", b"[]\n", b""):
        with contextlib.suppress(OSError), _connected(port) as stranger:
            stranger.sendall(greeting)
    ((peers, _),) = _gather((f"127.0.0.1:{port}", 2, 1, 10))
    thread.join(20)
    assert len(results[0][0][0]) == len(peers) == 1
    for peer in (*peers, *results[0][0][0]):
        peer.wire.close()


def _connected(port):
    for _ in range(50):
        try:
            return socket.create_connection(("127.0.0.1", port))
        except OSError:
            time.sleep(0.05)
    raise AssertionError("nobody listens")


@pytest.mark.parametrize(
    ("coordinator", "process", "message"),
    [
        ("127.0.0.1", 0, "must be HOST:PORT"),
        ("127.0.0.1:port", 1, "must be HOST:PORT"),
        ("127.0.0.1:{port}", 1, "nobody answers at --coordinator=127.0.0.1:"),
        ("no.such.host.invalid:9999", 1, "nobody answers at --coordinator=no.such.host"),
    ],
)
def test_a_wrong_coordinator_is_named_in_time(coordinator, process, message):
    start = time.monotonic()
    with pytest.raises(HostsError, match=message):
        meet(coordinator.format(port=_free_port()), 2, process, 1)
    assert time.monotonic() - start < 5


def test_a_port_in_use_is_named(monkeypatch):
    monkeypatch.setattr(link, "ANSWER", 0.5)
    with socket.create_server(("", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(HostsError, match=r"cannot listen at .*in use.*write another port"):
            meet(address, 2, 0, 5)
        with pytest.raises(HostsError, match="is another program"):
            meet(address, 2, 1, 0.5)


def _until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_all_are_told_of_a_death_that_one_sees():
    """Process 2 has a wire with process 0 only."""
    with _wires(3) as peers:
        reasons = {0: [], 2: []}
        watches = [Watch(peers[i], 30, reasons[i].append) for i in (0, 2)]
        peers[1][0].send({"step": 7})
        time.sleep(0.3)
        peers[1][0].wire.close()
        _until(lambda: all(reasons.values()))
        for watch in watches:
            watch.stop()
        assert reasons[0] == reasons[2]
        assert "process 1 (pid" in reasons[0][0]
        assert reasons[0][0].endswith("step 7) died")


def test_silence_is_noticed_on_both_sides_and_beats_prevent_it():
    with _wires(3) as peers:
        reasons = {0: [], 1: []}
        watches = [Watch(peers[i], 1, reasons[i].append) for i in (0, 1)]
        start = time.monotonic()
        _until(lambda: all(reasons.values()))
        assert 0.9 < time.monotonic() - start < 4
        for watch in watches:
            watch.stop()
        assert "process 2" in reasons[0][0]
        assert reasons[1] == reasons[0]
    with _wires(2) as peers:
        reasons = []
        watches = [Watch(each, 1, reasons.append) for each in peers]
        time.sleep(3)
        assert reasons == []
        for watch in watches:
            watch.stop()


@pytest.mark.parametrize(("failure", "expected"), [(None, []), ("no space", ["failed: no space"])])
def test_an_end_is_no_death_and_a_failure_has_a_reason(failure, expected):
    with _wires(2) as peers:
        reasons = []
        first, second = Watch(peers[0], 1, reasons.append), Watch(peers[1], 1, print)
        second.stop(failure)
        peers[1][0].wire.close()
        time.sleep(3)
        first.stop()
        assert [reason.split(") ")[-1] for reason in reasons] == expected


SLURM = {
    "SLURM_JOB_ID": "4100",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NODELIST": "gpu-[007-009,12],big",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
ADDRESS = {"JAX_COORDINATOR_ADDRESS": "pod-0:9999"}
INDEX = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}


@pytest.mark.parametrize(
    ("given", "environment", "job"),
    [
        (Job(), {}, None),
        (Job(), ADDRESS, None),
        (Job("a:1", 1, 0), {}, None),
        (Job("a:1", 2, 1), {}, Job("a:1", 2, 1)),
        (Job(), SLURM, Job("gpu-007:61444", 4, 2)),
        (Job(), SLURM | {"SLURM_STEP_NODELIST": "big,gpu[1-2]"}, Job("big:61444", 4, 2)),
        (Job(), SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        (Job(), SLURM | ADDRESS, Job("pod-0:9999", 4, 2)),
        (Job("a:1"), SLURM | ADDRESS, Job("a:1", 4, 2)),
        (Job("a:1"), OPEN_MPI, Job("a:1", 2, 1)),
        (Job(), OPEN_MPI | ADDRESS, Job("pod-0:9999", 2, 1)),
        (Job(), {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, None),
        (Job(processes=4), INDEX | ADDRESS, Job("pod-0:9999", 4, 3)),
        (Job(), INDEX, None),
    ],
)
def test_flags_and_clusters_make_a_job(given, environment, job):
    assert find(given, environment) == job


@pytest.mark.parametrize(
    ("given", "environment", "message"),
    [
        (Job(processes=2), {}, "--coordinator=HOST:PORT, --process=I missing"),
        (Job(process=0), {}, "--coordinator=HOST:PORT, --processes=N missing"),
        (Job("a:1"), {}, "--processes=N, --process=I missing"),
        (Job("a:1", 2, 2), {}, r"--process=2 must be in \[0, --processes\) = \[0, 2\)"),
        (Job("a:1", 0, 0), {}, r"--process=0 must be in"),
        (Job(), OPEN_MPI, "--coordinator=HOST:PORT missing"),
        (Job(processes=4), INDEX, "--coordinator=HOST:PORT missing"),
    ],
)
def test_half_a_job_is_refused(given, environment, message):
    with pytest.raises(HostsError, match=message):
        find(given, environment)


def test_a_command_that_meets_nobody_exits_with_two_and_one_line(tmp_path):
    run = ["--config=configs/quickstart.py", f"--workdir={tmp_path}/run"]
    job = [f"--coordinator=127.0.0.1:{_free_port()}", "--processes=2", "--process=1"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxdec", *run, *job, "--connect_timeout=1"],
        cwd=ROOT,
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "error: nobody answers at --coordinator=127.0.0.1" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fields", "devices", "message"),
    [
        ({"lift": "simulate"}, [4, 4], "lift='simulate' is one process's, and this run has 2"),
        ({"nodes": 4}, [4, 4], "config.nodes=4 .* 2 processes have 4 devices each.*nodes=8"),
        ({"nodes": 16}, [4, 4], "config.nodes=16 .*write config.nodes=8"),
        ({}, [6, 2], "the 2 processes have 6, 2 devices; give each as many"),
    ],
)
def test_nodes_that_do_not_spread_over_processes_are_refused(fields, devices, message, monkeypatch):
    class Device:
        def __init__(self, process_index):
            self.process_index = process_index

    found = [Device(i) for i, count in enumerate(devices) for _ in range(count)]
    monkeypatch.setattr(jax, "process_count", lambda: len(devices))
    monkeypatch.setattr(jax, "devices", lambda: found)
    monkeypatch.setattr(jax, "device_count", lambda: len(found))
    with pytest.raises(ConfigError, match=message):
        validate(_config(**fields))
    assert lift_of(_config(nodes=16)) == "mesh"
