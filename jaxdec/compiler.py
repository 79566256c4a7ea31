"""What it takes for each back end to hide gossip behind compute.

Found with `python -m jaxdec.audit`.
"""

import json
from typing import Any

Options = dict[str, Any]

# By the platform of a mesh's devices.
OPTIONS: dict[str, Options] = {
    # All leaves in one transfer, which starts before the forward pass and not where the compiler's
    # own estimate would have it: as late as it believes it can.
    "gpu": {
        "xla_gpu_experimental_collective_start_as_early_as_possible": True,
        "xla_gpu_collective_permute_combine_threshold_bytes": 2**40,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
    },
}


# Flat arrays that a model travels in. A TPU's compiler puts many transfers after one another behind
# the backward pass, and few large ones beside all of it; a GPU's combines them itself.
BUCKETS = {"tpu": 4}


def options(platform: str, overrides: str | None = None) -> Options:
    """The options of a platform, with some of a config's.

    Args:
      platform: of the devices: "gpu", "tpu", "cpu".
      overrides: "name=value,name=value"; a value is JSON, or text.

    Raises:
      ValueError: one of the overrides is no pair.

    >>> options("cpu", "xla_cpu_enable_fast_math=true")
    {'xla_cpu_enable_fast_math': True}
    """
    found = dict(OPTIONS.get(platform, {}))
    for part in filter(None, (overrides or "").split(",")):
        name, is_pair, value = part.strip().partition("=")
        if not is_pair or not name.startswith("xla_"):
            raise ValueError(
                f"compiler_options={overrides!r}: {part!r} is no option; write "
                "xla_name=value,xla_name=value"
            )
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found
