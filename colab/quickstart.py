# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Decentralized training on one accelerator
#
# Eight nodes, each with its own model and its own eighth of the data, simulated on one device. At
# each step a node averages with a single neighbour. In Colab, first run `%pip install` of the
# repository; on your machine, `pip install -e .` in its root.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import jaxdec
from jaxdec import data, evaluate, models, plots
from jaxdec.placement import Placement
from jaxdec.run import make_node_step
from jaxdec.state import AXES, TrainState

# %% [markdown]
# Who averages with whom: one neighbour a step, and the exact mean after three.

# %%
topology = jaxdec.topology.one_peer_exponential(8)
plots.plot_topology(topology)

# %%
print("left of disagreement after a period:", jaxdec.analysis.consensus_factor(topology))

# %% [markdown]
# The data of each node, and the model that all start from.

# %%
digits = data.load("digits")
parts = data.split("iid", digits.train.groups, nodes=8, seed=0)
batches = data.NodeBatches(digits.train, parts, batch_size=16, seed=0, steps=300)
mlp = models.functional(models.Mlp((8, 8), 10, hidden=(128,), rngs=nnx.Rngs(0)))
placement = Placement(8)  # all nodes on this device; Placement(8, mesh): one a device
evaluation = evaluate.Evaluation(mlp.apply, placement, digits.test, batch_size=360)

# %% [markdown]
# One run: a per-node step, written without a node axis, lifted to eight nodes.


# %%
def train(topology, steps=300):
    tx = jaxdec.algorithms.accumulated_adamw(jaxdec.Gossip(topology), 3e-3, window=4)
    node_step = make_node_step(mlp.apply, tx)
    step = placement.lift(node_step, in_axes=(AXES, 0), out_axes=(AXES, 0))
    params, statistics = placement.spread((mlp.params, mlp.statistics))
    state = TrainState(jnp.zeros([], jnp.int32), params, statistics, jax.vmap(tx.init)(params))
    history = []
    for t in range(steps):
        state, metrics = step(state, batches[t], phase=topology.phase(t))
        history.append(np.asarray(metrics["train/loss_nodes"]))
    return evaluation(state.params, state.statistics), np.stack(history)


together, loss_together = train(topology)
alone, loss_alone = train(jaxdec.topology.isolated(8))
for name, result in {"gossip": together, "alone": alone}.items():
    print(
        f"{name:7s} mean model {result['eval/accuracy']:.3f}, a node's own "
        f"{result['eval/accuracy_nodes'].mean():.3f}, apart {result['consensus_distance']:.4f}"
    )

# %%
plt.semilogy(loss_together.mean(axis=1), label="gossip")
plt.semilogy(loss_alone.mean(axis=1), label="alone: fits its own eighth faster, learns less")
plt.xlabel("step")
plt.ylabel("training loss, mean over nodes")
plt.legend()
plt.show()

# %% [markdown]
# Any optax optimizer decentralizes, and an unstable pair is known before it is run.

# %%
lion = jaxdec.algorithms.decentralize(optax.lion(1e-3), jaxdec.Gossip(topology), order="awc")
for graph in (jaxdec.topology.ring(8), jaxdec.topology.exponential(8)):
    radius = jaxdec.analysis.spectral_radius("decentlam", graph, momentum=0.9)
    print(f"DecentLaM, momentum 0.9, on {graph.name}: spectral radius {radius:.3f}")
