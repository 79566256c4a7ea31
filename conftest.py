"""Eight CPU devices and strict array semantics, for the tests and the doctests alike."""

import os
import pathlib

# Most of the tests' time is compiling. XLA's own passes stay; LLVM's go. For commands run too.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# With libtpu installed, to compile for TPUs, JAX would look for one.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# The same small programs are compiled in many tests, and in many commands that tests run.
CACHE = pathlib.Path(__file__).parent / ".pytest_cache" / "xla"
jax.config.update("jax_compilation_cache_dir", str(CACHE / "tests"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE / "commands")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
