"""End to end: what a run writes, that it learns, and what it refuses."""

import json
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from configs import quickstart
from jaxdec import data, models, nodes, plots
from jaxdec import topology as topologies
from jaxdec.checkpoint import Checkpoints
from jaxdec.config import (
    ConfigError,
    lift_of,
    make_algorithm,
    make_gossip,
    make_schedule,
    validate,
)
from jaxdec.data import stdlib
from jaxdec.evaluate import Evaluation, token_scores
from jaxdec.metrics import StepClock
from jaxdec.placement import Placement
from jaxdec.run import Run, build, make_node_step
from jaxdec.state import AXES, TrainState
from jaxdec.train import TrainingDivergedError, _bytes_sent, train_and_evaluate
from tests import hlo, runs

SUMMARY_KEYS = {
    "algorithm",
    "topology",
    "nodes",
    "lift",
    "steps",
    "steps_per_second",
    "eval/loss",
    "eval/accuracy",
    "eval/loss_nodes",
    "consensus_distance",
    "bytes_sent_per_node_per_step",
}


def _config(**fields):
    config = quickstart.get_config()
    short = {"steps": 24, "log_every": 6, "eval_every": 12, "model.hidden": (32,)}
    config.update_from_flattened_dict(short | {"algorithm.learning_rate": 3e-3} | fields)
    return config


DROPOUT_GPT = {
    "model.name": "gpt",
    "model.hidden": None,
    "model.layers": 1,
    "model.heads": 2,
    "model.width": 16,
    "model.dropout": 0.1,
    "batch_size": 16,
    "data.name": "stdlib",
    "data.context": 16,
}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder of data with a small text prepared in it."""
    source, prepared = (tmp_path_factory.mktemp(name) for name in ("source", "prepared"))
    for i in range(24):
        (source / f"module_{i}.py").write_text(f"def f_{i}(x):\n    return x + {i}\n\n" * 20)
    stdlib.prepare(prepared, source)
    return str(prepared)


@pytest.mark.parametrize("lift", ["simulate", "mesh"])
def test_a_run_writes_what_it_promises(lift, tmp_path):
    summary = train_and_evaluate(_config(lift=lift), tmp_path)
    assert summary.keys() >= SUMMARY_KEYS
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert summary["lift"] == lift
    assert len(summary["eval/loss_nodes"]) == 8
    assert summary["eval/accuracy"] > 0.2
    assert summary["bytes_sent_per_node_per_step"] == 4 * (64 * 32 + 32 + 32 * 10 + 10)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in train] == [6, 12, 18, 24]
    for line in train:
        assert line["train/loss"] == pytest.approx(np.mean(line["train/loss_nodes"]))
    assert train[-1]["train/loss"] < train[0]["train/loss"]
    tests = [line for line in lines if "eval/loss" in line]
    assert [line["step"] for line in tests] == [12, 24]
    assert tests[-1]["consensus_distance"] == summary["consensus_distance"]
    for name in ("loss", "consensus_distance", "topology"):
        assert (tmp_path / "plots" / f"{name}.png").stat().st_size > 5_000
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = [event.value for event in events.Scalars("train/loss")]
    np.testing.assert_allclose(scalars, [line["train/loss"] for line in train], rtol=1e-6)


def test_both_lifts_are_one_run(tmp_path):
    simulated = train_and_evaluate(_config(lift="simulate"), tmp_path / "simulate")
    meshed = train_and_evaluate(_config(lift="mesh"), tmp_path / "mesh")
    assert (simulated.pop("lift"), meshed["lift"]) == ("simulate", "mesh")
    for key, value in runs.untimed(simulated).items():
        if isinstance(value, float | list):
            np.testing.assert_allclose(meshed[key], value, rtol=1e-4, atol=1e-6)
        else:
            assert meshed[key] == value


def test_a_run_is_a_function_of_its_config(tmp_path):
    first, again, other = (
        train_and_evaluate(_config(lift="simulate", seed=seed), tmp_path / name)
        for name, seed in [("first", 1), ("again", 1), ("other", 2)]
    )
    assert runs.untimed(first) == runs.untimed(again)
    assert first["eval/loss"] != other["eval/loss"]
    assert runs.records(tmp_path / "first") == runs.records(tmp_path / "again")


def test_gossip_teaches_more_than_isolation(tmp_path):
    fields = {"lift": "simulate", "steps": 150, "eval_every": 150}
    together = train_and_evaluate(_config(**fields), tmp_path / "together")
    alone = train_and_evaluate(
        _config(**fields, **{"topology.name": "isolated", "allow_unstable": True}),
        tmp_path / "alone",
    )
    assert alone["bytes_sent_per_node_per_step"] == 0
    assert together["eval/accuracy"] > np.mean(alone["eval/accuracy_nodes"]) + 0.015
    assert together["consensus_distance"] < 0.01 * alone["consensus_distance"]


@pytest.mark.parametrize(
    "fields",
    [
        {"algorithm.name": "allreduce", "algorithm.optimizer": "lamb"},
        {"algorithm.name": "slowmo"},
        {"algorithm.name": "decentlam", "topology.name": "ring", "algorithm.nesterov": True},
        {
            "algorithm.name": "d2_dmsgd",
            "topology.name": "ring",
            "topology.lazy": True,
            "wire_dtype": "int8",
        },
        {"topology.name": "alternating_exponential_ring", "topology.local": 2},
        {
            "algorithm.name": "choco",
            "algorithm.consensus_rate": 0.1,
            "algorithm.compressor": "random_k",
            "algorithm.keep": 0.1,
            "topology.name": "hierarchical",
            "topology.outer": "star",
            "topology.local": 2,
        },
        {"topology.name": "base_k", "nodes": 5, "batch_size": 50},
        {"topology.mean_every": 5, "wire_dtype": "bfloat16"},
        {"data.partition": "dirichlet", "data.alpha": 0.3},
        {"data.partition": "by_class", "algorithm.clip_norm": 1.0},
        {"nodes": 1, "batch_size": 16, "topology.name": "complete"},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_any_algorithm_topology_and_partition_runs(fields, tmp_path):
    rate = {"algorithm.learning_rate": 0.02, "algorithm.weight_decay": 1e-4}
    summary = train_and_evaluate(_config(steps=14, **rate, **fields), tmp_path)
    assert np.isfinite(summary["eval/loss"])


def test_nothing_compiles_after_the_first_period(tmp_path):
    lowered = []

    def listen(event, seconds, **_):
        del seconds
        if event.endswith("jaxpr_to_mlir_module_duration"):
            lowered.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    counts = []
    for steps in (6, 24):
        lowered.clear()
        config = _config(steps=steps, lift="mesh")
        train_and_evaluate(config, tmp_path / str(steps))
        counts.append(len(lowered))
    jax.monitoring.unregister_event_duration_listener(listen)
    assert counts[0] > 3
    assert counts[1] <= counts[0]


def test_the_trainers_step_holds_no_collective_but_gossip(corpus):
    """Its loss, metrics, accumulation and dropout included."""
    run = build(_config(lift="mesh", accumulate=2, **DROPOUT_GPT, **{"data.data_dir": corpus}))
    state, batch = run.initial_state(), run.placement.put_batch(next(run.batches()))
    model_bytes = sum(x.nbytes for x in jax.tree.leaves(run.model.params))
    text = run.train_step().lower(state, batch, phase=1).compile().as_text()
    assert hlo.collectives(text) == {"collective-permute": model_bytes}


@pytest.mark.parametrize(
    ("fields", "mesh"),
    [
        (
            {"topology.name": "alternating_exponential_ring", "topology.local": 2, **DROPOUT_GPT},
            {"node": 4, "local": 2},
        ),
        ({"nodes": 4, "accumulate": 2}, {"data": 2}),
    ],
    ids=["hosts that gossip as one", "devices that share a replica"],
)
def test_a_mesh_of_any_shape_is_the_same_run(fields, mesh, corpus):
    """Dropout's draws included. (Adam would make a step of the rounding of a zero.)"""
    if "data.name" in fields:
        fields = fields | {"data.data_dir": corpus}
    fields = fields | {"algorithm.name": "dmsgd", "algorithm.learning_rate": 0.1}
    found = []
    for lift in ("simulate", "mesh"):
        run = build(_config(lift=lift, mesh=mesh, **fields))
        state, step, batches = run.initial_state(), run.train_step(), run.batches()
        for phase in run.phases[:2] * 2:
            state, metrics = step(state, run.placement.put_batch(next(batches)), phase=phase)
        leaves = jax.tree.leaves((state.params, metrics))
        found.append([run.placement.fetch(leaf) for leaf in leaves])
    assert dict(run.placement.mesh.shape) == {"node": 4} | mesh
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * max(1.0, np.abs(ours).max()))


def test_a_finished_run_is_left_as_it_is(tmp_path, capsys):
    summary = train_and_evaluate(_config(), tmp_path)
    before = (tmp_path / "metrics.jsonl").stat().st_mtime_ns
    assert train_and_evaluate(_config(), tmp_path) == summary
    assert (tmp_path / "metrics.jsonl").stat().st_mtime_ns == before
    assert "nothing to do" in capsys.readouterr().out


def test_another_run_is_not_written_over(tmp_path):
    train_and_evaluate(_config(), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(ConfigError, match=r"seed: 0 against 5"):
        train_and_evaluate(_config(seed=5), tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json"])
def test_outputs_of_an_unknown_run_are_not_written_over(name, tmp_path):
    (tmp_path / name).write_text("precious")
    with pytest.raises(ConfigError, match=r"of an unknown run, without its config.json"):
        train_and_evaluate(_config(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "precious"


def test_a_config_json_of_something_else_is_named(tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"config.json is not a config"):
        train_and_evaluate(_config(), tmp_path)


def test_divergence_names_the_step_and_the_nodes(tmp_path):
    config = _config(
        **{
            "algorithm.name": "dsgd",
            "algorithm.learning_rate": 1e30,
            "schedule.warmup_steps": 0,
            "algorithm.weight_decay": 0.0,
        }
    )
    with pytest.raises(TrainingDivergedError, match=r"node .* is not finite at step \d+"):
        train_and_evaluate(config, tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nodes": 6, "batch_size": 60, "topology.name": "hypercube"}, "for any n use base_k"),
        ({"algorithm.name": "decentlam"}, "radius is 1.1135.*momentum up to 0.7 .*allow_unstable"),
        ({"algorithm.name": "d2_dmsgd", "topology.name": "ring"}, "topology.lazy=True"),
        ({"topology.name": "isolated"}, "not connected over its period"),
        ({"batch_size": 100}, "config.batch_size=100 .* such as 96"),
        ({"nodes": 16, "lift": "mesh"}, "8 are here; write config.lift='simulate'"),
        ({"lift": "messh"}, "did you mean mesh"),
        ({"eval_examples": 0}, "config.eval_examples=0 must be at least 1, or None for all"),
        ({"data.name": "digit"}, "did you mean digits"),
        ({"topology.name": "random_matching", "topology.seed": -1}, "seed=-1 must be at least 0"),
        ({"topology.mean_every": 10**7}, "mean_every=10000000 is never reached in config.steps=24"),
        ({"topology": {"name": "ring"}}, "config lacks the field 'mean_every'"),
        ({"schedule": {"name": "cosine"}}, "config lacks the field .*warmup_steps"),
        ({"schedule.name": "linear"}, "constant, cosine"),
        ({"schedule.name": "inverse_sqrt", "schedule.warmup_steps": 0}, "warmup_steps above 0"),
        ({"schedule.name": "steps", "schedule.boundaries": (9, 9)}, "must rise between"),
        ({"schedule.end": 2.0}, "config.schedule.end=2.0"),
        ({"accumulate": 3}, "config.nodes=8 × config.accumulate=3; .* such as 120"),
        ({"mesh": {"loca": 2}}, r"mesh.loca=2 is no axis; did you mean local\?"),
        ({"mesh.data": 0}, "config.mesh.data=0 must be at least 1"),
        ({"mesh.data": 3}, "config.nodes=8 × config.mesh.data=3; .* such as 120"),
        ({"mesh": {"node": 2, "local": 2}}, "node=2 × local=2 .*; write config.nodes=4"),
        ({"mesh.local": 2}, "local=2 needs a graph between hosts .* config.topology.local=2"),
        ({"mesh.data": 2, "lift": "mesh"}, "config.mesh.data=2 on as many devices, and 8 are here"),
        ({"compiler_options": "fast"}, "'fast' is no option; write xla_name=value"),
        ({"restore_rule": "means"}, "did you mean mean"),
        ({"recalibrate_batches": -1}, "recalibrate_batches=-1 must be 0 or more"),
        ({"data.name": "fashion_mnist", "data.data_dir": "/none"}, "jaxdec.data prepare fashion_"),
        ({"data.context": 8}, "data.context is set"),
        ({"schedule.warmup_steps": 24}, r"\[0, 24\)"),
        ({"algorithm.learning_rate": -1.0}, "learning_rate=-1.0"),
        ({"algorithm.name": "dmsg"}, "did you mean dmsgd"),
        ({"algorithm.momentum": 0.5}, "algorithm.momentum is set"),
        ({"topology.rows": 2}, "topology.rows is set"),
        ({"wire_dtype": "int4"}, "wire_dtype='int4'"),
        ({"wire_dtype": "bf16"}, "wire_dtype='bf16'"),
        ({"algorithm.name": "choco", "topology.name": "ring"}, "consensus_rate is not set"),
        (
            {"algorithm.name": "choco", "algorithm.consensus_rate": 0.3},
            "choco .*static graph; one_peer_exponential.*use one such as ring",
        ),
        (
            {
                "algorithm.name": "deep_squeeze",
                "algorithm.consensus_rate": 0.3,
                "wire_dtype": "bfloat16",
            },
            "wire_dtype='bfloat16' is set, but what deep_squeeze sends",
        ),
        ({"seed": -1}, "config.seed=-1"),
        ({"label_smoothing": 1.0}, "config.label_smoothing=1.0"),
        ({"model.hidden": (0,)}, r"model.hidden=\(0,\)"),
        (
            {
                "algorithm.name": "decentlam",
                "topology.name": "grid",
                "algorithm.nesterov": True,
            },
            "unstable on grid",
        ),
        ({"steps": 0}, "config.steps=0"),
        ({"max_executables": 2}, "write config.max_executables=3"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_configs_are_refused_before_anything_is_written(fields, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        train_and_evaluate(_config(**fields), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_schedule_warms_up_from_zero_and_ends_at_zero():
    schedule = make_schedule(_config(steps=120))
    assert schedule(0) == 0
    np.testing.assert_allclose(schedule(5), 3e-3 / 2, rtol=1e-6)
    np.testing.assert_allclose(schedule(10), 3e-3, rtol=1e-6)
    np.testing.assert_allclose(schedule(65), 3e-3 / 2, rtol=1e-5)
    np.testing.assert_allclose(schedule(120), 0, atol=1e-9)
    end = make_schedule(_config(steps=120, **{"schedule.end": 0.1}))
    np.testing.assert_allclose(end(120), 3e-4, rtol=1e-5)
    constant = make_schedule(_config(steps=120, **{"schedule.name": "constant"}))
    np.testing.assert_allclose([constant(10), constant(119)], 3e-3, rtol=1e-6)
    root = make_schedule(_config(steps=120, **{"schedule.name": "inverse_sqrt"}))
    np.testing.assert_allclose([root(5), root(10), root(40)], [1.5e-3, 3e-3, 1.5e-3], rtol=1e-6)
    fields = {"schedule.name": "steps", "schedule.boundaries": (30, 60)}
    steps = make_schedule(_config(steps=120, **fields))
    rates = [steps(t) for t in (10, 29, 30, 59, 60, 119)]
    np.testing.assert_allclose(rates, [3e-3, 3e-3, 3e-4, 3e-4, 3e-5, 3e-5], rtol=1e-5)


def test_the_config_reaches_the_algorithm():
    def update(**fields):
        config = _config(**{"schedule.warmup_steps": 0, "algorithm.name": "dsgd"} | fields)
        tx = make_algorithm(config, make_gossip(config, topologies.isolated(8)))
        x, g = jnp.float32(1.0), jnp.float32(4.0)
        return float(tx.update(g, tx.init(x), x)[0]) / -3e-3

    assert update(**{"algorithm.weight_decay": 0.0}) == pytest.approx(4)
    assert update(**{"algorithm.weight_decay": 0.5}) == pytest.approx(4.5)
    assert update(**{"algorithm.weight_decay": 0.0, "algorithm.clip_norm": 1.0}) == pytest.approx(1)


def test_a_bfloat16_wire_halves_the_bytes(tmp_path):
    full, half = (
        train_and_evaluate(_config(steps=6, wire_dtype=wire), tmp_path / str(wire))
        for wire in (None, "bfloat16")
    )
    key = "bytes_sent_per_node_per_step"
    assert half[key] == full[key] / 2
    assert half["eval/loss"] != full["eval/loss"]


def test_the_bytes_of_a_run_are_those_of_its_messages():
    choco = {"algorithm.name": "choco", "algorithm.consensus_rate": 0.1, "topology.name": "ring"}
    tenth = {"algorithm.compressor": "random_k", "algorithm.keep": 0.1}
    # Of 64 × 32, 32, 32 × 10 and 10 entries.
    assert _bytes_sent(build(_config(**choco, **tenth))) == 2 * 4 * (205 + 3 + 32 + 1)
    assert _bytes_sent(build(_config(wire_dtype="int8"))) == 2410 + 4 * (8 + 1 + 2 + 1)


def test_gossip_draws_by_a_key_of_seed_and_step_that_all_nodes_share():
    def apply(params, statistics, inputs, key):
        return inputs * params, jax.random.key_data(key)

    def update(updates, state, params=None, *, key, **extra):
        return updates, jax.random.key_data(key)

    tx = optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(2, jnp.uint32), update)
    batch = {"inputs": jnp.ones((4, 1, 10)), "labels": jnp.zeros((4, 1), jnp.int32)}
    seen, own = [], []

    def step(state, batch, seed, *, phase):
        return make_node_step(apply, tx, seed=seed)(state, batch, phase=phase)

    step = nodes.simulate(step, (AXES, 0, None), (AXES, 0), donate_argnums=())
    empty = jnp.zeros((4, 2), jnp.uint32)
    for seed, first in ((0, 0), (0, 1), (1, 0)):
        state = TrainState(jnp.int32(first), jnp.ones(4), empty, empty)
        state, _ = step(state, batch, jnp.int32(seed), phase=0)
        (key,) = np.unique(state.opt_state, axis=0)
        seen.append(tuple(key))
        own += [tuple(key) for key in np.asarray(state.statistics)]
    assert len(set(seen) | set(own)) == 3 + 3 * 4


def test_the_seed_decides_the_initial_model():
    first, other = (build(_config(seed=seed)).model.params for seed in (0, 1))
    assert not np.array_equal(jax.tree.leaves(first)[1], jax.tree.leaves(other)[1])


def test_the_mean_model_is_evaluated_and_each_node_is():
    def apply(params, statistics, inputs):
        return params * inputs, statistics

    inputs = np.float32([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    test = data.ArrayExamples(inputs, np.array([0, 1, 1]))
    # The last batch of two is filled up, and what fills it does not count.
    found = Evaluation(apply, Placement(2), test, batch_size=2)(jnp.asarray([4.0, 0.0]), {})
    expected = np.log1p(np.exp(-np.asarray([2.0, 4.0, 0.0])))
    np.testing.assert_allclose(found["eval/loss"], expected[0], rtol=1e-5)
    np.testing.assert_allclose(found["eval/loss_nodes"], expected[1:], rtol=1e-5)
    assert found["consensus_distance"] == 2


def test_the_mean_model_may_be_evaluated_on_a_part_of_the_test_split():
    run = build(_config(lift="simulate", eval_examples=90, eval_batch=40))
    state = run.initial_state()
    found = run.evaluation()(state.params, state.statistics)
    batch = run.dataset.test.take(np.arange(0, 360, 4))
    logits, _ = run.model.apply(run.model.params, run.model.statistics, batch["inputs"])
    assert found["eval/accuracy"] == pytest.approx(np.mean(logits.argmax(-1) == batch["labels"]))
    whole = build(_config(lift="simulate", eval_examples=5000)).evaluation()
    assert len(whole._examples) == 360


def test_label_smoothing_is_of_the_training_loss():
    loss, correct = token_scores(jnp.asarray([[2.0, 0.0]]), jnp.asarray([0]), label_smoothing=0.2)
    log_normalizer = np.log(np.exp(2) + 1)
    np.testing.assert_allclose(loss, log_normalizer - 0.9 * 2, rtol=1e-6)
    assert correct == 1


def test_accumulation_is_the_same_step():
    """Of a padded text batch, whose parts count different numbers of labels."""
    built = [build(_config(accumulate=parts, lift="simulate")) for parts in (1, 4)]
    rng = np.random.default_rng(0)
    batch = {
        "inputs": rng.standard_normal((8, 16, 8, 8)).astype(np.float32),
        "labels": rng.integers(-1, 10, (8, 16)).astype(np.int32),
    }
    whole, parts = (run.train_step()(run.initial_state(), batch, phase=0) for run in built)
    for left, right in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


SMALL_NORM = {"model.name": "small_norm", "model.hidden": None, "batch_size": 64}


@pytest.mark.parametrize("lift", ["simulate", "mesh"])
@pytest.mark.parametrize("batches", [0, 3])
def test_batch_statistics_are_node_local_and_meant_or_gathered_for_the_mean_model(
    batches, lift, monkeypatch
):
    monkeypatch.setitem(models.NAMES, "small_norm", runs.SmallNorm)
    fields = {"data.partition": "by_class", "recalibrate_batches": batches, "lift": lift}
    run = build(_config(**SMALL_NORM, **fields))
    state, source = run.initial_state(), run.batches()
    step = run.train_step()
    for t in range(3):
        batch = run.placement.put_batch(next(source))
        state, _ = step(state, batch, phase=run.phases[t % len(run.phases)])
    stacked = [np.asarray(x) for x in jax.tree.leaves(state.statistics)]
    assert all(np.ptp(x, axis=0).max() > 0 for x in stacked)
    params, statistics = run.evaluation().mean_model(state.params, state.statistics)
    means = [x.mean(axis=0) for x in stacked]
    close = [
        np.allclose(x, y, rtol=1e-5, atol=1e-6)
        for x, y in zip(jax.tree.leaves(statistics), means, strict=True)
    ]
    assert all(close) == (batches == 0)
    if batches:
        expected = jax.tree.unflatten(jax.tree.structure(statistics), means)
        for t in range(batches):
            inputs = run._node_batches(range(8))[t]["inputs"].reshape(-1, 8, 8)
            _, expected = run.model.apply(params, expected, inputs, key=jax.random.key(0))
        for left, right in zip(*map(jax.tree.leaves, (statistics, expected)), strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


def test_dropout_differs_by_step_and_node_and_is_off_in_evaluation(corpus):
    fields = {"algorithm.learning_rate": 0.0, "data.data_dir": corpus}
    run = build(_config(lift="simulate", **fields, **DROPOUT_GPT))
    state, step = run.initial_state(), run.train_step()
    same = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), next(run.batches()))
    losses = []
    for _ in range(2):
        state, metrics = step(state, same, phase=0)
        losses.append(np.asarray(metrics["train/loss_nodes"]))
    assert len(np.unique(losses)) == 16
    evaluation = run.evaluation()
    first, again = (evaluation(state.params, state.statistics)["eval/loss"] for _ in range(2))
    assert first == again


def test_a_checkpoint_is_evaluated_and_nothing_is_written(tmp_path, capsys):
    summary = train_and_evaluate(_config(lift="simulate"), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for lift in ("simulate", "mesh"):
        scores = train_and_evaluate(_config(mode="evaluate", lift=lift), tmp_path)
        assert scores["step"] == 24
        assert scores["eval/loss"] == pytest.approx(summary["eval/loss"], rel=1e-5)
        assert scores["eval/accuracy_nodes"] == pytest.approx(summary["eval/accuracy_nodes"])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert "eval/accuracy_nodes" in capsys.readouterr().out
    for fields, message in [
        ({"nodes": 4}, "is a run of config.nodes=8"),
        ({"model.hidden": (8,)}, "--workdir=.* is of another run, with model.hidden"),
    ]:
        with pytest.raises(ConfigError, match=message):
            train_and_evaluate(_config(mode="evaluate", **fields), tmp_path)


def test_steps_are_traced_when_asked(tmp_path):
    train_and_evaluate(_config(steps=8, profile_steps=2, lift="simulate"), tmp_path)
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_records_go_to_wandb_when_asked(tmp_path, monkeypatch):
    logged = []

    class Board:
        def log(self, record, step):
            logged.append((step, record))

    def init(**settings):
        assert settings["project"] == "mine"
        assert settings["config"]["nodes"] == 8
        return Board()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    train_and_evaluate(_config(steps=12, wandb="mine", lift="simulate"), tmp_path / "run")
    assert [step for step, _ in logged] == [6, 12, 12]
    assert "train/loss" in logged[0][1]
    assert "eval/loss" in logged[-1][1]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxdec\[wandb\]'"):
        train_and_evaluate(_config(steps=12, wandb="mine", lift="simulate"), tmp_path / "other")


def test_a_run_that_diverges_keeps_its_finite_checkpoints(tmp_path):
    """The rate grows past what is stable, long after the first checkpoints."""
    fields = {
        "algorithm.name": "dsgd",
        "algorithm.learning_rate": 1e12,
        "algorithm.weight_decay": 0.0,
        "schedule.name": "constant",
        "schedule.warmup_steps": 23,
        "checkpoint_every": 1,
        "log_every": 8,
        "lift": "simulate",
    }
    with pytest.raises(TrainingDivergedError, match=r"at step \d+; .*before it are kept"):
        train_and_evaluate(_config(**fields), tmp_path)
    kept = Checkpoints(tmp_path, read_only=True)
    run = build(_config(**fields))
    state, _ = kept.restore(kept.latest_step(), run.initial_state())
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


def test_unstable_pairs_run_when_asked():
    validate(_config(allow_unstable=True, **{"algorithm.name": "decentlam"}))


def test_more_nodes_than_examples_are_refused_before_the_stability_of_them_all():
    with pytest.raises(ConfigError, match="nodes=2000 is more than the 1437 training examples"):
        validate(_config(nodes=2000, batch_size=2000))


def test_the_lift_is_a_mesh_where_there_are_devices_enough():
    assert [lift_of(_config(nodes=n, batch_size=n)) for n in (1, 2, 8, 16)] == [
        "simulate",
        "mesh",
        "mesh",
        "simulate",
    ]
    assert lift_of(_config(lift="simulate")) == "simulate"


def test_steps_a_second_are_those_of_the_steps(monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    clock = StepClock(skip=2)
    for seconds in (50, 40, 30, 0.5, 0.5, 0.5):  # two rounds compile; the next resumes the clock
        now += seconds
        clock.step()
    clock.pause()
    now += 1000  # an evaluation
    for seconds in (60, 0.5):
        now += seconds
        clock.step()
    clock.pause()
    assert clock.steps_per_second == pytest.approx(4 / 2)
    assert clock.lap() == pytest.approx(4 / 2)


def test_each_step_has_the_phase_of_its_round(tmp_path, monkeypatch):
    phases, train_step = [], Run.train_step

    def recording(run):
        step = train_step(run)

        def recorded(state, batch, *, phase):
            phases.append(phase)
            return step(state, batch, phase=phase)

        return recorded

    monkeypatch.setattr(Run, "train_step", recording)
    fields = {"topology.name": "ring", "topology.mean_every": 3, "batch_size": 8}
    train_and_evaluate(_config(steps=7, lift="simulate", **fields), tmp_path)
    assert phases == [0, 0, 2, 0, 0, 2, 0]


def test_the_loss_plot_shows_nodes_their_mean_and_the_test():
    records = [
        {"step": 1, "train/loss": 2.0, "train/loss_nodes": [1.0, 3.0]},
        {"step": 1, "eval/loss": 5.0, "consensus_distance": 0.5},
        {"step": 2, "train/loss": 1.5, "train/loss_nodes": [1.0, 2.0]},
        {"step": 2, "eval/loss": 4.0, "consensus_distance": 0.25},
    ]
    lines = [line.get_xydata().tolist() for line in plots.plot_loss(records).axes[0].lines]
    assert [[1, 1.0], [2, 1.0]] in lines
    assert [[1, 3.0], [2, 2.0]] in lines
    assert [[1, 2.0], [2, 1.5]] in lines
    assert [[1, 5.0], [2, 4.0]] in lines
    lines = [line.get_xydata().tolist() for line in plots.plot_consensus(records).axes[0].lines]
    assert lines == [[[1, 0.5], [2, 0.25]]]


def _command(*arguments, workdir):
    return subprocess.run(
        [sys.executable, "-m", "jaxdec", "--config=configs/quickstart.py", *arguments]
        + ([f"--workdir={workdir}"] if workdir else []),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_the_command_trains(tmp_path):
    # What the sweep of another graph needs: a field that is set here, unset.
    unset = ("--config.schedule.warmup_steps=2", "--config.model.hidden=None")
    done = _command("--config.steps=12", *unset, workdir=tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "step 12" in done.stdout
    assert done.stderr == ""
    assert json.loads((tmp_path / "run" / "summary.json").read_text()).keys() >= SUMMARY_KEYS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.nodess=None"], 'config has no field nodess; Did you mean "nodes"'),
        (["--config.nodess=4"], 'config has no field nodess; Did you mean "nodes"'),
        (["--config.algorithm.nam=x"], "config has no field nam"),
        (["--config.nodes=many"], "--config.nodes=many"),
        (["--confg=x"], "Unknown command line flag 'confg'"),
        (["--config=configs/none.py"], "configs/none.py"),
        (["extra"], "unknown argument 'extra'"),
        (["--config.batch_size=100"], "such as 96"),
        (["--config.topology.name=from_matrices"], "topology.matrices is not set"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_commands_exit_with_two_and_one_line(arguments, message, tmp_path):
    done = _command(*arguments, workdir=tmp_path / "run")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_diverging_command_exits_with_one(tmp_path):
    done = _command(
        "--config.steps=30",
        "--config.algorithm.learning_rate=1e30",
        "--config.algorithm.name=dsgd",
        workdir=tmp_path / "run",
    )
    assert done.returncode == 1
    assert "is not finite at step" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_is_no_error():
    done = _command("--help", workdir=None)
    assert done.returncode == 0
    assert "--config=configs/NAME.py --workdir=DIR" in done.stdout


def test_a_command_without_workdir_says_so():
    done = _command(workdir=None)
    assert done.returncode == 2
    assert done.stderr == "error: --workdir is missing; write --workdir=...\n"


def test_a_workdir_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be used.*write another"):
        train_and_evaluate(_config(), tmp_path / "file" / "run")
