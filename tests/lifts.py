"""Both lifts of one update, for tests that compare them with each other and with the oracle."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdec

LIFTS = ("simulate", "mesh")

# Made of optax's own Adam, trust ratio and clipping, which fail under strict dtype promotion.
PROMOTE = ("allreduce", "adamw", "lars")


def promotion_of(key: str) -> str:
    """How strictly the update of a row of the table must keep to its dtypes."""
    return "standard" if any(part in key for part in PROMOTE) else "strict"


# Every algorithm of the table with hyperparameters that leave nothing at a neutral value. The
# oracle takes the same names.
ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "allreduce_momentum": ("allreduce", dict(optimizer="momentum", momentum=0.8)),
    "allreduce_adamw": ("allreduce", dict(optimizer="adamw", b1=0.9, b2=0.95, eps=1e-6)),
    "allreduce_lars": ("allreduce", dict(optimizer="lars", momentum=0.8)),
    "allreduce_lamb": ("allreduce", dict(optimizer="lamb", b1=0.9, b2=0.95, eps=1e-6)),
    "dsgd_atc": ("dsgd", dict(order="atc", clip_norm=30.0)),
    "dsgd_awc": ("dsgd", dict(order="awc", clip_norm=30.0)),
    "dmsgd": ("dmsgd", dict(momentum=0.8, clip_norm=30.0)),
    "awc_dmsgd": ("awc_dmsgd", dict(momentum=0.8, clip_norm=30.0)),
    "da_dmsgd": ("da_dmsgd", dict(momentum=0.8, clip_norm=30.0)),
    "slowmo": ("slowmo", dict(momentum=0.8, slow_momentum=0.6, slow_learning_rate=0.7)),
    "qg_dmsgd": ("qg_dmsgd", dict(momentum=0.8, mu=0.7)),
    "d2_dmsgd": ("d2_dmsgd", dict(momentum=0.8, clip_norm=30.0)),
    "decentlam": ("decentlam", dict(momentum=0.8, clip_norm=30.0)),
    "decentlam_awc": ("decentlam", dict(momentum=0.8, nesterov=True, order="awc")),
    "decentlam_lars": ("decentlam", dict(momentum=0.8, lars=True)),
    "decentralized_adamw": (
        "decentralized_adamw",
        dict(b1=0.9, b2=0.95, eps=1e-6, clip_norm=30.0, order="awc"),
    ),
    "decentralized_adamw_atc": (
        "decentralized_adamw",
        dict(b1=0.9, b2=0.95, eps=1e-6, order="atc"),
    ),
    "accumulated_adamw": (
        "accumulated_adamw",
        dict(window=3, b1=0.9, b2=0.95, eps=1e-6, clip_norm=30.0, order="awc"),
    ),
    "accumulated_adamw_atc": (
        "accumulated_adamw",
        dict(window=3, b1=0.9, b2=0.95, eps=1e-6, order="atc"),
    ),
}


def lift(f: Callable[..., Any], name: str, n: int, **kwargs: Any) -> Callable[..., Any]:
    """`f` under the lift called `name`, without donation unless asked."""
    kwargs.setdefault("donate_argnums", ())
    if name == "simulate":
        return jaxdec.nodes.simulate(f, **kwargs)
    return jaxdec.nodes.on_mesh(f, jaxdec.nodes.make_mesh(node=n), **kwargs)


def placed(tree: Any, name: str, n: int) -> Any:
    """Stacked arrays where the lift called `name` wants them."""
    if name == "simulate":
        return jax.tree.map(jnp.asarray, tree)
    return jaxdec.nodes.shard(tree, jaxdec.nodes.make_mesh(node=n))


def least_squares_step(
    tx: optax.GradientTransformationExtraArgs, promotion: str = "standard"
) -> Callable[..., Any]:
    """A per-node step on ½‖A x − b‖²: ((x, state), (A, b), key, phase=) → (x, state)."""

    def step(carry: Any, data: Any, key: Any = None, *, phase: Any) -> Any:
        x, state = carry
        A, b = data
        with jax.numpy_dtype_promotion(promotion):
            updates, state = tx.update(A.T @ (A @ x - b), state, x, phase=phase, key=key)
        return optax.apply_updates(x, updates), state

    return step


def run(
    tx: optax.GradientTransformationExtraArgs,
    topology: jaxdec.Topology,
    lift_name: str,
    x0: np.ndarray,
    data: tuple[np.ndarray, np.ndarray],
    steps: int,
    promotion: str = "standard",
    key: jax.Array | None = None,
) -> np.ndarray:
    """The models of all nodes after each step: [steps + 1, n, d]; step t has fold_in(key, t)."""
    n = topology.n
    init = lift(tx.init, lift_name, n)
    step = lift(least_squares_step(tx, promotion), lift_name, n, in_axes=(0, 0, None))
    x = placed(x0, lift_name, n)
    data = placed(data, lift_name, n)
    carry = (x, init(x))
    models = [np.asarray(x)]
    for t in range(steps):
        step_key = None if key is None else jax.random.fold_in(key, t)
        carry = step(carry, data, step_key, phase=topology.phase(t))
        models.append(np.asarray(carry[0]))
    return np.stack(models)
