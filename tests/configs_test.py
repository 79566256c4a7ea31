"""Every file in configs/ builds and lowers its training step, with no data and no model allocated."""

import importlib
import inspect
import pathlib
import re

import jax
import numpy as np
import pytest

from configs import default, quickstart
from jaxdec import config as configs
from jaxdec import data
from jaxdec.train import build

FOLDER = pathlib.Path(__file__).parent.parent / "configs"
FILES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")

# Arguments of get_config, what follows the colon of --config=configs/x.py:ARGUMENT.
ARGUMENTS = {
    "cifar10": ("resnet20", "vgg16"),
    "imagenet_decentlam": ("2k", "8k", "16k", "32k"),
}
# Tracing one of their steps takes seconds; their phases differ in permutations alone, and the
# small configs lower all of theirs on the same graphs.
ONE_PHASE = ("cifar10", "gpt2_small", "imagenet_accumulated_adam", "imagenet_decentlam")
MILLIONS = {  # of parameters
    "default": 0.0,
    "gpt2_small": 124.439808,
    "imagenet_accumulated_adam": 25.557032,
    "imagenet_decentlam": 25.557032,
    "stdlib_gpt": 1.0,
}


def _module(name):
    return importlib.import_module(f"configs.{name}")


def _cases():
    return [(name, *argument) for name in FILES for argument in _arguments(name)]


def _arguments(name):
    return [(argument,) for argument in ARGUMENTS[name]] if name in ARGUMENTS else [()]
