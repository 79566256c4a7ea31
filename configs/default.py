"""Every field of a run, with its default and meaning. Other configs import this one and override.

Run: python -m jaxdec --config=configs/default.py --workdir=DIR
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

# The Adams that sweeps and studies compare.
ACCUMULATED_ADAM = {"algorithm.name": "accumulated_adamw"}
DECENTRALIZED_ADAM = {"algorithm.name": "decentralized_adamw"}
ALLREDUCE_ADAM = {"algorithm.name": "allreduce", "algorithm.optimizer": "adamw"}
ADAMS = (ACCUMULATED_ADAM, DECENTRALIZED_ADAM, ALLREDUCE_ADAM)


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.mode = "train"  # or "evaluate", of the newest checkpoint in the workdir
    config.seed = 0  # of initialization, partition and batches
    config.nodes = 8  # replicas of the model
    config.steps = 1000  # training steps
    # Examples a step over all nodes, a multiple of nodes × accumulate; of translations, tokens.
    config.batch_size = 128
    config.accumulate = 1  # parts that a node takes its batch in, one after another
    config.lift = "auto"  # "simulate" (one device), "mesh" (one node a device), or "auto"
    # What gossip sends: "bfloat16", "float16", or "int8" (rounded at random); None: as is.
    config.wire_dtype = placeholder(str)
    config.allow_unstable = False  # run pairs that analysis.check refuses
    config.max_executables = 16  # most compiled steps, one for each distinct round

    # Devices along the axes of a mesh; node × local = nodes, in all node × local × data devices.
    config.mesh = ConfigDict()
    config.mesh.node = placeholder(int)  # None: nodes / local
    config.mesh.local = 1  # replicas that share a host: it gossips as one, in a hierarchical graph
    config.mesh.data = 1  # devices that share a replica, each with a part of its batch
    # XLA's options on a mesh, "name=value,name=value", beside jaxdec's own for the back end.
    config.compiler_options = placeholder(str)

    config.topology = ConfigDict()
    config.topology.name = "one_peer_exponential"  # a name of jaxdec.topology
    config.topology.lazy = False  # (I + W)/2 of it
    # Exact mean every so many steps; None: never, and every 12 for slowmo, which needs one.
    config.topology.mean_every = placeholder(int)
    # The rest is passed to the topologies that take it; None: their own default.
    config.topology.symmetric = placeholder(bool)  # one_peer_exponential: XOR pairs
    config.topology.local = placeholder(int)  # alternating_exponential_ring, hierarchical
    config.topology.outer = placeholder(str)  # hierarchical: name of the graph between hosts
    config.topology.rows = placeholder(int)  # grid, torus
    config.topology.k = placeholder(int)  # base_k: most neighbours a round
    config.topology.period = placeholder(int)  # random_matching: matchings before they repeat
    config.topology.bipartite = placeholder(bool)  # random_matching: even nodes with odd ones
    config.topology.probability = placeholder(float)  # erdos_renyi: of an edge
    config.topology.seed = placeholder(int)  # random_matching, erdos_renyi
    config.topology.matrices = placeholder(str)  # from_matrices: a .npy, [n, n] or [period, n, n]

    config.algorithm = ConfigDict()
    config.algorithm.name = "accumulated_adamw"  # a name of jaxdec.algorithms
    config.algorithm.learning_rate = 1e-3  # highest of the schedule
    # The rest is passed to the algorithms that take it; None: their own default.
    config.algorithm.weight_decay = placeholder(float)
    # The Adams and allreduce: which parameters decay: "all", or "matrices" (two axes or more).
    config.algorithm.decay = placeholder(str)
    config.algorithm.clip_norm = placeholder(float)  # global norm of a node's gradient
    config.algorithm.order = placeholder(str)  # "awc" or "atc": dsgd, decentlam, the Adams, choco
    config.algorithm.momentum = placeholder(float)  # β
    config.algorithm.mu = placeholder(float)  # qg_dmsgd
    config.algorithm.nesterov = placeholder(bool)  # decentlam
    config.algorithm.lars = placeholder(bool)  # decentlam
    config.algorithm.slow_momentum = placeholder(float)  # slowmo
    config.algorithm.slow_learning_rate = placeholder(float)  # slowmo
    config.algorithm.window = placeholder(int)  # accumulated_adamw
    config.algorithm.b1 = placeholder(float)  # the Adams
    config.algorithm.b2 = placeholder(float)  # the Adams
    config.algorithm.eps = placeholder(float)  # the Adams
    # choco, deep_squeeze: α in (0, 1], which they need; choco: 0.3 with top_k of a tenth.
    config.algorithm.consensus_rate = placeholder(float)
    # choco, deep_squeeze: "top_k", "random_k" or "int8"; None: every entry as it is.
    config.algorithm.compressor = placeholder(str)
    config.algorithm.keep = placeholder(float)  # top_k, random_k: share of the entries sent
    config.algorithm.optimizer = placeholder(str)  # allreduce: momentum, lars, lamb, adamw

    config.schedule = ConfigDict()
    # After the warm-up: "constant"; "cosine"; "inverse_sqrt"; "steps", ÷10 at each boundary.
    config.schedule.name = "constant"
    config.schedule.warmup_steps = 0  # linear, from exactly zero
    config.schedule.end = 0.0  # cosine: where it ends, as a share of the highest
    config.schedule.boundaries = ()  # steps: at which steps

    config.data = ConfigDict()
    config.data.name = "digits"  # a name of jaxdec.data
    config.data.data_dir = placeholder(str)  # where it was prepared; None: TFDS's own
    config.data.partition = "iid"  # over nodes: "iid", "dirichlet", "by_class", "by_file"
    config.data.alpha = placeholder(float)  # dirichlet: concentration; small is heterogeneous

    # The rest is passed to the sets that take it; None: their own default.
    config.data.context = placeholder(int)  # texts: tokens an example
    config.data.folder = placeholder(str)  # tokens: of train.bin and test.bin, below data_dir
    config.data.vocabulary = placeholder(int)  # tokens: number of token ids
    config.data.augment = placeholder(bool)  # images: crops and flips in training

    config.label_smoothing = 0.0  # of the training loss, in [0, 1)

    config.model = ConfigDict()
    config.model.name = "mlp"  # a name of jaxdec.models
    # The rest is passed to the models that take it; None: their own default.
    config.model.hidden = placeholder(tuple)  # mlp: widths of the hidden layers
    config.model.channels = placeholder(tuple)  # cnn: of each convolution
    config.model.dense = placeholder(int)  # cnn: units of the layer before the head
    config.model.kernel = placeholder(int)  # cnn: side of the filters
    config.model.width = placeholder(int)  # resnets: channels; gpt: of the residual stream
    config.model.depth = placeholder(int)  # resnet: 18, 34 or 50
    # vgg16, mobilenet_v2, efficientnet_b0: multiplies the channels; efficientnet_b0: the blocks too
    config.model.width_factor = placeholder(float)
    config.model.depth_factor = placeholder(float)
    config.model.count = placeholder(int)  # resnet20: blocks a stage
    config.model.small_input = placeholder(bool)  # resnet and the two above: a stem for CIFAR
    config.model.zero_scale = placeholder(bool)  # resnet: residuals start at zero
    config.model.layers = placeholder(int)  # gpt: blocks; transformer: on either side
    config.model.heads = placeholder(int)  # gpt, transformer: of the attention
    config.model.mlp = placeholder(int)  # transformer: width inside the feed-forward layers
    config.model.style = placeholder(str)  # gpt: "gpt2" or "llama"
    config.model.dropout = placeholder(float)  # gpt, transformer: rate
    config.model.remat = placeholder(bool)  # gpt, transformer: compute blocks again going backward
    config.model.dtype = placeholder(str)  # of the computation: "bfloat16"; None: "float32"

    config.log_every = 10  # steps between lines of training metrics
    config.eval_every = 100  # steps between evaluations of the mean model
    config.eval_batch = 1000  # test examples at a time
    config.eval_examples = placeholder(int)  # of the test split, evenly spaced; None: all
    # Batch statistics of the mean model: 0: the mean of all nodes'; otherwise its own, gathered on
    # so many training batches, pooled over nodes.
    config.recalibrate_batches = 0
    config.checkpoint_every = 500  # steps between checkpoints; also at the end and on SIGTERM
    # Workdir of a run to start from: its newest checkpoint, step included.
    config.restore = placeholder(str)
    # Where it had another number of nodes: "mean", all start from its mean model and buffers; or
    # "nearest", each from the nearest node's.
    config.restore_rule = "mean"
    config.profile_steps = 0  # steps to trace with jax.profiler, once all rounds are compiled
    config.watchdog_seconds = 60.0  # several processes: without a sign of one, and the others end
    config.wandb = placeholder(str)  # project at Weights & Biases; None: not sent there
    return config
