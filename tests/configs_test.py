"""Every file in configs/ builds and lowers its step, with no data set and no model allocated."""

import importlib
import inspect
import itertools
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from configs import default, quickstart
from jaxdec import algorithms, data, models, topology
from jaxdec import config as configs
from jaxdec.data.translation import END, PairsDataset, SentencePairs, Texts
from jaxdec.run import build

ROOT = pathlib.Path(__file__).parent.parent
FILES = sorted(path.stem for path in (ROOT / "configs").glob("*.py") if path.stem != "__init__")
SWEPT = sorted(set(FILES) - {"default", "quickstart"})
# What may follow --config=configs/NAME.py, after a colon; what is first is meant without it.
ARGUMENTS = {
    "cifar10": ("resnet20", "vgg16"),
    "imagenet_decentlam": ("2k", "8k", "16k", "32k"),
    "transformer_wmt14": ("base", "big"),
}
CASES = [
    (name, *arguments)
    for name in FILES
    for arguments in ([(a,) for a in ARGUMENTS[name]] if name in ARGUMENTS else [()])
]
# A step of these is traced for ten seconds or more; what differs between their phases, the
# exchanges, is lowered below with a small model.
ONE_PHASE = {("gpt2_small",), ("imagenet_accumulated_adam",), ("transformer_wmt14", "base")}
# These differ from 2k in their schedule and the sizes of batches alone, and from base in those of
# the model.
NOT_LOWERED = {
    *(("imagenet_decentlam", size) for size in ("8k", "16k", "32k")),
    ("transformer_wmt14", "big"),
}
PARAMETERS = {
    ("cifar10", "resnet20"): 269_722,
    ("cifar10", "vgg16"): 14_728_266,
    ("gpt2_small",): 124_439_808,
    ("imagenet_accumulated_adam",): 25_557_032,
    ("imagenet_decentlam", "2k"): 25_557_032,
    ("stdlib_gpt",): 1_057_152,
    ("transformer_wmt14", "base"): 63_045_632,
    ("transformer_wmt14", "big"): 214_171_648,
}


def _config(name, *arguments, **fields):
    config = importlib.import_module(f"configs.{name}").get_config(*arguments)
    config.update_from_flattened_dict(fields)
    return config


def _fields(config, prefix=""):
    """The names of all fields, dotted."""
    for name in config:
        if hasattr(config[name], "items"):
            yield from _fields(config[name], f"{prefix}{name}.")
        else:
            yield prefix + name


def _types(tree):
    return jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)


def _swept(name):
    """What a sweep adds: (arguments of get_config, fields)."""
    added = []
    sweep = importlib.import_module(f"configs.{name}").sweep
    sweep(lambda *arguments, **fields: added.append((arguments, fields)))
    return added


@pytest.fixture
def no_data(monkeypatch):
    """Data sets fail to open."""

    def refuse(name, *args, **fields):
        raise AssertionError(f"{name} was opened")

    monkeypatch.setattr(configs, "_load", refuse)


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("case", CASES, ids=":".join)
def test_a_config_builds_and_lowers_without_its_data_and_model(case):
    config = _config(*case)
    assert set(_fields(config)) == set(_fields(default.get_config()))
    run = build(config, abstract=True)
    params = jax.tree.leaves(run.model.params)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in params)
    assert case not in PARAMETERS or sum(leaf.size for leaf in params) == PARAMETERS[case]
    if case in NOT_LOWERED:
        return
    phases = sorted(set(run.phases))
    for phase in phases[:1] if case in ONE_PHASE else phases:
        state, metrics = run.lower(phase).out_info
        assert _types(state) == _types(run.abstract_state())
        assert metrics["train/loss_nodes"].shape == (config.nodes,)


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("name", sorted(name for name, *_ in ONE_PHASE))
def test_every_phase_of_the_large_lowers_with_a_small_model(name):
    small = {"data.name": "digits", "model.name": "mlp", "model.hidden": (8,), "accumulate": 1}
    unset = ["depth", "dtype", "layers", "heads", "width", "mlp", "dropout"]
    unset = [f"model.{field}" for field in unset] + ["data.folder", "data.vocabulary"]
    config = _config(name, **small, **dict.fromkeys([*unset, "data.context"]))
    run = build(config, abstract=True)
    texts = {run.lower(phase).as_text() for phase in set(run.phases)}
    assert len(texts) == len(set(run.phases)) > 1


@pytest.mark.parametrize(
    "model", [{}, {"model.name": "resnet20", "model.width": 4, "model.count": 1}]
)
@pytest.mark.parametrize("lift", ["simulate", "mesh"])
def test_what_is_lowered_is_the_step_of_the_run(lift, model):
    config = quickstart.get_config()
    config.update_from_flattened_dict(
        {"lift": lift, "accumulate": 2, "model.hidden": None if model else (32,), **model}
    )
    run, abstract = build(config), build(config, abstract=True)
    state, batch = run.initial_state(), run.placement.put_batch(next(run.batches()))
    ours = abstract.abstract_state(), abstract.abstract_batch()
    assert _types(ours) == _types((state, batch))
    if lift == "mesh":
        placed = jax.tree.map(lambda x: x.sharding, (state, batch))
        assert jax.tree.map(lambda x: x.sharding, ours) == placed
    lowered = run.train_step().lower(state, batch, phase=2)
    assert abstract.lower(2).as_text() == lowered.as_text()


def test_each_shape_of_sentence_pairs_is_lowered_as_the_run_has_it(monkeypatch):
    lengths = np.random.default_rng(0).integers(2, 30, (2, 400))
    texts = [Texts.of([[5] * (length - 1) + [END] for length in side]) for side in lengths]
    pairs = SentencePairs(*texts, shape=(29, 29))
    found = PairsDataset(pairs, pairs, input_shape=(29, 29), classes=50)
    small = {"batch_size": 480, "model.layers": 1, "model.width": 8, "model.mlp": 8}
    config = _config("trans_de_en", **small)
    monkeypatch.setattr(configs, "_load", lambda *args: found)
    run = build(config)
    assert run.batch_shapes == 4
    assert run.executables == 4 * len(set(run.phases))
    seen = {batch["labels"].shape[2]: batch for batch in itertools.islice(run.batches(), 60)}
    assert len(seen) == 4
    for shape, length in enumerate(sorted(seen)):
        batch = run.placement.put_batch(seen[length])
        assert _types(run.abstract_batch(shape)) == _types(batch)
    lowered = run.train_step().lower(run.initial_state(), batch, phase=1)
    assert run.lower(1, shape).as_text() == lowered.as_text()


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("name", SWEPT)
def test_a_sweep_holds_distinct_runs_that_are_valid(name):
    added = _swept(name)
    known = set(_fields(default.get_config()))
    runs = set()
    for arguments, fields in added:
        assert fields.keys() <= known
        config = _config(name, *arguments, **fields)
        runs.add(config.to_json())
        if config.seed == 0:  # seeds change nothing that is checked
            configs.validate(config, abstract=True)
    assert len(runs) == len(added)
    assert len({_config(name, *a, **fields).seed for a, fields in added}) >= 3
    assert {a for a, _ in added if a} == {(a,) for a in ARGUMENTS.get(name, ())}


@pytest.mark.parametrize("name", sorted(set(FILES) - {"default"}))
def test_a_header_has_the_command_and_what_to_expect(name):
    header = importlib.import_module(f"configs.{name}").__doc__
    assert f"Run: python -m jaxdec --config=configs/{name}.py" in header
    assert "Expect: " in header
    assert name not in SWEPT or ("Claim: " in header and "Hardware: " in header)
    assert all(argument in header for argument in ARGUMENTS.get(name, ()))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_without_an_argument_a_config_is_the_first(name):
    assert _config(name) == _config(name, ARGUMENTS[name][0])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("16k", "data.name='imagenet2012' is not prepared in"),
        ("4k", "batch '4k' is unknown; write :2k, :8k, :16k, :32k after the file"),
    ],
)
def test_an_argument_follows_the_file(argument, message, tmp_path):
    flags = [
        f"--config=configs/imagenet_decentlam.py:{argument}",
        f"--workdir={tmp_path / 'run'}",
        f"--config.data.data_dir={tmp_path}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "jaxdec", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("case", [case for case in CASES if case[-1] in ("8k", "vgg16", "32k")])
def test_steps_and_learning_rate_follow_the_batch(case):
    one, two = _config(*case), _config(*case)
    two.batch_size *= 2
    assert two.algorithm.learning_rate == 2 * one.algorithm.learning_rate
    for before, after in (
        (one.steps, two.steps),
        (one.schedule.warmup_steps, two.schedule.warmup_steps),
        (one.eval_every, two.eval_every),
    ):
        assert after == pytest.approx(before / 2, abs=1)


@pytest.mark.parametrize(
    ("case", "highest", "lowest"),
    [
        (("gpt2_small",), 6e-4, 6e-5),
        (("imagenet_accumulated_adam",), 1.5e-3, 1e-5),
        (("imagenet_decentlam", "2k"), 0.8, 0.8e-3),
        (("imagenet_decentlam", "32k"), 12.8, 0.0),
        (("transformer_wmt14", "base"), 7e-4, 1.4e-4),  # √(4000 / 100,000) of it
    ],
)
def test_the_learning_rate_goes_where_the_recipe_says(case, highest, lowest):
    config = _config(*case)
    schedule = configs.make_schedule(config)
    assert schedule(0) == 0
    assert schedule(config.schedule.warmup_steps) == pytest.approx(highest)
    assert schedule(config.steps) == pytest.approx(lowest, rel=1e-4)


@pytest.mark.parametrize(
    ("section", "table", "given"),
    [
        ("algorithm", algorithms.NAMES, {"gossip", "learning_rate"}),
        ("data", data.NAMES, {"data_dir"}),
        ("model", models.NAMES, {"self", "input_shape", "classes", "rngs"}),
        ("topology", topology.NAMES, {"n"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_field_of_every_name_is_in_the_default_config(section, table, given):
    fields = set(default.get_config()[section].keys())
    for name, factory in table.items():
        if isinstance(factory, type):
            factory = vars(factory)["__init__"]
        missing = set(inspect.signature(factory).parameters) - given - fields
        assert not missing, (name, missing)
