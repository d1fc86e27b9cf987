"""A launch in the interpreter, of 128 threads a block."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import simt

THREADS = 128
INDEX = np.arange(THREADS, dtype=np.int32)


def run(body, *inputs, blocks=1, size=THREADS, dtype="int32", shared=THREADS):
    """The output of `body(*inputs, output, shared)`: `size` long, with so many words of shared memory."""
    out = jax.ShapeDtypeStruct((size,), dtype)
    with simt.interpreted():
        kernel = simt.kernel(body, name="test", outputs=[out], blocks=blocks, warpgroups=1, shared=[shared])
        return np.asarray(kernel(*jax.tree.map(jnp.asarray, inputs))[0])
