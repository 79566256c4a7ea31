"""README's code and commands run, its tables are the results, notebooks equal their scripts."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import jupytext
import pytest

from experiments.fashion_mnist import run as fashion_mnist_study
from experiments.quickstart import run as quickstart_study
from experiments.study import mean_and_error

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def _blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("code", _blocks("python"), ids=lambda code: code.split("\n")[3][:30])
def test_readme_code_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})


SCRIPTS = [block for block in _blocks("bash") if "python -m" in block]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script[-40:].strip())
def test_readme_commands_run(script, tmp_path):
    """The lines of a block, one after another; training stops early."""
    for line in script.splitlines():
        words = shlex.split(line, comments=True)
        if "python" not in words:
            continue
        environment = dict(word.split("=") for word in words if word.startswith("JAX_"))
        words = [sys.executable, *words[words.index("python") + 1 :]]
        words = [re.sub(r"(^|=)runs/", rf"\1{tmp_path}/", word) for word in words]
        if "jaxdec" in words:
            words.append("--config.steps=12")
        done = subprocess.run(
            words,
            cwd=ROOT,
            env=os.environ | environment | {"TFDS_DATA_DIR": str(tmp_path / "data")},
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert done.returncode == 0, (line, done.stderr)


def test_readme_error_is_what_is_printed(tmp_path):
    (block,) = _blocks("console")
    command, expected = block.strip().split("\n")
    words = shlex.split(command.removeprefix("$ python "))
    words = [word.replace("=runs/", f"={tmp_path}/") for word in words]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.strip()) == (2, expected)


def test_readme_shows_what_studies_found():
    outcomes = fashion_mnist_study.cnn.outcomes()
    gossip, allreduce = (
        mean_and_error(100 * outcomes[name].values("eval/accuracy"))
        for name in ("accumulated Adam, one-peer exponential", "allreduce Adam")
    )
    assert f"test accuracy | {gossip} % | {allreduce} % |" in README


def test_make_targets_are_named():
    (first, *_) = _blocks("bash")
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", first):
        assert f"\n{target}:" in makefile


def test_readme_shows_what_the_quickstart_study_found():
    table = quickstart_study.tables()["accuracy"]
    means = {row.split(" | ")[0].strip("| "): row.split(" | ")[1:] for row in table.split("\n")[2:]}
    for ours, theirs in [
        ("accumulated Adam, one-peer exponential graph", "accumulated Adam, one-peer exponential"),
        ("the same without gossip", "the same without gossip"),
        ("allreduce Adam", "allreduce Adam"),
    ]:
        assert f"| {ours} | {means[theirs][0]} %" in README


@pytest.mark.parametrize("script", sorted((ROOT / "colab").glob("*.py")), ids=lambda p: p.stem)
def test_notebooks_equal_their_scripts(script):
    notebook = jupytext.read(script.with_suffix(".ipynb"))
    cells = [(cell.cell_type, cell.source) for cell in jupytext.read(script).cells]
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == cells
    assert all(not cell.get("outputs") for cell in notebook.cells)
