"""Eight nodes learn to write Python's standard library, byte by byte: a GPT of 1 M parameters.

Claim: none of a paper's; a language model in a few minutes on any machine.
Run: python -m jaxdec --config=configs/stdlib_gpt.py --workdir=DIR
     data: python -m jaxdec.data prepare stdlib
Expect: measured, mean model: loss 2.67 nats a byte on 160 test windows (seed 0 alone, jax 0.10.2);
    seven CPU minutes, eleven minutes on 2 cores shared with other work.
Hardware: any; 2 CPU cores simulate the nodes.
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.batch_size = 16
    config.steps = 200
    config.schedule.name = "cosine"
    config.schedule.warmup_steps = config.get_ref("steps") // 10
    config.schedule.end = 0.1

    config.algorithm.learning_rate = 2e-3
    config.algorithm.b2 = 0.98
    config.algorithm.weight_decay = 0.1
    config.algorithm.decay = "matrices"
    config.algorithm.clip_norm = 1.0

    config.data.name = "stdlib"
    config.data.context = 256
    config.model.name = "gpt"
    config.model.layers = 5
    config.model.heads = 4
    config.model.width = 128

    config.eval_every = config.get_ref("steps")
    config.eval_batch = 40
    config.eval_examples = 160
    return config


def sweep(add):
    """Methods and unequal data (whole files to nodes), three seeds each."""
    for seed in range(3):
        for adam in default.ADAMS:
            for partition in ("iid", "by_file"):
                add(**adam, **{"data.partition": partition}, seed=seed)
