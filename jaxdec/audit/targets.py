"""The machines that programs are compiled for, none of which need be here.

"cuda:h100:2x8" is two hosts of eight H100s each; "tpu:v5e:4x4" a slice of sixteen v5e; "cpu:8"
eight CPU devices, as if each were a host.
"""

import contextlib
import dataclasses
import importlib.util
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from jaxdec import registry
from jaxdec.config import ConfigError

GPU_DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {memory_rate:.0f}
  l2_cache_size: {cache}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {block_memory}
  cuda_compute_capability {{ major: {capability} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{name}"
"""
PLUGINS = {"cuda": "jax_cuda12_plugin", "tpu": "libtpu"}


@dataclasses.dataclass(frozen=True)
class Chip:
    """What a roofline needs to know of a device: figures of its maker's data sheet.

    Attributes:
      flops: dense products of bfloat16 a second.
      memory_rate: bytes a second to its memory.
      link_rate: bytes a second, one way, from a device to another of its host (TPU: by one link
        of the interconnect).
      network_rate: bytes a second, one way, that leave a host; None: its devices are linked to
        those of other hosts as to their own.
      latency: seconds before a message's first byte.
      gpu: fields of `GPU_DESCRIPTION` beyond memory_rate.
    """

    flops: float
    memory_rate: float
    link_rate: float
    network_rate: float | None
    latency: float = 10e-6
    gpu: dict[str, Any] | None = None

    @property
    def leaving_rate(self) -> float:
        """Bytes a second that leave a host, or a device where hosts are no boundary."""
        return self.network_rate or self.link_rate


CHIPS = {
    "cuda": {
        "h100": Chip(
            flops=989e12,
            memory_rate=3.352e12,
            link_rate=450e9,
            network_rate=8 * 50e9,
            gpu=dict(
                shared_memory=233472,
                cores=132,
                units=128,
                cache=52428800,
                clock=1.98,
                memory=84942979072,
                block_memory=232448,
                capability=9,
                name="NVIDIA H100 80GB HBM3",
            ),
        ),
        "a100": Chip(
            flops=312e12,
            memory_rate=2.039e12,
            link_rate=300e9,
            network_rate=8 * 25e9,
            gpu=dict(
                shared_memory=167936,
                cores=108,
                units=64,
                cache=41943040,
                clock=1.41,
                memory=85100068864,
                block_memory=166912,
                capability=8,
                name="NVIDIA A100-SXM4-80GB",
            ),
        ),
    },
    "tpu": {
        "v5e": Chip(flops=197e12, memory_rate=819e9, link_rate=50e9, network_rate=None),
        "v5p": Chip(flops=459e12, memory_rate=2.765e12, link_rate=100e9, network_rate=None),
        "v6e": Chip(flops=918e12, memory_rate=1.64e12, link_rate=112e9, network_rate=None),
    },
}
# Not a machine's: so that shares and ratios can be told on any.
CPU = Chip(flops=100e9, memory_rate=20e9, link_rate=1.25e9, network_rate=1.25e9, latency=50e-6)


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to compile for, and what is known of them.

    Attributes:
      name: as it was asked for.
      platform: "cuda", "tpu" or "cpu".
      chip: each of them.
      devices: in the order of hosts.
      hosts: the host of each device.
    """

    name: str
    platform: str
    chip: Chip
    devices: Sequence[jax.Device]
    hosts: tuple[int, ...]


def find(name: str) -> Target:
    """The devices that a target names. Call it before JAX has looked for its own.

    Raises:
      ConfigError: no such target, or what compiles for it is not installed.
    """
    platform, *rest = name.split(":")
    if platform == "cpu" and len(rest) == 1 and rest[0].isdigit() and int(rest[0]) > 0:
        return _cpu(name, int(rest[0]))
    if platform not in CHIPS or len(rest) != 2:
        raise ConfigError(
            f"--target={name} is unknown; write cuda:h100:HOSTSxDEVICES, cuda:a100:2x8, "
            "tpu:v5e:4x4, tpu:v5p:2x2x2 or cpu:DEVICES"
        )
    kind, shape = rest
    if kind not in CHIPS[platform]:
        choices = registry.suggestion(kind, tuple(CHIPS[platform]))
        raise ConfigError(f"--target={name}: no {platform} {kind!r} is known; {choices}")
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", shape):
        raise ConfigError(f"--target={name}: {shape!r} is no shape; write one such as 2x8")
    sizes = [int(size) for size in shape.split("x")]
    return (_cuda if platform == "cuda" else _tpu)(name, CHIPS[platform][kind], kind, sizes)


def _cpu(name: str, count: int) -> Target:
    jax.config.update("jax_platforms", "cpu")
    with contextlib.suppress(RuntimeError):  # of a JAX that has looked for its devices
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")[:count]
    if len(devices) < count:
        raise ConfigError(
            f"--target={name}: JAX was started with {len(devices)} CPU devices; set "
            f"JAX_NUM_CPU_DEVICES={count}"
        )
    return Target(name, "cpu", CPU, devices, tuple(range(count)))


def _cuda(name: str, chip: Chip, kind: str, sizes: list[int]) -> Target:
    if len(sizes) != 2:
        raise ConfigError(f"--target={name}: write cuda:{kind}:HOSTSxDEVICES, such as 2x8")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    hosts, each = sizes
    assert chip.gpu is not None
    found = _described(
        name,
        platform="cuda",
        target_config=GPU_DESCRIPTION.format(memory_rate=chip.memory_rate, **chip.gpu),
        topology=f"1x{hosts}x{each}",
    )
    return Target(name, "cuda", chip, found, tuple(i // each for i in range(len(found))))


def _tpu(name: str, chip: Chip, kind: str, sizes: list[int]) -> Target:
    # So that libtpu neither asks a metadata server nor complains that it has none.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    for variable, value in (("ACCELERATOR_TYPE", f"{kind}-1"), ("WORKER_HOSTNAMES", "localhost")):
        os.environ.setdefault(f"TPU_{variable}", value)
    shape = "x".join(map(str, sizes))
    found = _described(name, platform="tpu", topology_name=f"{kind}:{shape}")
    return Target(name, "tpu", chip, found, tuple(device.process_index for device in found))


def _described(name: str, *, platform: str, **fields: str) -> Sequence[jax.Device]:
    needed = PLUGINS[platform]
    if importlib.util.find_spec(needed) is None:
        raise ConfigError(
            f"--target={name}: {needed}, which compiles for it, is not installed; "
            f"pip install 'jaxdec[audit-{platform}]'"
        )
    # No device here is used; without this JAX would look for one, slowly.
    jax.config.update("jax_platforms", "cpu")
    try:
        return topologies.get_topology_desc(platform=platform, **fields).devices
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(f"--target={name}: {str(error).strip().splitlines()[0]}") from error
