"""Eight nodes learn to translate German to English, from a dictionary's sentences.

Claim: none of a paper's; the smallest run of the encoder-decoder, with its search and BLEU.
Run: python -m jaxdec --config=configs/trans_de_en.py --workdir=DIR
     data: python -m jaxdec.data prepare trans_de_en
Expect: see experiments/trans_de_en.
Hardware: any; 2 CPU cores simulate the nodes.
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.batch_size = 4096  # tokens
    config.steps = 2000
    config.schedule.name = "inverse_sqrt"
    config.schedule.warmup_steps = config.get_ref("steps") // 10
    config.label_smoothing = 0.1

    config.algorithm.learning_rate = 3e-3
    config.algorithm.b2 = 0.98
    config.algorithm.eps = 1e-9

    config.data.name = "trans_de_en"
    config.model.name = "transformer"
    config.model.layers = 2
    config.model.heads = 4
    config.model.width = 64
    config.model.mlp = 256
    config.model.dropout = 0.1

    config.log_every = 20
    config.eval_every = config.get_ref("steps") // 4
    config.eval_batch = 50
    return config


def sweep(add):
    """Methods, three seeds each."""
    for seed in range(3):
        for adam in default.ADAMS:
            add(**adam, seed=seed)
