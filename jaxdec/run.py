"""What a config stands for: one node's step, written once, and all that a run is built of."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

from jaxdec import config as configs
from jaxdec import data, models, nodes, translate
from jaxdec.evaluate import Apply, Evaluation, token_scores
from jaxdec.gossip import Gossip
from jaxdec.placement import Placement
from jaxdec.state import AXES, TrainState
from jaxdec.topology import Topology

Metrics = dict[str, jax.Array]


def make_node_step(
    apply: Apply,
    tx: optax.GradientTransformationExtraArgs,
    *,
    label_smoothing: float = 0.0,
    accumulate: int = 1,
    seed: int | jax.Array = 0,
    axes: str | tuple[str, ...] = "node",
) -> Callable[..., tuple[TrainState, Metrics]]:
    """One node's training step: (state, batch, phase=) → (state, metrics). Lift it with `nodes`.

    Args:
      apply: of `models.functional`.
      tx: the algorithm.
      label_smoothing: of the loss.
      accumulate: equal parts that a node's batch is taken in, one after another, to save memory.
      seed: of dropout, and of what gossip draws.
      axes: of the lift that hold replicas.
    """

    def loss_fn(
        params: Any, statistics: Any, part: data.Batch, count: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        logits, statistics = apply(params, statistics, part["inputs"], key=key)
        loss, correct = token_scores(logits, part["labels"], label_smoothing)
        return loss / count, (correct / count, statistics)

    gradient = jax.value_and_grad(loss_fn, has_aux=True)

    def node_step(
        state: TrainState, batch: data.Batch, *, phase: int
    ) -> tuple[TrainState, Metrics]:
        step_key = jax.random.fold_in(jax.random.key(seed), state.step)
        key = jax.random.fold_in(step_key, jax.lax.axis_index(axes))
        # The same on all nodes, and none of theirs.
        shared_key = jax.random.fold_in(step_key, jax.lax.axis_size(axes))
        count = jnp.maximum(jnp.sum(batch["labels"] >= 0), 1).astype(jnp.float32)
        if accumulate == 1:
            (loss, (accuracy, statistics)), grads = gradient(
                state.params, state.statistics, batch, count, key
            )
        else:
            # Every accumulate-th row: a part is spread over the axis "data" as the batch is.
            parts = jax.tree.map(
                lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), batch
            )

            def body(carry: Any, part: Any) -> Any:
                sums, statistics = carry
                (loss, (accuracy, statistics)), grads = gradient(
                    state.params, statistics, part[0], count, part[1]
                )
                return (jax.tree.map(jnp.add, sums, (loss, accuracy, grads)), statistics), None

            zero = jnp.zeros_like(count)
            zeros = (zero, zero, jax.tree.map(jnp.zeros_like, state.params))
            ((loss, accuracy, grads), statistics), _ = jax.lax.scan(
                body, (zeros, state.statistics), (parts, jax.random.split(key, accumulate))
            )
        updates, opt_state = tx.update(
            grads, state.opt_state, state.params, phase=phase, key=shared_key
        )
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "train/loss_nodes": loss,
            "train/accuracy_nodes": accuracy,
            "train/gradient_norm_nodes": optax.tree.norm(grads),
        }
        return TrainState(state.step + 1, params, statistics, opt_state), metrics

    return node_step


@dataclasses.dataclass(frozen=True)
class Run:
    """What a config stands for, built; nothing is written or compiled yet."""

    config: ConfigDict
    dataset: data.Dataset
    parts: Sequence[np.ndarray]  # [nodes] indices of training examples
    topology: Topology
    gossip: Gossip
    tx: optax.GradientTransformationExtraArgs
    phases: tuple[int, ...]  # the static phase of each step of a period
    model: models.Functional
    placement: Placement

    def initial_state(self) -> TrainState:
        """The same model on every node, placed."""
        params, statistics = self.placement.spread((self.model.params, self.model.statistics))
        opt_state = self.placement.lift(self.tx.init, donate_argnums=())(params)
        step = self.placement.replicate(np.zeros([], np.int32))
        return TrainState(step, params, statistics, opt_state)

    def train_step(self) -> jax.stages.Wrapped:
        """The lifted step: (state, batch, phase=) → (state, metrics)."""
        step = make_node_step(
            self.model.apply,
            self.tx,
            label_smoothing=self.config.label_smoothing,
            accumulate=self.config.accumulate,
            seed=self.config.seed,
            axes=self.gossip.axes,
        )
        return self.placement.lift(step, in_axes=(AXES, 0), out_axes=(AXES, 0))

    def abstract_state(self) -> TrainState:
        """The shapes, dtypes and placement of `initial_state`; nothing is allocated."""
        params, statistics = self.placement.abstract((self.model.params, self.model.statistics))
        init = self.placement.lift(self.tx.init, donate_argnums=())
        opt_state = self.placement.abstract_stacked(jax.eval_shape(init, params))
        step: Any = jax.ShapeDtypeStruct((), np.int32, sharding=self.placement.replicated)
        return TrainState(step, params, statistics, opt_state)

    @property
    def batch_shapes(self) -> int:
        """How many shapes batches have: one, but for sentence pairs."""
        return self._all_batches.distinct_shapes

    def abstract_batch(self, shape: int = 0) -> data.Batch:
        """The shapes, dtypes and placement of a step's batch, of one of `batch_shapes`."""
        return self.placement.abstract_batch(self._all_batches.abstract(shape))

    def lower(self, phase: int, shape: int = 0) -> jax.stages.Lowered:
        """The training step of a phase for the placement's devices, traced and not compiled.

        Its batch has one of `batch_shapes`; those of sentence pairs are sorted by length.
        """
        batch = self.abstract_batch(shape)
        return self.train_step().lower(self.abstract_state(), batch, phase=phase)

    def batches(self, start: int = 0) -> Iterator[data.Batch]:
        """The batches of this process's nodes, from step `start` on."""
        return data.prefetched(self._node_batches(self.placement.own), start)

    def evaluation(self) -> Evaluation:
        """The evaluation on the test split, with batch statistics as the config says."""
        pooled = (
            jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), self._all_batches[step])
            for step in range(self.config.recalibrate_batches)
        )
        test, most = self.dataset.test, self.config.eval_examples
        return Evaluation(
            self.model.apply,
            self.placement,
            test if most is None else data.EvenlySpaced(test, most),
            self.config.eval_batch,
            pooled if jax.tree.leaves(self.model.statistics) else (),
        )

    @property
    def executables(self) -> int:
        """Compiled steps: one for each distinct round, and shape of a batch."""
        return len(set(self.phases)) * self.batch_shapes

    @property
    def first_steps(self) -> int:
        """Steps in which most of the executables are compiled: a period, or one for each."""
        return max(len(self.phases), self.executables)

    def final_scores(self, evaluation: Evaluation, state: TrainState) -> dict[str, Any]:
        """What takes too long to be scored along the way: BLEU of the mean model's translations."""
        if not isinstance(self.dataset, data.Translation):
            return {}
        model: Any = nnx.eval_shape(lambda: configs.make_model(self.config, self.dataset))
        mean, _ = evaluation.mean_model(state.params, state.statistics)
        return {"eval/bleu": translate.evaluate(self.dataset, translate.searcher(model), mean)}

    @functools.cached_property
    def _all_batches(self) -> data.Batches:
        return self._node_batches(None)

    def _node_batches(self, of_nodes: Sequence[int] | None) -> data.Batches:
        return configs.make_batches(self.config, self.dataset, self.parts, of_nodes)


def build(
    config: ConfigDict, *, abstract: bool = False, devices: Sequence[jax.Device] | None = None
) -> Run:
    """Validate a config and build what it stands for.

    Args:
      config: a complete config.
      abstract: neither read the data set nor allocate the model: shapes and sizes stand for them,
        and all the run can do is `lower`.
      devices: that a mesh may have, and that need not be here; None: all of JAX's.

    Raises:
      ConfigError: it cannot run.
    """
    configs.validate(config, abstract=abstract, devices=devices)
    dataset = configs.make_dataset(config, abstract=abstract)
    topology = configs.make_topology(config)
    placement = _place(config, devices)
    gossip = configs.make_gossip(config, topology, placement.platform)
    return Run(
        config=config,
        dataset=dataset,
        parts=configs.make_partition(config, dataset),
        topology=topology,
        gossip=gossip,
        tx=configs.make_algorithm(config, gossip),
        phases=configs.phases(config, topology),
        model=models.functional(configs.make_model(config, dataset, abstract=abstract)),
        placement=placement,
    )


def _place(config: ConfigDict, devices: Sequence[jax.Device] | None) -> Placement:
    if configs.lift_of(config) == "simulate":
        return Placement(config.nodes)
    mesh = nodes.make_mesh(**configs.mesh_sizes(config), devices=devices)
    placement = Placement(config.nodes, mesh)
    options = configs.compiler_options(config, placement.platform)
    return dataclasses.replace(placement, compiler_options=options)
