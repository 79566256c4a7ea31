"""Eight nodes learn to read digits together: accumulated Adam on the one-peer exponential graph.

Run: python -m jaxdec --config=configs/quickstart.py --workdir=runs/quickstart
Expect: see the table in README.md, written by experiments/quickstart/.

Other algorithms by --config.algorithm.name=...; those of the SGD family want about
--config.algorithm.learning_rate=0.1.
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.steps = 600
    config.batch_size = 128
    config.algorithm.learning_rate = 3e-3
    config.algorithm.weight_decay = 0.01
    config.schedule.name = "cosine"
    config.schedule.warmup_steps = config.get_ref("steps") // 12
    config.label_smoothing = 0.1
    config.model.hidden = (256, 256)
    config.eval_every = 50
    return config
