"""DecentLaM, DmSGD and all-reduce's momentum SGD at a large batch, on five models and a detector.

Run: python -m experiments.vision_variety.run

Writes results.jsonl, detection.jsonl and accuracy.png beside this file and fills the README's
tables. Finished runs are not done again.
"""

import functools
import itertools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from ml_collections import ConfigDict
from rich.progress import track

import jaxdec
from configs import default
from experiments.study import (
    Cell,
    Study,
    difference,
    markdown,
    mean_and_error,
    read_lines,
    report,
    standard_error,
    write_lines,
)
from experiments.vision_variety import detection
from jaxdec import data, models

HERE = pathlib.Path(__file__).parent
NODES, ALPHA, MOMENTUM = 8, 0.1, 0.9
RATES = (0.01, 0.03, 0.1, 0.3)
METHODS = {
    "PmSGD": {"algorithm.name": "allreduce", "algorithm.optimizer": "momentum"},
    "DmSGD": {"algorithm.name": "dmsgd"},
    "DecentLaM": {"algorithm.name": "decentlam"},
}
MODELS: dict[str, dict[str, Any]] = {
    "MLP": {"model.name": "mlp", "model.hidden": (64,)},
    "CNN": {"model.name": "cnn", "model.channels": (8, 16), "model.dense": 64},
    "ResNet-8": {"model.name": "resnet20", "model.count": 1, "model.width": 8},
    "MobileNetV2, reduced": {
        "model.name": "mobilenet_v2",
        "model.width_factor": 0.125,
        "model.small_input": True,
    },
    "EfficientNet-B0, reduced": {
        "model.name": "efficientnet_b0",
        "model.width_factor": 0.125,
        "model.depth_factor": 0.3,
        "model.small_input": True,
    },
}


def get_config() -> ConfigDict:
    """Half of the digits a step."""
    config = default.get_config()
    config.batch_size = 704
    config.steps = 60
    config.schedule.name = "cosine"
    config.schedule.warmup_steps = 6
    config.topology.name = "symmetric_exponential"
    config.algorithm.momentum = MOMENTUM
    config.algorithm.weight_decay = 1e-4
    config.data.partition = "dirichlet"
    config.data.alpha = ALPHA
    return config


study = Study(
    HERE,
    get_config,
    {
        f"{model} {method}": Cell(MODELS[model] | METHODS[method], RATES)
        for model, method in itertools.product(MODELS, METHODS)
    },
)
STUDIES = (study,)

CANVASES, STEPS, BATCH = 2048, 150, 512


def detect(
    method: str, rates: list[float], seeds: list[int], steps: int = STEPS, tested: int = 500
) -> list[float]:
    """Train detectors, one a (rate, seed), in one program; the mAP of each's mean model."""
    fields = {name.removeprefix("algorithm."): value for name, value in METHODS[method].items()}
    gossip = jaxdec.Gossip(jaxdec.topology.symmetric_exponential(NODES))
    shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, steps // 10, steps)

    def algorithm(rate: Any) -> optax.GradientTransformationExtraArgs:
        return jaxdec.algorithms.by_name(
            fields["name"],
            gossip,
            learning_rate=lambda t: rate * shape(t),
            momentum=MOMENTUM,
            weight_decay=1e-4,
            optimizer=fields.get("optimizer"),
        )

    found = [models.functional(detection.Detector(rngs=nnx.Rngs(seed))) for seed in seeds]

    def loss(params: Any, batch: data.Batch) -> jax.Array:
        (logits, boxes), _ = found[0].apply(params, found[0].statistics, batch["inputs"])
        return detection.loss(logits, boxes, batch)

    def node_step(carry: Any, batch: data.Batch, rate: jax.Array) -> Any:
        params, state = carry
        grads = jax.grad(loss)(params, batch)
        updates, state = algorithm(rate).update(grads, state, params, phase=0)
        return optax.apply_updates(params, updates), state

    every = jaxdec.nodes.simulate(node_step, (0, 0, None), donate_argnums=())
    step = jax.jit(jax.vmap(every), donate_argnums=0)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(each.params for each in found))
    params = jax.tree.map(lambda x: jnp.repeat(x[:, None], NODES, axis=1), stacked)
    carry = params, jax.vmap(jax.vmap(algorithm(0.1).init))(params)
    batches = [_batches(seed, steps) for seed in seeds]
    for k in track(range(steps), f"detectors, {method}", transient=True):
        batch = jax.tree.map(lambda *leaves: np.stack(leaves), *(each[k] for each in batches))
        carry = jax.block_until_ready(step(carry, batch, jnp.asarray(rates, jnp.float32)))
    test = detection.canvases(tested, "test", seed=0)
    apply = jax.jit(found[0].apply)
    scores = []
    for run in range(len(seeds)):
        mean = jax.tree.map(lambda x, run=run: x[run].mean(axis=0), carry[0])
        answers, _ = apply(mean, found[0].statistics, jnp.asarray(test.images))
        guesses = detection.detections(*map(np.asarray, answers))
        scores.append(detection.mean_average_precision(guesses, test))
    return scores


def _batches(seed: int, steps: int) -> data.NodeBatches:
    train = _canvases()
    parts = data.split("dirichlet", train.groups, NODES, seed, alpha=ALPHA)
    return data.NodeBatches(train, parts, BATCH // NODES, seed, steps)


_canvases = functools.cache(lambda: detection.canvases(CANVASES, "train", seed=0))


def detectors() -> list[dict[str, Any]]:
    """Each method at every rate with seed 0, and at its best with seeds 1 to 3."""
    lines = []
    for method in METHODS:
        scores = detect(method, list(RATES), [0] * len(RATES))
        best = RATES[int(np.argmax(scores))]
        again = detect(method, [best] * 3, [1, 2, 3])
        lines.append(
            {
                "method": method,
                "tried": dict(zip(map(str, RATES), scores, strict=True)),
                "rate": best,
                "map": again,
            }
        )
    return lines


def _scores() -> dict[tuple[str, str], tuple[np.ndarray, bool]]:
    """By task and method: percent, over seeds; and whether the best rate is at the edge."""
    found = {}
    for name, outcome in study.outcomes().items():
        task, method = name.rsplit(" ", 1)
        found[task, method] = (100 * outcome.values("eval/accuracy"), outcome.at_edge)
    for line in read_lines(HERE, "detection.jsonl"):
        at_edge = line["rate"] in (min(RATES), max(RATES))
        found["detection, mAP", line["method"]] = (100 * np.array(line["map"]), at_edge)
    return found


TASKS = (*MODELS, "detection, mAP")


def tables() -> dict[str, str]:
    """The README's table, from the results."""
    rows, scores = [], _scores()
    for task in TASKS:
        found = {method: scores[task, method] for method in METHODS}
        cells = [mean_and_error(values) + "†" * edge for values, edge in found.values()]
        gaps = [
            difference(found[above][0], found[below][0])
            for above, below in (("PmSGD", "DmSGD"), ("DecentLaM", "DmSGD"))
        ]
        rows.append([task, *cells, *gaps])
    return {"tasks": markdown(["task", *METHODS, "PmSGD − DmSGD", "DecentLaM − DmSGD"], rows)}


def plot() -> Figure:
    """A bar a method, a group a task."""
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    axes, scores = figure.add_subplot(), _scores()
    for index, method in enumerate(METHODS):
        values = [scores[task, method][0] for task in TASKS]
        places = np.arange(len(TASKS)) + 0.27 * (index - 1)
        means, errors = [v.mean() for v in values], [standard_error(v) for v in values]
        axes.bar(places, means, 0.25, yerr=errors, capsize=3, label=method)
    axes.set_xticks(range(len(TASKS)), [task.replace(", ", ",\n") for task in TASKS])
    axes.set_ylabel("accuracy or mAP of the mean model, %")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(ncols=3, loc="lower right")
    return figure


def main() -> None:
    study.run(most=4)
    path = HERE / "detection.jsonl"
    if not path.exists():
        write_lines(HERE, detectors(), path.name)
    report(HERE, tables())
    plot().savefig(HERE / "accuracy.png", dpi=130)


if __name__ == "__main__":
    main()
