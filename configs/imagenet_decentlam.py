"""ResNet-50 on ImageNet with DecentLaM, total batch 2K to 32K (arXiv 2104.11981).

Claim: momentum does not amplify the bias of decentralization, so large batches lose no accuracy.
Run: python -m jaxdec --config=configs/imagenet_decentlam.py:16k --workdir=DIR
     with 2k, 8k, 16k or 32k; data: python -m jaxdec.data prepare imagenet2012 --source=FOLDER
Expect: not run here. Published top-1, %: 76.43 (2k), 76.19 (8k), 76.73 (16k), 76.22 (32k).
Hardware: 8 accelerators, one a node; a node takes its batch in parts of at most 256 images.

Recalled and unverified: epochs, warm-up, drops and momentum. Our choice: the graph, weight decay,
and a learning rate of 0.1 for each 256 images.
"""

from ml_collections import ConfigDict

from configs import default

IMAGES = 1_281_167
BATCHES = {"2k": 2048, "8k": 8192, "16k": 16384, "32k": 32768}


def get_config(batch: str = "2k") -> ConfigDict:
    if batch not in BATCHES:
        raise ValueError(f"batch {batch!r} is unknown; write :{', :'.join(BATCHES)} after the file")
    config = default.get_config()
    config.nodes = 8
    config.batch_size = BATCHES[batch]
    config.accumulate = -(-config.get_ref("batch_size") // (config.get_ref("nodes") * 256))
    epochs, warmup = (90, 5) if batch == "2k" else (120, 20)
    config.steps = epochs * IMAGES // config.get_ref("batch_size")
    config.schedule.warmup_steps = warmup * IMAGES // config.get_ref("batch_size")
    if batch == "2k":
        config.schedule.name = "steps"
        # A tuple cannot be linked: choose the batch after the file, not by its field.
        config.schedule.boundaries = tuple(e * IMAGES // config.batch_size for e in (30, 60, 80))
    else:
        config.schedule.name = "cosine"

    config.topology.name = "symmetric_exponential"
    config.algorithm.name = "decentlam"
    config.algorithm.momentum = 0.9
    config.algorithm.learning_rate = config.get_ref("batch_size").to_float() * 0.1 / 256
    config.algorithm.weight_decay = 1e-4

    config.data.name = "imagenet2012"
    config.model.name = "resnet"
    config.model.depth = 50
    config.model.dtype = "bfloat16"

    config.log_every = 50
    # Every node is evaluated on all 50,000 images: five epochs.
    config.eval_every = config.get_ref("steps") * 5 // epochs
    config.eval_batch = 250
    config.checkpoint_every = config.get_ref("steps") // epochs
    return config


def sweep(add):
    """Methods × batches × seeds; `lars` for the largest batches."""
    for seed in range(3):
        for batch in BATCHES:
            for name in ("decentlam", "allreduce", "dmsgd", "qg_dmsgd"):
                add(batch, **{"algorithm.name": name, "seed": seed})
        for batch in ("16k", "32k"):
            lars = {"algorithm.lars": True, "algorithm.learning_rate": 10.0}
            add(batch, **lars, seed=seed)
