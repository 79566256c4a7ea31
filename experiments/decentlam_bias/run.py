"""Momentum's bias on least squares, DecentLaM without it, and both's convergence rates.

Run: python -m experiments.decentlam_bias.run   (about 20 minutes on two cores)

Writes results.jsonl and three plots beside this file and fills the README's tables.
"""

import itertools
import pathlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.progress import track

import jaxdec
from experiments import logistic
from experiments.study import markdown, mean_and_error, plot_means, read_lines, report, write_lines

HERE = pathlib.Path(__file__).parent
N, ROWS, DIM = 8, 50, 30
TOPOLOGIES = {"mesh": "grid", "ring": "ring", "symmetric exponential": "symmetric_exponential"}
METHODS = ("dsgd", "dmsgd", "awc_dmsgd", "da_dmsgd", "qg_dmsgd", "d2_dmsgd", "decentlam")
RATES = (2.5e-5, 2.5e-4, 5e-4, 1e-3, 2e-3)
MOMENTA = (0.5, 0.8, 0.9, 0.95)
STEPS = 100_000
SIGMA, BATCHES = 30.0, (1, 8, 64, 512, 4096, 32_768)
SIZES, HORIZONS = (1, 2, 4, 8, 16), (1000, 4000, 16_000, 64_000)
SCALE = 0.5  # γ = SCALE √(n/K)
SEEDS = range(3)


def problem(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A [N, ROWS, DIM] and b [N, ROWS]: f_i(x) = ½‖A_i x − b_i‖², b_i = A_i x* + noise of 0.1."""
    rng = np.random.default_rng(seed)
    A = rng.standard_normal((N, ROWS, DIM))
    b = A @ rng.standard_normal(DIM) + 0.1 * rng.standard_normal((N, ROWS))
    return A, b


def optimum(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.linalg.lstsq(A.reshape(-1, DIM), b.reshape(-1), rcond=None)[0]


def error(models: np.ndarray, solution: np.ndarray) -> float:
    """Mean over nodes of ‖x_i − x*‖² / ‖x*‖²."""
    return float(np.mean(np.sum((models - solution) ** 2, axis=-1)) / np.sum(solution**2))


def mixing(name: str, method: str) -> jaxdec.Topology:
    topology = jaxdec.topology.by_name(TOPOLOGIES[name], N)
    return jaxdec.topology.lazy(topology) if method == "d2_dmsgd" else topology


def fields(method: str, beta: float) -> dict[str, float]:
    return {} if method == "dsgd" else {"momentum": beta}


def theory(method: str, W: np.ndarray, rate: float, beta: float, A: Any, b: Any) -> np.ndarray:
    """The limit [N, DIM]: where (I − W) X + γ C ∇f(X) = 0, with C of the method's momentum."""
    eye = np.eye(N)
    if method == "d2_dmsgd":
        return np.broadcast_to(optimum(A, b), (N, DIM))
    C = {
        "dsgd": W,
        "qg_dmsgd": W,
        "decentlam": W,
        "dmsgd": W / (1 - beta),
        "awc_dmsgd": eye / (1 - beta),
        "da_dmsgd": W @ np.linalg.solve(eye - beta * W, W),
    }[method]
    hessian = np.zeros((N, DIM, N, DIM))
    for i in range(N):
        hessian[i, :, i] = A[i].T @ A[i]
    system = np.einsum("ij,jpkq->ipkq", rate * C, hessian)
    system += np.einsum("ij,pq->ipjq", eye - W, np.eye(DIM))
    right = rate * C @ np.einsum("nrd,nr->nd", A, b)
    return np.linalg.solve(system.reshape(N * DIM, -1), right.ravel()).reshape(N, DIM)


def simulate(
    tx: Any,
    A: np.ndarray,
    b: np.ndarray,
    records: int,
    every: int,
    noise: float = 0.0,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Train from zero for records · every steps, in float64.

    Returns:
      By node and record: "last" [N, records, DIM], the model; over the steps of the record its
      mean, "mean" [N, records, DIM], and that of ‖x − x*‖²/‖x*‖², "error" [N, records].
    """
    solution = optimum(A, b)

    def run(A: jax.Array, b: jax.Array, key: jax.Array) -> Any:
        key = jax.random.fold_in(key, jax.lax.axis_index("node"))

        def step(k: jax.Array, carry: Any) -> Any:
            x, state, mean, error = carry
            gradient = A.T @ (A @ x - b)
            if noise:
                gradient += noise * jax.random.normal(jax.random.fold_in(key, k), x.shape)
            updates, state = tx.update(gradient, state, x, phase=0)
            x = x + updates
            off = jnp.sum((x - solution) ** 2) / np.sum(solution**2)
            return x, state, mean + x / every, error + off / every

        def record(carry: Any, first: jax.Array) -> Any:
            x, state = carry
            zeros = (jnp.zeros_like(x), jnp.zeros_like(x, shape=()))
            x, state, mean, error = jax.lax.fori_loop(
                first, first + every, step, (x, state, *zeros)
            )
            return (x, state), {"last": x, "mean": mean, "error": error}

        x = jnp.zeros(A.shape[1])
        firsts = every * jnp.arange(records)
        return jax.lax.scan(record, (x, tx.init(x)), firsts)[1]

    lifted = jaxdec.nodes.simulate(run, (0, 0, None), donate_argnums=())
    return jax.tree.map(np.asarray, lifted(jnp.asarray(A), jnp.asarray(b), jax.random.key(seed)))


def algorithm(method: str, topology: jaxdec.Topology, rate: float, beta: float) -> Any:
    return jaxdec.algorithms.by_name(
        method, jaxdec.Gossip(topology), learning_rate=rate, **fields(method, beta)
    )


def limits() -> Iterable[dict[str, Any]]:
    """Where full gradients end, and where theory says."""
    A, b = problem(0)
    for graph, method, rate in itertools.product(TOPOLOGIES, METHODS, RATES):
        topology = mixing(graph, method)
        for beta in (0.0,) if method == "dsgd" else MOMENTA:
            expected = theory(method, topology.matrix(0), rate, beta, A, b)
            tx = algorithm(method, topology, rate, beta)
            models = simulate(tx, A, b, records=1, every=STEPS)["last"][:, -1]
            yield {
                "study": "limits",
                "topology": graph,
                "method": method,
                "rate": rate,
                "beta": beta,
                "measured": error(models, optimum(A, b)),
                "theory": error(expected, optimum(A, b)),
            }


def noisy() -> Iterable[dict[str, Any]]:
    """The stationary error under gradient noise N(0, σ²/B), and how much of it is bias."""
    for method, batch, seed in itertools.product(("dmsgd", "decentlam"), BATCHES, SEEDS):
        A, b = problem(0)
        tx = algorithm(method, mixing("mesh", method), 1e-3, 0.9)
        noise = SIGMA / batch**0.5
        found = simulate(tx, A, b, 2, 20_000, noise=noise, seed=seed)
        total = float(found["error"][:, -1].mean())
        bias = error(found["mean"][:, -1], optimum(A, b))
        yield {
            "study": "noisy",
            "method": method,
            "batch": batch,
            "seed": seed,
            "error": total,
            "bias": bias,
        }


def contraction(method: str, W: np.ndarray, rate: float, beta: float, A: np.ndarray) -> float:
    """The spectral radius of the whole iteration, (X, buffer) → (X⁺, buffer⁺)."""
    hessian = np.zeros((N * DIM, N * DIM))
    for i in range(N):
        hessian[i * DIM : (i + 1) * DIM, i * DIM : (i + 1) * DIM] = A[i].T @ A[i]
    eye, zero = np.eye(N * DIM), np.zeros((N * DIM, N * DIM))
    W = np.kron(W, np.eye(DIM))
    plain = W @ (eye - rate * hessian)
    matrix = {
        "dsgd": lambda: plain,
        "dmsgd": lambda: np.block([[plain, -rate * beta * W], [hessian, beta * eye]]),
        "decentlam": lambda: np.block([[plain + beta * eye, -beta * eye], [eye, zero]]),
    }[method]()
    return float(np.abs(np.linalg.eigvals(matrix)).max())


def linear() -> Iterable[dict[str, Any]]:
    """The distance from the limit, step by step, under full gradients."""
    A, b = problem(0)
    for graph, method in itertools.product(TOPOLOGIES, ("dsgd", "dmsgd", "decentlam")):
        topology = mixing(graph, method)
        W, beta = topology.matrix(0), 0.0 if method == "dsgd" else 0.8
        limit = theory(method, W, 1e-3, beta, A, b)
        models = simulate(algorithm(method, topology, 1e-3, beta), A, b, 3000, 1)["last"]
        distances = np.linalg.norm(models - limit[:, None], axis=(0, 2))
        # From where the slowest mode rules, to where rounding does.
        window = (distances < 1e-8 * distances[0]) & (distances > 1e-12 * distances[0])
        steps = np.flatnonzero(window)
        yield {
            "study": "linear",
            "topology": graph,
            "method": method,
            "beta": beta,
            "measured": float(np.exp(np.polyfit(steps, np.log(distances[steps]), 1)[0])),
            "theory": contraction(method, W, 1e-3, beta, A),
            "distances": [float(f"{d:.4g}") for d in distances[::20]],
        }


def nonconvex() -> Iterable[dict[str, Any]]:
    """Mean ‖∇f(x̄)‖² over K steps at γ = SCALE √(n/K)."""
    for n, K, seed in itertools.product(SIZES, HORIZONS, SEEDS):
        name = "symmetric_exponential" if n > 2 else "complete"
        gossip = jaxdec.Gossip(jaxdec.topology.by_name(name, n))
        tx = jaxdec.algorithms.decentlam(gossip, SCALE * (n / K) ** 0.5, momentum=0.9)
        data = logistic.examples(n, seed)
        yield {
            "study": "nonconvex",
            "nodes": n,
            "steps": K,
            "seed": seed,
            "gradient": logistic.mean_squared_gradient(tx, data, K, seed),
        }


PARTS = {"limits": limits, "noisy": noisy, "linear": linear, "nonconvex": nonconvex}


def _of(part: str) -> list[dict[str, Any]]:
    return [line for line in read_lines(HERE) if line["study"] == part]


def tables() -> dict[str, str]:
    """The README's tables, from results.jsonl."""
    return {
        "limits": _limits_table(),
        "law": _law_table(),
        "noisy": _noisy_table(),
        "linear": _linear_table(),
        "nonconvex": _nonconvex_table(),
    }


def _limits_table() -> str:
    """At γ = 1e-3, and how far off theory any cell of a method is."""
    lines, rows = _of("limits"), []
    for method in METHODS:
        own = [line for line in lines if line["method"] == method]
        cells = [
            f"{line['measured']:.2e}"
            for graph in TOPOLOGIES
            for beta in ((0.0,) if method == "dsgd" else (0.8, 0.95))
            for line in own
            if (line["topology"], line["rate"], line["beta"]) == (graph, 1e-3, beta)
        ]
        if method == "dsgd":
            cells = [cell for cell in cells for _ in range(2)]
        rows.append([f"`{method}`", *cells, f"{100 * deviation(own):.3f} %"])
    heads = [f"{graph}, β = {beta}" for graph in TOPOLOGIES for beta in (0.8, 0.95)]
    return markdown(["method", *heads, "off theory, at most"], rows)


def deviation(lines: list[dict[str, Any]]) -> float:
    """The largest |measured / theory − 1|; of limits that are zero, the largest error itself."""
    return max(
        abs(line["measured"] / line["theory"] - 1) if line["theory"] > 1e-20 else line["measured"]
        for line in lines
    )


def _law_table() -> str:
    """DmSGD's error over DSGD's, times (1 − β)²: one where the law holds."""
    lines = _of("limits")
    plain = {(x["topology"], x["rate"]): x for x in lines if x["method"] == "dsgd"}
    rows = []
    for graph, rate in itertools.product(TOPOLOGIES, RATES):
        cells = [
            f"{(1 - x['beta']) ** 2 * x['measured'] / plain[graph, rate]['measured']:.3f}"
            for x in lines
            if (x["method"], x["topology"], x["rate"]) == ("dmsgd", graph, rate)
        ]
        rows.append([graph, f"{rate:g}", *cells])
    return markdown(["graph", "γ", *(f"β = {beta}" for beta in MOMENTA)], rows)


def _noisy_table() -> str:
    rows = []
    for batch in BATCHES:
        row = [f"{batch:,}"]
        for method in ("dmsgd", "decentlam"):
            own = [x for x in _of("noisy") if (x["method"], x["batch"]) == (method, batch)]
            row.append(f"{np.mean([x['error'] for x in own]):.2e}")
            row.append(mean_and_error([100 * x["bias"] / x["error"] for x in own], 1))
        rows.append(row)
    heads = [f"{name} {what}" for name in ("DmSGD", "DecentLaM") for what in ("error", "bias, %")]
    return markdown(["B", *heads], rows)


def _linear_table() -> str:
    rows = [
        [
            x["topology"],
            f"`{x['method']}`",
            f"{x['beta']:g}",
            f"{1 - x['measured']:.5f}",
            f"{1 - x['theory']:.5f}",
            f"{100 * ((1 - x['measured']) / (1 - x['theory']) - 1):+.2f} %",
        ]
        for x in _of("linear")
    ]
    return markdown(["graph", "method", "β", "1 − rate, measured", "theory", "difference"], rows)


def _gradients(nodes: int, steps: int) -> np.ndarray:
    lines = _of("nonconvex")
    return np.array([x["gradient"] for x in lines if (x["nodes"], x["steps"]) == (nodes, steps)])


def _slope(xs: Iterable[float], ys: Iterable[float]) -> float:
    return float(np.polyfit(np.log(list(xs)), np.log(list(ys)), 1)[0])


def _nonconvex_table() -> str:
    rows = []
    for n in SIZES:
        means = [_gradients(n, K).mean() for K in HORIZONS]
        rows.append([str(n), *(f"{m:.2e}" for m in means), f"{_slope(HORIZONS, means):.2f}"])
    slopes = [_slope(SIZES, [_gradients(n, K).mean() for n in SIZES]) for K in HORIZONS]
    rows.append(["slope in n", *(f"{slope:.2f}" for slope in slopes), ""])
    return markdown(["nodes", *(f"K = {K:,}" for K in HORIZONS), "slope in K"], rows)


def plot() -> Figure:
    """Bias against momentum, its share against the batch, and both rates of convergence."""
    figure = Figure(figsize=(10.4, 6.6), layout="constrained")
    (bias, share), (rate, gradient) = figure.subplots(2, 2)
    lines = _of("limits")
    for index, method in enumerate(METHODS):
        own = [
            x
            for x in lines
            if (x["method"], x["topology"], x["rate"]) == (method, "mesh", 1e-3)
            and x["theory"] > 1e-20
        ]
        for what, style in (("theory", "-"), ("measured", "o")):
            betas = [x["beta"] for x in own]
            errors = [x[what] for x in own]
            if method == "dsgd":
                betas, errors = [0, *MOMENTA], errors * (1 + len(MOMENTA))
            if own:
                label = method if what == "theory" else None
                bias.plot(betas, errors, style, color=f"C{index}", markersize=5, label=label)
    bias.set(yscale="log", xlabel="β", ylabel="error in the limit", title="mesh, γ = 1e-3")
    bias.legend(fontsize="small")
    for method in ("dmsgd", "decentlam"):
        shares = [
            np.array(
                [
                    100 * x["bias"] / x["error"]
                    for x in _of("noisy")
                    if (x["method"], x["batch"]) == (method, batch)
                ]
            )
            for batch in BATCHES
        ]
        plot_means(share, BATCHES, shares, label=method)
    share.set(xscale="log", xlabel="batch B", ylabel="share of bias in the error, %")
    share.legend(fontsize="small")
    for x in _of("linear"):
        if x["topology"] == "mesh":
            steps = 20 * np.arange(len(x["distances"]))
            rate.plot(steps, x["distances"], label=f"{x['method']}, β = {x['beta']:g}")
    rate.set(yscale="log", xlabel="step", ylabel="distance from the limit")
    rate.legend(fontsize="small")
    for n in SIZES:
        plot_means(gradient, HORIZONS, [_gradients(n, K) for K in HORIZONS], label=f"{n} nodes")
    gradient.set(xscale="log", yscale="log", xlabel="K", ylabel="mean ‖∇f(x̄)‖² over K steps")
    gradient.legend(fontsize="small")
    for axes in (bias, share, rate, gradient):
        axes.grid(alpha=0.3)
    return figure


def main() -> None:
    results = []
    with jax.enable_x64(True):
        for name, part in PARTS.items():
            results += track(part(), name)
    write_lines(HERE, results)
    report(HERE, tables())
    plot().savefig(HERE / "bias.png", dpi=130)


if __name__ == "__main__":
    main()
