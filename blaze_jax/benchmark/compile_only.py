"""`--compile-only h200`: memory on an H200 by the compiler's own plan, with no GPU."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp

from blaze_jax.benchmark.inputs import abstract_inputs, forward_and_backward
from blaze_jax.benchmark.peers import UnavailableError, estimated_bytes, peer_variants
from blaze_jax.benchmark.plan import MIB, plan_of
from blaze_jax.benchmark.residuals import saved_bytes
from blaze_jax.benchmark.sizes import Sizes
from blaze_jax.experts import expert_ffn
from blaze_jax.plan import Save
from pallas_kernels.compile_only import compile_for_gpu

H200_BYTES = 141 * 10**9
_SAVES: tuple[Save, ...] = ("pre_activations", "inputs")


def measure_memory(sizes: Sizes, dtype, *, peers: Sequence[str]) -> dict[str, Any]:
    """Saved bytes and plan of forward+backward of our layer in both of its modes and of its peers.

    Raises:
      NotImplementedError: jax's CUDA plugin is not installed.
    """
    inputs = abstract_inputs(sizes, dtype)
    layers = {
        f"blaze_jax, save={save!r}": partial(expert_ffn, save=save, implementation="mosaic_gpu") for save in _SAVES
    }
    rows = [_row(name, layer, inputs) for name, layer in layers.items()]
    for name in peers:
        try:
            needed, what = estimated_bytes(name, sizes, jnp.dtype(dtype).itemsize, backward=True)
            if needed > H200_BYTES:
                raise UnavailableError(f"out of memory: {what} takes {needed / 2**30:.0f} GiB")
            rows += [
                _row(f"{name} ({kind})", layer, inputs) for kind, layer in peer_variants(name, for_gpu=True).items()
            ]
        except UnavailableError as error:
            rows.append({"layer": name, "status": str(error)})
    return {
        "kind": "memory",
        "target": "h200",
        "sizes": sizes._asdict(),
        "dtype": jnp.dtype(dtype).name,
        "layers": rows,
    }


def _row(name: str, layer, inputs) -> dict[str, Any]:
    row: dict[str, Any] = {"layer": name, "status": "ok"}
    try:
        row["saved_mib"] = saved_bytes(layer, *inputs) / MIB
        plan = plan_of(compile_for_gpu(forward_and_backward(layer), *inputs, inputs[0]).memory)
    except Exception as error:  # of a peer or the compiler: that it cannot is the result
        row["status"] = f"does not compile: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return row
    if plan is not None:
        row |= {"temporaries_mib": plan.temporaries / MIB, "peak_mib": plan.peak / MIB, "total_mib": plan.total / MIB}
        if plan.total > H200_BYTES:
            row["status"] = f"out of memory: needs {plan.total / 2**30:.0f} GiB"
    return row
