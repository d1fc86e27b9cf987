"""Compiling for the GPUs of `gpus.py` on a machine without a GPU, and what the compilers say of the outcome.

The extra `compile-only` (CUDA 12) or `compile-only-cuda13` installs what this takes: jax's CUDA plugin and NVIDIA's
assembler, but none of the libraries that running on a GPU needs. Only the shapes and dtypes of arguments matter;
`on_gpu` places them.
"""

import importlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jaxlib.mlir import ir

from pallas_kernels.compile_only.gpus import GPUS, target_config
from pallas_kernels.compile_only.ptxas_report import KernelReport, captured_ptxas_report

_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


class Compiled(NamedTuple):
    """A program for a GPU and what is known of it without running it.

    Attributes:
      executable: the compiled function; it cannot be called here.
      memory: XLA's own plan, in bytes: `temp_size_in_bytes`, `argument_size_in_bytes`, `output_size_in_bytes`,
        `alias_size_in_bytes`.
      kernels: what the assembler reports of every Mosaic GPU kernel in the program; not of XLA's own.
    """

    executable: jax.stages.Compiled
    memory: Any
    kernels: tuple[KernelReport, ...]

    @property
    def spill_bytes(self) -> dict[str, int]:
        """Bytes that the kernels that do spill registers move for it, by kernel."""
        return {k.name: k.spill_bytes for k in self.kernels if k.spill_bytes}


def missing_compiler() -> str | None:
    """Why nothing can be compiled for an absent GPU here, or None if it can."""
    return None if _plugin() else "jax's CUDA plugin is not installed: pip install 'blaze_jax[compile-only]'"


def absent(gpu: str = "h200") -> Any:
    """The `jax.Device` of a GPU of `GPUS` that need not be there: lowering and compiling for it give its program."""
    return absent_host(1, gpu)[0]


@cache
def absent_host(count: int, gpu: str = "h200") -> tuple[Any, ...]:
    """So many of these GPUs in one host.

    Works before and after jax has started, and changes neither the devices that jax computes on nor the environment.
    Where a GPU is visible but only one of these extras is installed, set `JAX_PLATFORMS=cpu`: jax would start that
    GPU without its libraries.

    Raises:
      NotImplementedError: jax's CUDA plugin is not installed.
    """
    plugin = _plugin()
    if plugin is None:
        raise NotImplementedError(f"cannot compile for the {gpu}: {missing_compiler()}")
    target = target_config(GPUS[gpu], "12.9.0" if plugin == "jax_plugins.xla_cuda12" else "13.0.0")

    def topology():
        return topologies.get_topology_desc(gpu, "cuda", target_config=target, topology=f"1x1x{count}")

    # The plugin refuses to load without libraries that only running needs, unless told otherwise when jax first looks
    # for plugins. If jax has already looked, the plugin is asked once more.
    with _environment("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1"):
        try:
            return tuple(topology().devices)
        except NotImplementedError:
            importlib.import_module(plugin).initialize()
            return tuple(topology().devices)


def on_gpu(tree, gpu: str = "h200"):
    """Shapes and dtypes of `tree`'s arrays (or `jax.ShapeDtypeStruct`s), placed on a GPU that need not be there."""
    placement = jax.sharding.SingleDeviceSharding(absent(gpu))
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=placement), tree)


def compile_for_gpu(function: Callable, *arguments, gpu: str = "h200", **jit_options) -> Compiled:
    """Compiles `function` for a GPU, down to machine code.

    What the process writes to its standard output meanwhile, in whichever thread, is read as the assembler's report.

    Args:
      function: what to compile.
      arguments: arrays or `jax.ShapeDtypeStruct`s, of which shapes and dtypes matter, in any pytrees.
      gpu: a name of `GPUS`.
      jit_options: for `jax.jit`, such as `donate_argnums`.

    Raises:
      NotImplementedError: jax's CUDA plugin is not installed.
      RuntimeError: there are Mosaic GPU kernels in the program but the assembler reported on none; or this process has
        compiled for another compute capability before, to which jaxlib's compiler of these kernels then keeps.
    """
    arguments = on_gpu(arguments, gpu)
    if (first := _FIRST.setdefault("capability", GPUS[gpu].capability)) != GPUS[gpu].capability:
        raise RuntimeError(f"gpu={gpu!r} needs a process of its own: this one has compiled for capability {first}")
    # A function of its own: what jax has compiled before, it would not compile again, and nothing would be reported.
    with _environment("MOSAIC_GPU_DUMP_PTXAS", "1"), captured_ptxas_report() as kernels:
        with jax.default_device(absent(gpu)):  # where Mosaic looks for the instructions that it can use
            lowered = jax.jit(lambda *values: function(*values), **jit_options).lower(*arguments)
        num_kernels = mark_kernels_as_new(lowered)
        executable = lowered.compile()
    if num_kernels and not kernels:
        raise RuntimeError(
            f"ptxas reported on none of {num_kernels} kernels; jax {jax.__version__} may print no report"
        )
    return Compiled(executable, executable.memory_analysis(), tuple(kernels))


def kernel_hashes(lowered: jax.stages.Lowered) -> list[bytes]:
    """The hash of every Mosaic GPU kernel that a lowered program holds; functions called often hold theirs once."""
    return [kernel["kernel_hash"].value_bytes for _, kernel in _kernels(lowered.compiler_ir("stablehlo"))]


def kernel_texts(lowered: jax.stages.Lowered) -> list[str]:
    """The text of every Mosaic GPU kernel that a lowered program holds, the same whenever the same kernel is lowered.

    Hashes are not: jax 0.11 numbers the kernels of one name for its dumps, and the number is in what it hashes.
    """

    def text(kernel: dict[str, Any]) -> str:
        module = ir.Module.parse(kernel["module"].value_bytes)
        del module.operation.attributes["mosaic_gpu.dump_basename"]
        return str(module)

    program: Any = lowered.compiler_ir("stablehlo")
    with program.context as context:
        context.allow_unregistered_dialects = True  # a kernel is stored in a dialect of its own, which has no code
        return [text(kernel) for _, kernel in _kernels(program)]


def mark_kernels_as_new(lowered: jax.stages.Lowered) -> int:
    """Renames a lowered program and its Mosaic GPU kernels, equal ones alike, and counts the different kernels.

    A process assembles (and reports on) a kernel once; later programs get it from a cache, by this name. Programs, too,
    come from a cache by name and content if the user keeps one (`jax_compilation_cache_dir`), but a program for a GPU
    that is not there cannot be read back.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    names = defaultdict(partial(os.urandom, 32))
    with module.context:
        module.operation.attributes["sym_name"] = ir.StringAttr.get(f"compiled_only_{os.urandom(8).hex()}")
        for operation, kernel in _kernels(module):
            name = names[kernel["kernel_hash"].value_bytes]
            kernel["kernel_hash"] = ir.StringAttr.get(name)
            operation.attributes["mhlo.backend_config"] = ir.DictAttr.get(kernel)
    return len(names)


def _kernels(module: Any) -> list[tuple[Any, dict[str, Any]]]:
    """The operations that launch Mosaic GPU kernels, each with what describes its kernel."""
    found = []

    def visit(operation):
        attributes = operation.attributes
        if operation.name == "stablehlo.custom_call" and "mosaic_gpu" in str(attributes["call_target_name"]):
            found.append((operation, {a.name: a.attr for a in attributes["mhlo.backend_config"]}))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


_FIRST: dict[str, tuple[int, int]] = {}
"""The compute capability for which this process compiled first."""


def _plugin() -> str | None:
    """Name of the module of the newest CUDA plugin that is installed."""
    if find_spec("jax_plugins") is None:
        return None
    return next((name for name in _PLUGINS if find_spec(name)), None)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
