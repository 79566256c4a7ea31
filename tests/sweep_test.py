"""Sweeps: runs in one program are the runs they stand for, and only missing ones are done."""

import json

import numpy as np
import pytest

from jaxdec import sweep as sweeps
from jaxdec.config import ConfigError
from jaxdec.train import train_and_evaluate

CONFIG = """
from configs import quickstart


def get_config():
    config = quickstart.get_config()
    config.steps = 12
    config.log_every = config.eval_every = 12
    config.schedule.warmup_steps = 2
    config.model.hidden = (16,)
    config.lift = "simulate"
    return config


def sweep(add):
    for seed in (0, 1):
        for rate in (1e-3, 1e-2):
            add(**{"seed": seed, "algorithm.learning_rate": rate})
    add(**{"topology.name": "ring"})
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG)
    return str(tmp_path / "config.py")


def test_runs_together_are_the_runs_alone(path, tmp_path):
    runs = sweeps.read(path)
    assert sweeps.groups(runs, most=8) == [[0, 1, 2, 3], [4]]
    assert sweeps.groups(runs, most=3) == [[0, 1, 2], [3], [4]]
    lines = sweeps.sweep(runs, tmp_path / "sweep")
    assert len({line["eval/loss"] for line in lines}) == 5
    for index in (2, 4):
        _, config = sweeps.read(path)[index]
        alone = train_and_evaluate(config, tmp_path / str(index))
        for name in ("eval/loss", "eval/loss_nodes", "consensus_distance", "train/loss"):
            if name in alone:
                np.testing.assert_allclose(lines[index][name], alone[name], rtol=2e-4)
        assert lines[index]["seed"] == alone["seed"]
        assert lines[index]["topology"] == alone["topology"]


def test_only_what_is_missing_is_done(path, tmp_path, monkeypatch):
    first = sweeps.sweep(sweeps.read(path), tmp_path)
    results = tmp_path / "results.jsonl"
    text = results.read_text().splitlines()
    results.write_text("\n".join([*text[:1], *text[2:4], text[4][:50]]) + "\n")
    trained = []

    class Counted(sweeps.Together):
        def __init__(self, members):
            trained.extend(members)
            super().__init__(members)

    monkeypatch.setattr(sweeps, "Together", Counted)
    again = sweeps.sweep(sweeps.read(path), tmp_path)
    assert len(trained) == 2
    assert [line["eval/loss"] for line in again] == pytest.approx(
        [line["eval/loss"] for line in first], rel=1e-4
    )


def test_the_command_prints_a_table(path, tmp_path, capsys):
    assert sweeps.main([f"--config={path}", f"--workdir={tmp_path / 'sweep'}"]) == 0
    out = capsys.readouterr().out
    assert "learning_rate" in out
    assert "0.01" in out
    lines = (tmp_path / "sweep" / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["overrides"].get("seed") for line in lines] == [0, 0, 1, 1, None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("def sweep", "def swept"), "has no sweep"),
        (("topology.name", "topology.nam"), "sweep adds .*nam"),
        (('"ring"', '"rnig"'), "did you mean ring"),
        (("add(**", 'add("small", **'), "takes 0 positional arguments but 1"),
    ],
    ids=str,
)
def test_bad_sweeps_are_named_before_any_run(change, message, path, tmp_path):
    (tmp_path / "config.py").write_text(CONFIG.replace(*change))
    with pytest.raises(ConfigError, match=message):
        sweeps.read(path)


def test_a_config_that_is_not_there(tmp_path, capsys):
    assert sweeps.main(["--config=none.py", f"--workdir={tmp_path / 'sweep'}"]) == 2
    assert capsys.readouterr().err == "error: --config=none.py is no config file\n"
    assert not (tmp_path / "sweep").exists()


def test_a_variant_of_the_config_is_in_its_runs_name(path, tmp_path):
    text = CONFIG.replace("get_config():", "get_config(width='16'):")
    text = text.replace("(16,)", "(int(width),)").replace("add(**", 'add("32", **')
    (tmp_path / "config.py").write_text(text)
    overrides, config = sweeps.read(path)[0]
    assert overrides == {"width": "32", "seed": 0, "algorithm.learning_rate": 1e-3}
    assert config.model.hidden == (32,)
    (tmp_path / "config.py").write_text(text.replace('"32"', '"wide"'))
    with pytest.raises(ConfigError, match=r"sweep adds .*invalid literal"):
        sweeps.read(path)
