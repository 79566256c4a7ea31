"""jaxdec: decentralized training in JAX. Gossip with a few neighbours instead of all-reduce."""

__version__ = "0.1.0"

from jaxdec import algorithms, analysis, nodes, topology, wire
from jaxdec.gossip import Gossip, exchange
from jaxdec.topology import Topology

__all__ = [
    "Gossip",
    "Topology",
    "__version__",
    "algorithms",
    "analysis",
    "exchange",
    "nodes",
    "topology",
    "wire",
]
