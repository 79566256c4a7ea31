"""ResNet-50 on ImageNet with accumulated Adam on 32 nodes (arXiv 2410.11998).

Claim: moments that accumulate over windows keep Adam as accurate without an all-reduce.
Run: python -m jaxdec --config=configs/imagenet_accumulated_adam.py --workdir=DIR
     data: python -m jaxdec.data prepare imagenet2012 --source=FOLDER
Expect: not run here. Published top-1, %, 32 workers: accumulated Adam 76.54, decentralized Adam
    75.31 (both on the alternating exponential ring), AllReduce 76.01.
Hardware: 32 accelerators, one a node, on 8 hosts.

Our choice: 4 nodes a host, and the betas that are not set here. In the sweep, decentralized Adam's
learning rate is AllReduce's, and its β₁ that of the paper's baselines, 0.9^(1/window).
"""

from ml_collections import ConfigDict

from configs import default

IMAGES, EPOCHS = 1_281_167, 90


def get_config() -> ConfigDict:
    config = default.get_config()
    config.nodes = 32
    config.batch_size = 1024
    config.steps = EPOCHS * IMAGES // config.get_ref("batch_size")
    config.schedule.name = "cosine"
    config.schedule.warmup_steps = config.get_ref("steps") * 5 // EPOCHS
    config.schedule.end = 1e-5 / config.algorithm.get_ref("learning_rate")
    config.label_smoothing = 0.1

    config.topology.name = "alternating_exponential_ring"
    config.topology.local = 4
    config.algorithm.name = "accumulated_adamw"
    config.algorithm.window = 8
    config.algorithm.learning_rate = 1.5e-3

    config.data.name = "imagenet2012"
    config.model.name = "resnet"
    config.model.depth = 50
    config.model.dtype = "bfloat16"

    config.log_every = 50
    # Every node is evaluated on all 50,000 images: ten epochs.
    config.eval_every = config.get_ref("steps") * 10 // EPOCHS
    config.eval_batch = 250
    config.checkpoint_every = config.get_ref("steps") // EPOCHS
    return config


def sweep(add):
    """The paper's three methods, three seeds each."""
    plain = {"algorithm.window": None, "algorithm.learning_rate": 1e-3}
    decentralized = {"algorithm.name": "decentralized_adamw", "algorithm.b1": 0.9 ** (1 / 8)}
    allreduce = {"algorithm.name": "allreduce", "algorithm.optimizer": "adamw"}
    for seed in range(3):
        add(seed=seed)
        add(**plain, **decentralized, seed=seed)
        add(**plain, **allreduce, seed=seed)
