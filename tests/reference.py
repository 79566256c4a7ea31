"""Dense NumPy oracle: every algorithm written as `W @ X`, in float64, one node a row.

It is written from the recursions alone and shares no code with the package, so that a test which
compares the two never compares a thing with itself. Row i of a mixing matrix holds the weights
node i gives to what it holds and receives. Hyperparameters without a neutral value have no
defaults here: a test states what it compares.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np

Array = np.ndarray
Gradient = Callable[[Array, int], Array]


def _equal_weights(n: int, sources: Callable[[int], Iterable[int]]) -> Array:
    """Returns the W in which node i gives equal weights to itself and to each of `sources(i)`."""
    W = np.zeros((n, n))
    for i in range(n):
        held = sorted({i, *sources(i)})
        W[i, held] = 1 / len(held)
    return W


def metropolis(adjacency: Array) -> Array:
    """Returns w_ij = 1 / (1 + max(d_i, d_j)) on the edges of a 0/1 matrix, the rest at home."""
    degree = adjacency.sum(axis=1)
    W = adjacency / (1.0 + np.maximum(degree[:, None], degree[None, :]))
    return W + np.diag(1.0 - W.sum(axis=1))


def _offsets(n: int) -> list[int]:
    # (n - 1).bit_length() is ceil(log2 n), without rounding.
    return [2**k for k in range((n - 1).bit_length())]


def _star(n: int) -> Array:
    adjacency = np.zeros((n, n))
    adjacency[0, 1:] = adjacency[1:, 0] = 1
    return metropolis(adjacency)


def _one_peer_exponential(n: int, symmetric: bool = False) -> list[Array]:
    if symmetric:
        return [_equal_weights(n, lambda i, o=o: [i ^ o]) for o in _offsets(n)]
    return [_equal_weights(n, lambda i, o=o: [(i - o) % n]) for o in _offsets(n)]


def _alternating_exponential_ring(n: int, local: int) -> list[Array]:
    period = []
    for bit in _offsets(n // local):
        lower = [host for host in range(n // local) if not host & bit]
        counter = {host: c for c, host in enumerate(lower)}
        for half in (0, 1):

            def sources(i, bit=bit, counter=counter, half=half):
                host = i // local
                merged = counter[host & ~bit] % 2 != half
                hosts = (host, host ^ bit) if merged else (host,)
                return [h * local + device for h in hosts for device in range(local)]

            period.append(_equal_weights(n, sources))
    return period


TOPOLOGIES = {
    "complete": lambda n: [np.full((n, n), 1 / n)],
    "ring": lambda n: [_equal_weights(n, lambda i: [(i - 1) % n, (i + 1) % n])],
    "one_peer_ring": lambda n: [
        _equal_weights(n, lambda i: [i ^ 1]),
        _equal_weights(n, lambda i: [(i + (1 if i % 2 else -1)) % n]),
    ],
    "hypercube": lambda n: [_equal_weights(n, lambda i: [i ^ o for o in _offsets(n)])],
    "exponential": lambda n: [_equal_weights(n, lambda i: [(i - o) % n for o in _offsets(n)])],
    "symmetric_exponential": lambda n: [
        _equal_weights(n, lambda i: [(i + sign * o) % n for o in _offsets(n) for sign in (-1, 1)])
    ],
    "one_peer_exponential": _one_peer_exponential,
    "alternating_exponential_ring": _alternating_exponential_ring,
    "star": lambda n: [_star(n)],
}


def mixing_matrices(name: str, n: int, **kwargs) -> list[Array]:
    """Returns the dense [n, n] matrices of one period, in order.

    Args:
      name: A key of `TOPOLOGIES`.
      n: The number of replicas; node i receives over a directed offset o from (i - o) mod n.
      **kwargs: `symmetric` of one_peer_exponential; `local` of alternating_exponential_ring, the
        devices of a host (replica = host * local + device).
    """
    return TOPOLOGIES[name](n, **kwargs)


def _row_norms(X: Array) -> Array:
    return np.linalg.norm(X, axis=1, keepdims=True)


def _clip(G: Array, clip_norm: float) -> Array:
    return G * (clip_norm / np.maximum(_row_norms(G), clip_norm))


def _trust(X: Array, U: Array, coefficient: float) -> Array:
    """Returns coefficient * |x_i| / |u_i| as a column, 1 where either norm is zero."""
    x, u = _row_norms(X), _row_norms(U)
    return np.divide(coefficient * x, u, out=np.ones_like(x), where=(x > 0) & (u > 0))


def _adam(s, t: int, G: Array, b1: float, b2: float, eps: float) -> Array:
    s["m"] = b1 * s["m"] + (1 - b1) * G
    s["v"] = b2 * s["v"] + (1 - b2) * G**2
    return s["m"] / (1 - b1 ** (t + 1)) / (np.sqrt(s["v"] / (1 - b2 ** (t + 1))) + eps)


def _accumulated_adam(s, t: int, G: Array, window: int, b1: float, b2: float, eps: float) -> Array:
    k = t // window + 1
    m = b1 * s["M"] + (1 - b1) * G
    v = b2 * s["V"] + (1 - b2) * G**2
    s["b"] = s["b"] + G / window
    if (t + 1) % window == 0:
        s["M"] = b1 * s["M"] + (1 - b1) * s["b"]
        s["V"] = b2 * s["V"] + (1 - b2) * s["b"] ** 2
        s["b"] = 0.0
    return m / (1 - b1**k) / (np.sqrt(v / (1 - b2**k)) + eps)


def _adapt_and_mix(W: Array, X: Array, U: Array, order: str) -> Array:
    """Returns W(X - U) for the order "atc" and WX - U for "awc"."""
    return {"atc": W @ (X - U), "awc": W @ X - U}[order]


# Every step below maps (s, t, X, G, W, lr) to the next models. `s` holds the buffers, which all
# start at zero; G is the gradients, clipped, with coupled weight decay already in them.


def _allreduce(s, t, X, G, W, lr, *, optimizer, weight_decay, **hyper):
    G = np.broadcast_to(G.mean(axis=0), X.shape)
    if optimizer == "momentum":
        s["m"] = hyper.pop("momentum") * s["m"] + G + weight_decay * X
        X = X - lr * s["m"]
    elif optimizer == "lars":
        # As in optax, the learning rate of a gradient's own step goes into the buffer with it.
        D = G + weight_decay * X
        s["m"] = hyper.pop("momentum") * s["m"] + lr * _trust(X, D, 0.001) * D
        X = X - s["m"]
    elif optimizer in ("adamw", "lamb"):
        D = _adam(s, t, G, *map(hyper.pop, ("b1", "b2", "eps"))) + weight_decay * X
        X = X - lr * D * (_trust(X, D, 1.0) if optimizer == "lamb" else 1.0)
    else:
        raise ValueError(f"unknown {optimizer=}")
    if hyper:
        raise TypeError(f"{optimizer} takes no {sorted(hyper)}")
    return X


def _dsgd(s, t, X, G, W, lr, *, order="atc"):
    return _adapt_and_mix(W, X, lr * G, order)


def _dmsgd(s, t, X, G, W, lr, *, momentum):
    s["m"] = momentum * s["m"] + G
    return W @ (X - lr * s["m"])


def _awc_dmsgd(s, t, X, G, W, lr, *, momentum):
    s["m"] = momentum * s["m"] + G
    return W @ X - lr * s["m"]


def _da_dmsgd(s, t, X, G, W, lr, *, momentum):
    s["m"] = W @ (momentum * s["m"] + G)
    return W @ (X - lr * s["m"])


def _slowmo(s, t, X, G, W, lr, *, every, momentum, slow_momentum, slow_learning_rate):
    if t == 0:
        s["x0"] = X
    if (t + 1) % every:
        return _dmsgd(s, t, X, G, W, lr, momentum=momentum)
    drift = s["x0"] - _dmsgd(s, t, X, G, np.full_like(W, 1 / len(W)), lr, momentum=momentum)
    if lr != 0:
        s["u"] = slow_momentum * s["u"] + drift / lr
        drift = lr * s["u"]
    # At lr = 0 the drift itself is the limit of lr * u, and u, which has none, stays.
    s["x0"] = s["x0"] - slow_learning_rate * drift
    return s["x0"]


def _qg_dmsgd(s, t, X, G, W, lr, *, momentum, mu=None):
    mu = momentum if mu is None else mu
    X_next = W @ (X - lr * (G + momentum * s["m"]))
    if lr != 0:
        s["m"] = mu * s["m"] + (1 - mu) * (X - X_next) / lr
    return X_next


def _d2_dmsgd(s, t, X, G, W, lr, *, momentum):
    X_prev = X if t == 0 else s["X_prev"]
    s["m"] = momentum * s["m"] + G
    X_next = W @ (2 * X - X_prev - lr * s["m"] + s["lr_m_prev"])
    s["X_prev"], s["lr_m_prev"] = X, lr * s["m"]
    return X_next


def _decentlam(s, t, X, G, W, lr, *, momentum, nesterov=False, lars=False, order="atc"):
    if lars:
        G = _trust(X, G, 0.001) * G
    difference = X - (W @ (X - lr * G) if order == "atc" else W @ X - lr * G)
    s["v"] = momentum * s["v"] + difference
    return X - (momentum * s["v"] + difference if nesterov else s["v"])


def top_k(V: Array, k: int) -> Array:
    """Returns the k entries of each row that are largest in absolute value, zero elsewhere."""
    kept = np.argsort(-np.abs(V), axis=1)[:, :k]
    sparse = np.zeros_like(V)
    np.put_along_axis(sparse, kept, np.take_along_axis(V, kept, axis=1), axis=1)
    return sparse


def int8(V: Array, noise: Array, block: int = 256) -> Array:
    """Returns each row [d] rounded, by noise [d] in [0, 1), to integers times a block's scale."""
    rounded = np.empty_like(V)
    for start in range(0, V.shape[1], block):
        part = V[:, start : start + block]
        # The scale travels as a float32.
        scale = np.float32(np.abs(part).max(axis=1, keepdims=True) / 127).astype(np.float64)
        steps = np.floor(part / scale + noise[start : start + block])
        rounded[:, start : start + block] = scale * np.clip(steps, -127, 127)
    return rounded


def _choco(s, t, X, G, W, lr, *, consensus_rate, order, compress):
    X_hat, X_half = s["X_hat"] + np.zeros_like(X), X - lr * G
    if order == "atc":
        s["X_hat"] = X_hat = X_hat + compress(X_half - X_hat, t)
    X_next = X_half + consensus_rate * (W @ X_hat - X_hat)
    if order == "awc":
        s["X_hat"] = X_hat + compress(X_next - X_hat, t)
    return X_next


def _deep_squeeze(s, t, X, G, W, lr, *, consensus_rate, compress):
    X_half = X - lr * G
    V = X_half + s["E"]
    C = compress(V, t)
    s["E"] = V - C
    return X_half + consensus_rate * (W @ C - C)


def _decentralized_adamw(s, t, X, G, W, lr, *, b1, b2, eps, weight_decay, order="awc"):
    direction = _adam(s, t, G, b1, b2, eps)
    # A scalar commutes with W: in the order awc too it is the mixed models that decay.
    return _adapt_and_mix(W, (1 - lr * weight_decay) * X, lr * direction, order)


def _accumulated_adamw(s, t, X, G, W, lr, *, window, b1, b2, eps, weight_decay, order="awc"):
    direction = _accumulated_adam(s, t, G, window, b1, b2, eps)
    return _adapt_and_mix(W, (1 - lr * weight_decay) * X, lr * direction, order)


COUPLED = {
    "dsgd": _dsgd,
    "dmsgd": _dmsgd,
    "awc_dmsgd": _awc_dmsgd,
    "da_dmsgd": _da_dmsgd,
    "slowmo": _slowmo,
    "qg_dmsgd": _qg_dmsgd,
    "d2_dmsgd": _d2_dmsgd,
    "decentlam": _decentlam,
    "choco": _choco,
    "deep_squeeze": _deep_squeeze,
}
# These place the weight decay themselves.
OWN_DECAY = {
    "allreduce": _allreduce,
    "decentralized_adamw": _decentralized_adamw,
    "accumulated_adamw": _accumulated_adamw,
}


def trajectory(
    name: str,
    weights: Callable[[int], Array],
    x0: Array,
    gradient: Gradient,
    learning_rate: Callable[[int], float],
    steps: int,
    *,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
    **hyperparameters,
) -> list[Array]:
    """Returns the models X_0, ..., X_steps, each [n, d] in float64.

    Args:
      name: A key of `COUPLED` or `OWN_DECAY`.
      weights: Step t to its [n, n] mixing matrix.
      x0: The models at the start, [n, d]; allreduce and slowmo agree only from equal rows.
      gradient: Models [n, d] and step t to the gradient of each node at its own model, [n, d].
      learning_rate: Step t to its learning rate; zero is allowed.
      steps: How many steps to take.
      weight_decay: Enters G as G + weight_decay * X, except in Adam and LAMB (decoupled).
      clip_norm: The longest Euclidean norm of a node's raw gradient; not for allreduce.
      **hyperparameters: The keywords of the algorithm's step; `momentum` is beta everywhere, and
        `compress` maps rows [n, d] and the step t to what is sent of them, [n, d].

    Raises:
      ValueError: If allreduce is given a clip_norm.
    """
    if name == "allreduce" and clip_norm is not None:
        raise ValueError(f"{clip_norm=} could act before or after the mean; clip in `gradient`")
    if name in OWN_DECAY:
        step, hyperparameters["weight_decay"] = OWN_DECAY[name], weight_decay
    else:
        step = COUPLED[name]
    state = defaultdict(float)
    models = [np.array(x0, np.float64)]
    for t in range(steps):
        X, W = models[-1], np.asarray(weights(t), np.float64)
        G = np.asarray(gradient(X, t), np.float64)
        if clip_norm is not None:
            G = _clip(G, clip_norm)
        if name in COUPLED:
            G = G + weight_decay * X
        models.append(step(state, t, X, G, W, float(learning_rate(t)), **hyperparameters))
    return models


def least_squares(
    n: int = 8, rows: int = 50, dim: int = 30, noise: float = 0.1, seed: int = 0
) -> tuple[Array, Array]:
    """Returns A [n, rows, dim], standard normal, and b_i = A_i x + noise, [n, rows]."""
    rng = np.random.default_rng(seed)
    A = rng.standard_normal((n, rows, dim))
    x = rng.standard_normal(dim)
    return A, A @ x + noise * rng.standard_normal((n, rows))


def least_squares_gradient(A: Array, b: Array) -> Gradient:
    """Returns the gradient of f_i(x_i) = |A_i x_i - b_i|^2 / 2, a node a row; t is not used."""
    return lambda X, t: np.einsum("nrd,nr->nd", A, np.einsum("nrd,nd->nr", A, X) - b)


def optimum(A: Array, b: Array) -> Array:
    """Returns the minimiser [dim] of the sum over all nodes."""
    return np.linalg.lstsq(A.reshape(-1, A.shape[-1]), b.reshape(-1), rcond=None)[0]


def fixed_point(A: Array, b: Array, W: Array, learning_rate: float, order: str) -> Array:
    """Solves for the fixed point [n, dim] of full-gradient DSGD, even where iterating diverges.

    Args:
      A: The matrices, [n, rows, dim].
      b: The right-hand sides, [n, rows].
      W: The static mixing matrix, [n, n].
      learning_rate: The constant learning rate.
      order: "atc" for X = W(X - lr * grad(X)); "awc" or "cta" for X = WX - lr * grad(X).
    """
    n, _, dim = A.shape
    mix, identity = np.kron(W, np.eye(dim)), np.eye(n * dim)
    hessian = np.zeros((n * dim, n * dim))
    for i in range(n):
        block = slice(i * dim, (i + 1) * dim)
        hessian[block, block] = A[i].T @ A[i]
    pull = np.einsum("nrd,nr->nd", A, b).reshape(-1)
    # "atc" also mixes the gradient step; everything else in the equation is the same.
    mixed = {"atc": mix, "awc": identity, "cta": identity}[order]
    system = identity - mix + learning_rate * mixed @ hessian
    return np.linalg.solve(system, learning_rate * mixed @ pull).reshape(n, dim)
