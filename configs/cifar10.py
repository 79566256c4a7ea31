"""ResNet-20 and VGG-16 on CIFAR-10 with DecentLaM on 8 nodes.

Claim: none of a paper's; small models to compare methods on.
Run: python -m jaxdec --config=configs/cifar10.py:resnet20 --workdir=DIR
     with resnet20 or vgg16; data: python -m jaxdec.data prepare cifar10
Expect: not run here.
Hardware: one accelerator, which simulates the nodes, or 8.

Our choice: all of it, after what is usual for these models on one device (0.1 for each 128 images,
weight decay 1e-4 for ResNet-20; 0.05 and 5e-4 for VGG-16).
"""

from ml_collections import ConfigDict

from configs import default

IMAGES, EPOCHS = 50_000, 160
MODELS = {"resnet20": (0.1, 1e-4), "vgg16": (0.05, 5e-4)}  # learning rate at 128, weight decay


def get_config(model: str = "resnet20") -> ConfigDict:
    if model not in MODELS:
        raise ValueError(
            f"model {model!r} is unknown; write :{' or :'.join(MODELS)} after the file"
        )
    rate, decay = MODELS[model]
    config = default.get_config()
    config.batch_size = 512
    config.steps = EPOCHS * IMAGES // config.get_ref("batch_size")
    config.schedule.name = "cosine"
    config.schedule.warmup_steps = config.get_ref("steps") * 5 // EPOCHS

    config.topology.name = "symmetric_exponential"
    config.algorithm.name = "decentlam"
    config.algorithm.learning_rate = config.get_ref("batch_size").to_float() * rate / 128
    config.algorithm.weight_decay = decay

    config.data.name = "cifar10"
    config.model.name = model

    config.eval_every = config.get_ref("steps") * 10 // EPOCHS  # ten epochs
    config.checkpoint_every = config.get_ref("eval_every")
    return config


def sweep(add):
    """Models × methods × batches × seeds, and unequal data."""
    for model in MODELS:
        for seed in range(3):
            for batch_size in (512, 2048):
                for name in ("decentlam", "allreduce", "dmsgd", "qg_dmsgd"):
                    add(model, **{"algorithm.name": name}, batch_size=batch_size, seed=seed)
            for name in ("decentlam", "dmsgd", "qg_dmsgd"):
                unequal = {"data.partition": "dirichlet", "data.alpha": 0.1}
                add(model, **{"algorithm.name": name}, **unequal, seed=seed)
