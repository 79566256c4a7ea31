"""The check of one accelerator, on a CPU."""

import json

from experiments import gpu_check
from tests import lifts


def test_a_small_check(tmp_path, monkeypatch, capsys):
    few = ("decentlam",)
    monkeypatch.setattr(lifts, "ALGORITHMS", {key: lifts.ALGORITHMS[key] for key in few})
    monkeypatch.setattr(gpu_check, "NODES", (2,))
    assert gpu_check.main(["--small", f"--out={tmp_path / 'gpu.json'}"]) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert set(found["deviations"]) == set(few)
    assert max(found["deviations"].values()) < 1e-5
    (entry,) = found["throughput"]
    assert set(entry["step_s"]) == {"gossip", "without gossip", "all-reduce", "one after another"}
    assert entry["tokens_per_second"]["gossip"] * entry["step_s"]["gossip"] == 2 * 32
    assert "one after another" in capsys.readouterr().out


def test_a_wrong_number_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "deviations", lambda: {"dsgd": float("nan")})
    monkeypatch.setattr(gpu_check, "throughput", lambda *_: {"nodes": 4, "tokens_per_second": {}})
    assert gpu_check.main(["--small", f"--out={tmp_path / 'gpu.json'}"]) == 1
    assert capsys.readouterr().err == "error: dsgd deviate by more than 0.0001\n"
