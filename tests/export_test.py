"""The exported mean model loads in plain Flax and is the mean model."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from configs import quickstart
from jaxdec import data, export, models
from jaxdec.train import train_and_evaluate
from tests import runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    config = quickstart.get_config()
    short = {"steps": 12, "eval_every": 12, "batch_size": 32, "algorithm.learning_rate": 0.01}
    config.update_from_flattened_dict(short | {"model.name": "small_norm", "model.hidden": None})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.NAMES, "small_norm", runs.SmallNorm)
        yield folder, train_and_evaluate(config, folder)


def test_the_mean_model_loads_without_jaxdecs_trainer(run, tmp_path, capsys):
    folder, summary = run
    assert export.main([str(folder), str(tmp_path / "out")]) == 0
    assert "mean model of step 12" in capsys.readouterr().out

    def make():
        return runs.SmallNorm((8, 8), 10, rngs=nnx.Rngs(0))

    graph, abstract = nnx.split(nnx.eval_shape(make))
    model = nnx.merge(graph, ocp.StandardCheckpointer().restore(tmp_path / "out", abstract))
    model.eval()
    test = data.load("digits").test.take(np.arange(360))
    accuracy = np.mean(np.argmax(model(test["inputs"]), axis=-1) == test["labels"])
    assert accuracy == pytest.approx(summary["eval/accuracy"], abs=1e-6)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nnx.state(model)))


def test_bad_folders_are_named(run, tmp_path, capsys):
    folder, _ = run
    assert export.main([str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert "holds no run" in capsys.readouterr().err
    (tmp_path / "there").mkdir()
    assert export.main([str(folder), str(tmp_path / "there")]) == 2
    assert "exists; write another folder" in capsys.readouterr().err
