"""A language with one value per CUDA thread, for kernels that are about single numbers and not about tiles.

A kernel is a Python function of pointers, which is traced once and runs in every thread. This one doubles n numbers:

    def body(x, out):
        i = simt.block() * 128 + simt.thread()
        with simt.when(i < n):
            out[i] = x[i] * 2.0

    double = simt.kernel(body, name="double", outputs=[jax.ShapeDtypeStruct((n,), "float32")], blocks=n // 128 + 1,
                         warpgroups=1)
    (y,) = double(x)

- Values (`values`): `Int`, `Long` (an index of 64 bits), `Float`, `Bool` and short `Vector`s, each a number or a few of
  every thread, with Python's operators, but `a.equals(b)` for `==`. Plain numbers take the type of what they meet.
- Memory (`values.Pointer`): `p[i]` loads, `p[i] = x` stores, `p.at(i)` moves the start, `p.load_vector` takes up to 16
  bytes at once, `p.add` is atomic. Arrays are flat. Shared memory is asked for in words, and belongs to a block.
- Control flow (`threads`): Python's `if` and `for` are over when the kernel runs, and unroll. Where threads differ,
  `select` takes one of two values, `with when(condition)` does something in some threads, `branch` does and returns,
  `for i in indices(...)` repeats, and `loop` repeats with values that change.
- Other threads: `block_barrier` and `warp_barrier` order what threads write and read; `shuffle`, `lanes_where`,
  `combine_lanes` and others exchange values in a warp, all of whose lanes must take part.
- Matrices (`matrices`): copies to shared memory that go on while a thread computes, and products on tensor cores.
- Functions of jax (`elementwise`): activations and their derivatives, of one number per thread.

The package has the names that other modules have, too (`simt.block()`, `simt.Float`); all others are in its modules.

A body runs on two machines. `code` emits a kernel for any NVIDIA GPU since Ampere. Inside `interpreted()`,
`interpreter` runs all threads in numpy on any CPU, and finds what a GPU would do differently from run to run: two
threads that touch a word with no barrier between them, words that nobody has written, addresses outside of an array,
and barriers that not all threads reach.
"""

from pallas_kernels.mosaic.interpreter import interpreted as interpreted
from pallas_kernels.simt.threads import block as block
from pallas_kernels.simt.threads import block_barrier as block_barrier
from pallas_kernels.simt.threads import clear as clear
from pallas_kernels.simt.threads import kernel as kernel
from pallas_kernels.simt.threads import thread as thread
from pallas_kernels.simt.threads import warp as warp
from pallas_kernels.simt.threads import when as when
from pallas_kernels.simt.values import WARP as WARP
from pallas_kernels.simt.values import Bool as Bool
from pallas_kernels.simt.values import Float as Float
from pallas_kernels.simt.values import Int as Int
from pallas_kernels.simt.values import Long as Long
