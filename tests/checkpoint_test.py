"""Killed, terminated and continued runs end as if nothing had happened; and starts from others."""

import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import quickstart
from jaxdec import restore, train
from jaxdec.checkpoint import CheckpointError, Checkpoints
from jaxdec.config import ConfigError
from jaxdec.state import TrainState
from jaxdec.train import TrainingInterruptedError, train_and_evaluate
from tests import runs

ROOT = pathlib.Path(__file__).parent.parent
ARGUMENTS = {
    "steps": 60,
    "log_every": 7,
    "eval_every": 20,
    "checkpoint_every": 25,
    "lift": "simulate",
    "batch_size": 32,
    "model.hidden": (16,),
    "algorithm.learning_rate": 3e-3,
}


def _config(**fields):
    config = quickstart.get_config()
    config.update_from_flattened_dict(ARGUMENTS | fields)
    return config


def _params(folder):
    """Every array of a run's newest checkpoint, as bytes."""
    manager = Checkpoints(folder)._manager
    restored = manager.restore(manager.latest_step())["state"]
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(restored)]


def _command(folder, **fields):
    flags = [f"--config.{key}={value}" for key, value in (ARGUMENTS | fields).items()]
    run = ["--config=configs/quickstart.py", f"--workdir={folder}"]
    return [sys.executable, "-m", "jaxdec", *run, *flags]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    train_and_evaluate(_config(), folder)
    return folder


def _assert_same_end(folder, uninterrupted):
    assert runs.records(folder) == runs.records(uninterrupted)
    assert _params(folder) == _params(uninterrupted)
    assert runs.summary(folder) == runs.summary(uninterrupted)


class _Killed(BaseException):
    pass


def _at_step(step, monkeypatch, do):
    """Call `do` in the middle of a step."""
    advance = train.RunLog.advance
    steps = itertools.count(1)

    def advance_or_do(log):
        if next(steps) == step:
            do()
        advance(log)

    monkeypatch.setattr(train.RunLog, "advance", advance_or_do)


@pytest.mark.parametrize("at", [3, 26, 57])
def test_a_run_killed_anywhere_ends_the_same(at, uninterrupted, tmp_path, monkeypatch):
    def die():
        raise _Killed

    _at_step(at, monkeypatch, die)
    with pytest.raises(_Killed):
        train_and_evaluate(_config(), tmp_path)
    monkeypatch.undo()
    train_and_evaluate(_config(), tmp_path)
    _assert_same_end(tmp_path, uninterrupted)


def test_sigkill_of_the_process(uninterrupted, tmp_path):
    process = subprocess.Popen(_command(tmp_path), cwd=ROOT, stdout=subprocess.DEVNULL)
    checkpoints = tmp_path / "checkpoints"
    deadline = time.monotonic() + 50
    while not list(checkpoints.glob("[0-9]*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.wait()
    train_and_evaluate(_config(), tmp_path)
    _assert_same_end(tmp_path, uninterrupted)


def test_a_full_disk_is_one_line_and_loses_nothing(uninterrupted, tmp_path):
    """Files may grow to 64 KiB: enough for all but a checkpoint.

    Other writes of the same checkpoint may end after Orbax closed its event loop, of which
    TensorStore prints traces; the last line is ours.
    """
    limited = ["bash", "-c", 'ulimit -f 64; exec "$0" "$@"', *_command(tmp_path)]
    done = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    *others, last = done.stderr.splitlines()
    assert re.fullmatch(r"error: writing a checkpoint .* failed: .*continues", last)
    assert {line for line in others if line.startswith("RuntimeError")} <= {
        "RuntimeError: Event loop is closed"
    }
    train_and_evaluate(_config(), tmp_path)
    _assert_same_end(tmp_path, uninterrupted)


def test_sigterm_saves_and_the_same_call_continues(uninterrupted, tmp_path, monkeypatch):
    _at_step(33, monkeypatch, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(TrainingInterruptedError, match="the same command continues"):
        train_and_evaluate(_config(), tmp_path)
    monkeypatch.undo()
    assert Checkpoints(tmp_path).latest_step() == 33
    train_and_evaluate(_config(), tmp_path)
    _assert_same_end(tmp_path, uninterrupted)


def test_a_half_written_checkpoint_is_never_picked_up(uninterrupted, tmp_path):
    config = _config()
    train_and_evaluate(config, tmp_path)
    (tmp_path / "summary.json").unlink()
    newest = tmp_path / "checkpoints" / "60"
    newest.rename(newest.with_name("60.orbax-checkpoint-tmp-1"))
    assert Checkpoints(tmp_path).latest_step() == 50
    train_and_evaluate(config, tmp_path)
    _assert_same_end(tmp_path, uninterrupted)


def test_the_newest_two_are_kept(uninterrupted):
    steps = sorted(int(path.name) for path in (uninterrupted / "checkpoints").iterdir())
    assert steps == [50, 60]


def test_the_same_run_goes_on_under_the_other_lift(tmp_path):
    """A checkpoint is of stacked arrays, wherever they lie."""
    train_and_evaluate(_config(lift="simulate"), tmp_path / "simulate")
    meshed = _config(lift="mesh", restore=str(tmp_path / "simulate"), steps=66)
    summary = train_and_evaluate(meshed, tmp_path / "mesh")
    assert summary["lift"] == "mesh"
    assert summary["steps"] == 66


@pytest.mark.parametrize("nodes", [4, 16])
def test_elastic_restore_keeps_the_mean_model(nodes, uninterrupted, tmp_path, capsys):
    config = _config(
        nodes=nodes, restore=str(uninterrupted), steps=64, **{"algorithm.learning_rate": 0.0}
    )
    summary = train_and_evaluate(config, tmp_path)
    assert f"8 nodes' mean model and mean buffers, to all {nodes}" in " ".join(
        capsys.readouterr().out.split()
    )
    before = json.loads((uninterrupted / "summary.json").read_text())
    assert summary["eval/loss"] == pytest.approx(before["eval/loss"], rel=1e-6)
    assert summary["consensus_distance"] < 1e-6


@pytest.mark.parametrize("nodes", [4, 16])
def test_nearest_nodes_keep_what_they_are(nodes, uninterrupted, tmp_path, capsys):
    config = _config(
        nodes=nodes,
        restore=str(uninterrupted),
        restore_rule="nearest",
        steps=62,
        **{"algorithm.learning_rate": 0.0, "topology.name": "isolated", "allow_unstable": True},
    )
    train_and_evaluate(config, tmp_path)
    said = " ".join(capsys.readouterr().out.split())
    assert f"each of {nodes} nodes from the nearest of its 8" in said
    ours, theirs = (
        Checkpoints(folder)._manager.restore(step)["state"]["params"]
        for folder, step in ((tmp_path, 62), (uninterrupted, 60))
    )
    chosen = [i * 8 // nodes for i in range(nodes)]
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(left, np.asarray(right)[chosen])


def test_training_goes_on_after_an_elastic_restore(uninterrupted, tmp_path):
    config = _config(nodes=4, restore=str(uninterrupted), steps=160)
    summary = train_and_evaluate(config, tmp_path)
    before = json.loads((uninterrupted / "summary.json").read_text())
    assert summary["eval/loss"] < before["eval/loss"]
    assert runs.records(tmp_path)[0]["step"] > 60


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model.hidden": (8,)}, r"model.hidden: \[16\] against \[8\]"),
        ({"algorithm.name": "dsgd"}, "algorithm.name: accumulated_adamw against dsgd"),
        ({"steps": 55}, "is at step 60 already"),
        ({"restore": "nowhere"}, "config.restore=nowhere holds no run"),
    ],
    ids=str,
)
def test_a_start_that_cannot_be_is_refused(fields, message, uninterrupted, tmp_path):
    config = _config(**({"restore": str(uninterrupted), "steps": 64} | fields))
    with pytest.raises(ConfigError, match=message):
        train_and_evaluate(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"topology.name": "grid"}, "another graph, config.topology.name: ring against grid"),
        ({"nodes": 4, "restore_rule": "nearest"}, "write config.restore_rule='mean'"),
        ({"nodes": 4}, "holds no checkpoint yet"),
        ({}, "holds no checkpoint yet"),
    ],
    ids=str,
)
def test_choco_goes_on_where_its_sums_over_neighbours_hold(fields, message, tmp_path):
    choco = {"algorithm.name": "choco", "algorithm.consensus_rate": 0.3, "topology.name": "ring"}
    source = tmp_path / "config.json"
    source.write_text(_config(**choco).to_json())
    with pytest.raises(ConfigError, match=message):
        restore.find(_config(**(choco | {"restore": str(tmp_path)} | fields)))


def test_a_source_without_checkpoints_is_refused_and_left_as_it_is(uninterrupted, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(uninterrupted / "config.json", source)
    with pytest.raises(ConfigError, match="holds no checkpoint yet"):
        train_and_evaluate(_config(restore=str(source), steps=64), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert [path.name for path in source.iterdir()] == ["config.json"]


def test_the_window_that_was_saved_is_that_of_its_step(tmp_path):
    """Saving is asynchronous, and the run appends to its window meanwhile."""
    checkpoints = Checkpoints(tmp_path)
    state = TrainState(jnp.int32(1), *(jnp.ones((2, 3)) for _ in range(3)))
    window = [{"train/loss_nodes": [float(i)]} for i in range(5)]
    checkpoints.save(1, state, window)
    window.extend({"train/loss_nodes": [9.0]} for _ in range(10_000))
    checkpoints.close()
    assert len(Checkpoints(tmp_path).restore(1, state)[1]) == 5


def test_a_corrupt_checkpoint_is_named(tmp_path):
    train_and_evaluate(_config(), tmp_path)
    (tmp_path / "summary.json").unlink()
    for file in (tmp_path / "checkpoints" / "60" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="reading the checkpoint of step 60"):
        train_and_evaluate(_config(), tmp_path)
