"""The launchers start, name and end processes; their files say what the README does."""

import doctest
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import yaml

from configs import quickstart
from experiments.launch import pod_check
from jaxdec.run import build

ROOT = pathlib.Path(__file__).parent.parent
LAUNCH = ROOT / "experiments" / "launch"


def _config(**fields):
    config = quickstart.get_config()
    short = {"model.hidden": (16,), "batch_size": 32, "topology.name": "ring"}
    config.update_from_flattened_dict(short | fields)
    return config


def _local(module, folder, *options, processes=2):
    """Starts a module, written to `folder`, by local.py."""
    (folder / "fake.py").write_text("import os, signal, sys, time\n" + module)
    return subprocess.Popen(
        [
            sys.executable,
            LAUNCH / "local.py",
            f"--processes={processes}",
            "--module=fake",
            *options,
        ],
        env=os.environ | {"PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_local_numbers_the_processes_and_their_output(tmp_path):
    module = "print(*sys.argv[1:], os.environ['JAX_NUM_CPU_DEVICES']); print('x', file=sys.stderr)"
    launcher = _local(module, tmp_path, "--devices=3", "--", "--config=a")
    out, err = launcher.communicate(timeout=30)
    assert launcher.returncode == 0
    assert sorted(err.split("\n")) == ["", "[0] x", "[1] x"]
    lines = sorted(out.splitlines())
    assert len({re.search(r"--coordinator=127.0.0.1:\d+", line)[0] for line in lines}) == 1
    for i, line in enumerate(lines):
        assert line.startswith(f"[{i}] --config=a --coordinator=")
        assert line.endswith(f"--processes=2 --process={i} 3")


def test_local_ends_all_with_the_code_of_the_first_that_fails(tmp_path):
    module = """
if "--process=1" in sys.argv:
    time.sleep(0.5)
    sys.exit(3)
if "--process=0" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
time.sleep(1)
time.sleep(60)
"""
    start = time.monotonic()
    launcher = _local(module, tmp_path, "--grace=1", processes=3)
    out, _ = launcher.communicate(timeout=30)
    assert launcher.returncode == 3
    assert out == "[0] asked\n"
    assert 5 < time.monotonic() - start < 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_local_hands_signals_on_and_waits_for_all(number, tmp_path):
    module = """
def save(*_):
    time.sleep("--process=1" in sys.argv)
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""
    launcher = _local(module, tmp_path)
    assert [launcher.stdout.readline()[4:] for _ in range(2)] == ["ready\n", "ready\n"]
    launcher.send_signal(number)
    out, _ = launcher.communicate(timeout=30)
    assert launcher.returncode == 75
    assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"]


def test_a_pod_is_checked():
    launch = [sys.executable, LAUNCH / "local.py", "--processes=2", "--devices=4"]
    sizes = ["--sizes=16,64", "--repeats=3", "--steps=4", "--slow=0.01"]
    config = ["--config=configs/quickstart.py", "--config.model.hidden=(16,)"]
    done = subprocess.run(
        [
            *launch,
            "--module=experiments.launch.pod_check",
            "--",
            *config,
            "--config.topology.name=ring",
            *sizes,
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "Gloo" not in line]
    assert lines[0].startswith("[0] ring(8): 8 nodes on 2 processes × 4 cpu")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert [row[0] for row in rows] == [
        "round 0, exchange 0",
        "round 0, exchange 1",
        "process 0 → 0",
        "process 0 → 1",
        "process 1 → 0",
        "process 1 → 1",
        "all-reduce",
    ]
    assert [int(row[1]) for row in rows] == [8, 8, 3, 1, 1, 3, 8]
    assert all(float(row[2]) > 0 for row in rows)
    assert lines[-1] == "[0] healthy"


def test_a_sick_pod_is_named(monkeypatch, capsys):
    """A link that drops its numbers, and a model that diverges."""
    exchange = pod_check.exchange

    def broken(x, source, axis_name):
        right = exchange(x, source, axis_name)
        return jax.numpy.where(jax.lax.axis_index(axis_name) == 5, x, right)

    monkeypatch.setattr(pod_check, "exchange", broken)
    fields = {"algorithm.name": "dsgd", "algorithm.learning_rate": 1e30}
    config = _config(**fields, **{"schedule.warmup_steps": 0})
    assert pod_check.check(config, sizes=[1024, 2048], repeats=1, steps=4, slow=1e-6) == 1
    said = capsys.readouterr().out
    assert "not healthy: round 0, exchange 0 brings node 5 wrong numbers" in said
    assert re.search(r"not healthy: after \d+ steps on ring\(8\) the gradient of node 0, 1", said)
    assert "\nhealthy" not in said


def test_all_reduce_has_no_exchanges_to_check():
    assert pod_check.sources(build(_config(**{"algorithm.name": "allreduce"}))) == {}


def test_doctests_of_the_check():
    assert doctest.testmod(pod_check) == (0, 2)


def test_links_are_the_busiest_of_the_rounds():
    found = [(7, 0, 1, 2, 3, 4, 5, 6), (4, 5, 6, 7, 0, 1, 2, 3)]
    between = pod_check.links(found, process_of=[0, 0, 0, 0, 1, 1, 1, 1])
    assert between[0, 1] == (0, 1, 2, 3, 0, 1, 2, 3)
    assert np.sum(np.array(between[1, 1]) != np.arange(8)) == 3


@pytest.mark.parametrize("script", ["slurm.sbatch", "mpirun.sh"])
def test_scripts_pass_shellcheck(script):
    shellcheck = pathlib.Path(sys.executable).with_name("shellcheck")
    done = subprocess.run(
        [shellcheck, LAUNCH / script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_slurm_requeues_what_saved_and_nothing_else(tmp_path):
    text = (LAUNCH / "slurm.sbatch").read_text()
    for directive in ("--signal=TERM@120", "--requeue", "--ntasks-per-node=1"):
        assert f"#SBATCH {directive}\n" in text
    fakes = {"srun": 'echo srun "$@"; exit "$CODE"', "scontrol": 'echo scontrol "$@"'}
    for name, body in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    for code in (75, 1, 0):
        done = subprocess.run(
            ["bash", LAUNCH / "slurm.sbatch", "--config=a b"],
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
            | {"CODE": str(code)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code
        assert ("scontrol requeue 7" in done.stdout) == (code == 75)
        assert "-m jaxdec --config=a b" in done.stdout


def test_mpirun_says_where_process_0_is(tmp_path):
    (tmp_path / "mpirun").write_text('#!/bin/sh\necho "$JAX_COORDINATOR_ADDRESS" "$@"\n')
    (tmp_path / "mpirun").chmod(0o755)
    (tmp_path / "hosts").write_text("# my hosts\n\nbig-1 slots=8\nbig-2 slots=8\n")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [LAUNCH / "mpirun.sh", tmp_path / "hosts", "--config=a"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith(f"big-1:9999 --hostfile {tmp_path}/hosts --map-by ppr:1:node ")
    assert done.stdout.endswith("-x JAX_COORDINATOR_ADDRESS python -m jaxdec --config=a\n")
    empty = subprocess.run(
        [LAUNCH / "mpirun.sh"], env=environment, capture_output=True, text=True, check=False
    )
    assert (empty.returncode, empty.stderr.split()[0]) == (2, "usage:")


def test_the_jobset_starts_as_many_pods_as_processes_where_they_look_for_the_first():
    jobset = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    assert jobset["spec"]["network"]["enableDNSHostnames"]
    (workers,) = jobset["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["backoffLimit"] == 0
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    flags = dict(flag.removeprefix("--").split("=") for flag in container["args"])
    assert job["parallelism"] == job["completions"] == int(flags["processes"])
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(flags["config.nodes"]) == gpus * job["parallelism"]
    (address,) = [e["value"] for e in container["env"] if e["name"] == "JAX_COORDINATOR_ADDRESS"]
    name = jobset["metadata"]["name"]
    assert address.split(":")[0] == f"{name}-{workers['name']}-0-0.{name}"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
