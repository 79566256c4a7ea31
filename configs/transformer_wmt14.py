"""The transformer, base and big, on WMT14 English to German with accumulated Adam on 16 nodes.

Claim: moments that accumulate over windows keep Adam as accurate without an all-reduce
     (arXiv 2410.11998).
Run: python -m jaxdec --config=configs/transformer_wmt14.py:base --workdir=DIR
     with base or big; data: python -m jaxdec.data prepare wmt14_en_de [--source=FOLDER]
Expect: not run here. Published BLEU, base, 16 workers: accumulated Adam 27.71, decentralized Adam
     27.58 (both on the alternating exponential ring), AllReduce 27.79. The paper's big model is on
     English to French, so nothing is published for big here.
Hardware: 16 accelerators, one a node, on 4 hosts.

Published: learning rates, betas, ε, warm-up and schedule, label smoothing, dropout, window, graph;
25,000 tokens a step are those of the paper's timings. Our choice: 4 nodes a host, the number of
steps, one recipe for both sizes but for big's dropout.
"""

from ml_collections import ConfigDict

from configs import default

# Layers are 6 on either side, in both.
SIZES = {
    "base": {"width": 512, "heads": 8, "mlp": 2048, "dropout": 0.1},
    "big": {"width": 1024, "heads": 16, "mlp": 4096, "dropout": 0.3},
}
STEPS = {"base": 100_000, "big": 300_000}


def get_config(size: str = "base") -> ConfigDict:
    if size not in SIZES:
        raise ValueError(f"size {size!r} is unknown; write :{' or :'.join(SIZES)} after the file")
    config = default.get_config()
    config.nodes = 16
    config.batch_size = 25_600
    config.steps = STEPS[size]
    config.schedule.name = "inverse_sqrt"
    config.schedule.warmup_steps = 4000
    config.label_smoothing = 0.1

    config.topology.name = "alternating_exponential_ring"
    config.topology.local = 4
    config.algorithm.name = "accumulated_adamw"
    config.algorithm.window = 8
    config.algorithm.learning_rate = 7e-4
    config.algorithm.b1 = 0.9
    config.algorithm.b2 = 0.999
    config.algorithm.eps = 1e-9

    config.data.name = "wmt14_en_de"
    config.model.name = "transformer"
    config.model.layers = 6
    config.model.update(SIZES[size])
    config.model.dtype = "bfloat16"

    config.log_every = 50
    config.eval_every = 5000
    config.eval_batch = 16
    config.checkpoint_every = 5000
    return config


def sweep(add):
    """The paper's three methods on both sizes, three seeds each."""
    decentralized = {
        "algorithm.name": "decentralized_adamw",
        "algorithm.window": None,
        "algorithm.learning_rate": 4e-3,
        "algorithm.b1": 0.974,
    }
    allreduce = {
        "algorithm.name": "allreduce",
        "algorithm.optimizer": "adamw",
        "algorithm.window": None,
        "algorithm.b2": 0.98,
    }
    for size in SIZES:
        for seed in range(3):
            add(size, seed=seed)
            add(size, **decentralized, seed=seed)
            add(size, **allreduce, seed=seed)
