"""GPT-2 small on OpenWebText with accumulated AdamW on 16 nodes (arXiv 2410.11998).

Claim: a language model pretrains without an all-reduce.
Run: python -m jaxdec --config=configs/gpt2_small.py --workdir=DIR --config.data.data_dir=FOLDER
     data: FOLDER/openwebtext/train.bin and test.bin, GPT-2's token ids as uint16, as nanoGPT's
     script writes them (there test.bin is called val.bin)
Expect: not run here.
Hardware: 16 accelerators, one a node, on 4 hosts.

Published: the model, batch, learning rates, warm-up, decay, clipping, betas, window, graph. Our
choice: the number of nodes, 4 of them a host, and of steps (100,000: 49 billion tokens); clipping
is of each node's own gradient.
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.nodes = 16
    config.batch_size = 480
    config.accumulate = 2
    config.steps = 100_000
    config.schedule.name = "cosine"
    config.schedule.warmup_steps = 2000
    config.schedule.end = 0.1

    config.topology.name = "alternating_exponential_ring"
    config.topology.local = 4
    config.algorithm.name = "accumulated_adamw"
    config.algorithm.window = 8
    config.algorithm.learning_rate = 6e-4
    config.algorithm.b1 = 0.9
    config.algorithm.b2 = 0.98
    config.algorithm.weight_decay = 0.1
    config.algorithm.decay = "matrices"
    config.algorithm.clip_norm = 1.0

    config.data.name = "tokens"
    config.data.folder = "openwebtext"
    config.data.vocabulary = 50257
    config.data.context = 1024
    config.model.name = "gpt"
    config.model.layers = 12
    config.model.heads = 12
    config.model.width = 768
    config.model.dtype = "bfloat16"

    config.eval_every = 2000
    config.eval_batch = 8
    config.checkpoint_every = 2000
    return config


def sweep(add):
    """Accumulated AdamW against AllReduce, three seeds each."""
    allreduce = {
        "algorithm.name": "allreduce",
        "algorithm.optimizer": "adamw",
        "algorithm.window": None,
        "algorithm.b2": 0.95,
    }
    for seed in range(3):
        add(seed=seed)
        add(**allreduce, seed=seed)
