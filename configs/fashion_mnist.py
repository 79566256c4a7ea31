"""Eight nodes learn Fashion-MNIST: accumulated Adam on the one-peer exponential graph.

Claim: none of a paper's; the smallest run on real photographs.
Run: python -m jaxdec --config=configs/fashion_mnist.py --workdir=DIR
     data: python -m jaxdec.data prepare fashion_mnist
Expect: 0.906 test accuracy of the mean model, loss 0.268, in 2 min 40 s; seed 0 only (measured on
     2 CPU cores, jax 0.10.2). With the model's own channels, (16, 32): 0.900.
Hardware: any; 2 CPU cores simulate the nodes.
"""

from ml_collections import ConfigDict

from configs import default

IMAGES, EPOCHS = 60_000, 6


def get_config() -> ConfigDict:
    config = default.get_config()
    config.batch_size = 256
    config.steps = EPOCHS * IMAGES // config.get_ref("batch_size")
    config.schedule.name = "cosine"
    config.schedule.warmup_steps = config.get_ref("steps") // 12

    config.algorithm.learning_rate = 3e-3
    config.algorithm.weight_decay = 0.01

    config.data.name = "fashion_mnist"
    config.model.name = "cnn"
    config.model.channels = (32, 64)

    config.log_every = 20
    config.eval_every = config.get_ref("steps") // EPOCHS  # an epoch
    return config


def sweep(add):
    """Methods, batches and unequal data, six seeds each."""
    for seed in range(6):
        for adam in default.ADAMS:
            for batch_size in (256, 1024):
                add(**adam, batch_size=batch_size, seed=seed)
            add(**adam, **{"data.partition": "dirichlet", "data.alpha": 0.3}, seed=seed)
