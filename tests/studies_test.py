"""Studies: READMEs hold the tables of their results, and a small cell of each runs."""

import dataclasses
import importlib
import pathlib

import jax
import numpy as np
import pytest

import jaxdec
from experiments import logistic
from experiments import study as studies

FOLDER = pathlib.Path(studies.__file__).parent
MODULES = {
    path.parent.name: importlib.import_module(f"experiments.{path.parent.name}.run")
    for path in sorted(FOLDER.glob("*/run.py"))
}
WITH_TABLES = [name for name, module in MODULES.items() if hasattr(module, "tables")]
RUN = [name for name in WITH_TABLES if (FOLDER / name / "results.jsonl").exists()]
TUNED = [name for name, module in MODULES.items() if hasattr(module, "STUDIES")]


@pytest.mark.parametrize("name", sorted({*WITH_TABLES} - {*RUN}))
def test_a_study_without_results_says_so(name):
    assert "Not run yet" in (FOLDER / name / "README.md").read_text()


@pytest.mark.parametrize("name", RUN)
def test_tables_are_the_results(name):
    readme = (FOLDER / name / "README.md").read_text()
    for title, table in MODULES[name].tables().items():
        assert f"<!-- table {title} -->\n{table}\n<!-- /table -->" in readme
    assert "FILL" not in readme + (FOLDER / name / "run.py").read_text()
    assert "Not run yet" not in readme


@pytest.mark.parametrize("name", RUN)
def test_plots_are_drawn_from_the_results(name):
    if hasattr(MODULES[name], "plot"):
        assert MODULES[name].plot().axes


SMALL = {
    "data.name": "digits",
    "batch_size": 64,
    "steps": 3,
    "schedule.name": "constant",
    "schedule.warmup_steps": 0,
    "model.name": "mlp",
    "model.hidden": (8,),
    "eval_examples": 100,
    "eval_every": 3,
}


@pytest.mark.parametrize("name", TUNED)
def test_a_small_cell_of_a_tuned_study_runs(name, tmp_path):
    """Its last one, on digits with a small model."""
    whole = MODULES[name].STUDIES[-1]
    config = whole.get_config()
    others = {f"model.{field}": None for field in config.model if field not in ("name", "hidden")}
    title, cell = list(whole.cells.items())[-1]
    small = studies.Cell(
        cell.overrides | others | {"data.context": None} | SMALL, tuple(cell.rates)[:2]
    )
    reduced = dataclasses.replace(
        whole, folder=tmp_path, cells={title: small}, score="eval/accuracy", seeds=(0, 1)
    )
    outcome = reduced.run()[title]
    assert outcome.rate in small.rates
    assert outcome.at_edge
    assert outcome.values(reduced.score).shape == (1,)
    assert len(studies.read_lines(tmp_path)) == 3


def test_a_small_cell_of_the_quickstart_study_runs():
    result = MODULES["quickstart"].run("allreduce Adam", seed=0, steps=150)
    assert result["accuracy"] > 0.5


def test_the_best_rate_is_chosen_by_the_first_seed_alone(tmp_path):
    whole = MODULES["fashion_mnist"].cnn
    reduced = dataclasses.replace(
        whole, folder=tmp_path, cells={"x": studies.Cell({}, (0.1, 0.2, 0.3))}, seeds=(0, 1)
    )

    def line(rate, seed, accuracy):
        overrides = {"algorithm.learning_rate": rate, "seed": seed}
        return {"overrides": overrides, "eval/accuracy": accuracy}

    lines = [line(0.1, 0, float("nan")), line(0.2, 0, 0.6), line(0.3, 0, 0.5)]
    lines += [line(0.2, 1, 0.4), line(0.3, 1, 0.9)]
    studies.write_lines(tmp_path, lines)
    outcome = reduced.outcomes()["x"]
    assert (outcome.rate, outcome.at_edge) == (0.2, False)
    assert outcome.values("eval/accuracy").tolist() == [0.4]
    with pytest.raises(LookupError, match=r"lacks .* run the study"):
        dataclasses.replace(reduced, seeds=(0, 2)).outcomes()


def test_bias_is_as_theory_says_at_a_small_cell():
    bias = MODULES["decentlam_bias"]
    A, b = bias.problem(0)
    topology = bias.mixing("mesh", "dmsgd")
    with jax.enable_x64(True):
        tx = bias.algorithm("dmsgd", topology, 1e-3, 0.5)
        models = bias.simulate(tx, A, b, records=1, every=4000)["last"][:, -1]
    expected = bias.theory("dmsgd", topology.matrix(0), 1e-3, 0.5, A, b)
    np.testing.assert_allclose(models, expected, rtol=0, atol=1e-8)


def test_predicted_and_seen_stability_agree_at_small_cells():
    stability = MODULES["stability"]
    for beta, diverges in ((0.5, False), (0.9, True)):
        topology = stability.mixing("decentlam", "exponential", 4)
        assert stability.diverges("decentlam", topology, beta) == diverges
        radius = jaxdec.analysis.spectral_radius("decentlam", topology, beta)
        assert (radius > 1) == diverges


def test_consensus_of_small_graphs():
    topologies = MODULES["topologies"]
    distances, sent = topologies.consensus(jaxdec.topology.one_peer_exponential(8))
    assert len(distances) == 4
    assert sent == [0, 1, 2, 3]
    slow, _ = topologies.consensus(jaxdec.topology.ring(8))
    assert 50 < len(slow) < 80


def test_gradients_shrink_with_the_horizon():
    gossip = jaxdec.Gossip(jaxdec.topology.ring(4))
    data = logistic.examples(4, seed=0)
    few, many = (
        logistic.mean_squared_gradient(
            jaxdec.algorithms.decentlam(gossip, 0.5 / steps**0.5), data, steps, seed=0
        )
        for steps in (100, 1600)
    )
    assert many < few / 2


def _guess(label, score, box):
    return np.array([label, score, *box])


def test_average_precision_by_hand():
    """Two digits of one class: found, found twice and missed; another class found exactly."""
    detection = MODULES["vision_variety"].detection
    boxes = np.float32([[[8, 8, 8], [24, 24, 8], [0, 0, 0]], [[16, 16, 16], [0, 0, 0], [0, 0, 0]]])
    classes = np.int32([[3, 3, -1], [5, -1, -1]])
    truth = detection.Canvases(np.zeros((2, 32, 32), np.float32), classes, boxes)
    right = _guess(3, 0.9, boxes[0, 0])
    twice = _guess(3, 0.8, boxes[0, 0] + [1, 0, 0])
    other = _guess(5, 0.7, boxes[1, 0])
    found = [np.stack([right, twice]), other[np.newaxis]]
    assert detection.mean_average_precision(found, truth) == pytest.approx((0.5 + 1.0) / 2)
    late = _guess(3, 0.6, boxes[0, 1])  # the third guess: precision 2/3 from there on
    found = [np.stack([right, twice, late]), other[np.newaxis]]
    expected = ((0.5 + 0.5 * 2 / 3) + 1.0) / 2
    assert detection.mean_average_precision(found, truth) == pytest.approx(expected)
    far = _guess(3, 0.9, boxes[0, 0] + [4, 0, 0])  # an IoU of a third
    assert detection.mean_average_precision([far[np.newaxis], np.empty((0, 5))], truth) == 0


def test_targets_are_decoded_as_what_is_drawn():
    detection = MODULES["vision_variety"].detection
    drawn = detection.canvases(20, "test", seed=1)
    batch = drawn.take(np.arange(20))
    there = (batch["classes"] >= 0)[..., np.newaxis]
    logits = np.where(there & (np.eye(10)[batch["classes"]] == 1), 9.0, -9.0)
    found = detection.detections(logits, batch["boxes"], most=3)
    assert detection.mean_average_precision(found, drawn) > 0.99


def test_detectors_train_together():
    detect = MODULES["vision_variety"].detect
    scores = detect("DecentLaM", [0.01, 0.1], [0, 0], steps=2, tested=10)
    assert np.isfinite(scores).all()
    assert len(scores) == 2


def test_a_report_without_a_place_is_named(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- table x -->\nold\n<!-- /table -->\nb\n")
    studies.report(tmp_path, {"x": "new"})
    assert readme.read_text() == "a\n<!-- table x -->\nnew\n<!-- /table -->\nb\n"
    with pytest.raises(ValueError, match="no place for table y"):
        studies.report(tmp_path, {"y": "new"})


def test_every_study_is_among_the_claims_or_says_that_it_tests_none():
    claims = (FOLDER / "CLAIMS.md").read_text()
    for name in WITH_TABLES:
        readme = (FOLDER / name / "README.md").read_text()
        assert f"({name}/README.md)" in claims or "none of a paper's" in readme
    assert "RESULT" not in claims
