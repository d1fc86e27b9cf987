"""Inline code for Pallas's interpreter: what `inline`, `panels` and `gather` emit, as loads, stores and barriers.

The functions are theirs, and so are the arguments; methods of `RowGather` take the gather first. The order between
warpgroups and copies is kept by the same barriers and fences as on a GPU, so that a missing one is a race here.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp8 import E4M3
from pallas_kernels.mosaic.row_groups import GROUP_ROWS

K_STEP = 64

COUNTED = -1
"""In the place of a number that a block took."""


def landed_barriers(stages):
    return plgpu.Barrier(num_barriers=stages)


def init_landed(landed, stages):
    """The interpreter has made them."""


def wait_landed(landed, slot, parity):
    plgpu.barrier_wait(landed.at[slot])


def load_chunks(gather, chunks, first_row):
    return jnp.repeat(chunks.at[pl.ds(first_row, gather.rows)][...], gather.chunks)


def cut(gather, chunks, valid_rows):
    row = jnp.arange(chunks.size) // gather.chunks
    return jnp.where(row < valid_rows, chunks, -1)


def copy_rows(gather, tokens, chunks, panel, landed, slot, first_column):
    chunk = chunks[:: gather.chunks, None]
    column = first_column + jnp.arange(gather.columns)
    known = (chunk >= 0) & (column < gather.width)
    # One load of everything, where the kernel loads what it needs: nobody writes to the source.
    row = jnp.maximum(chunk, 0) // (gather.width // 8)
    everything = jnp.concatenate([source[...] for source in tokens])
    values = jnp.where(known, everything[row, jnp.minimum(column, gather.width - 1)], 0)
    panel[...] = _as_panels(values, panel)
    plgpu.barrier_arrive(landed.at[slot])


def arrive(gather, landed, slot):
    """Nothing: nobody waits for rows in a slot without any, and of Pallas barriers every completion must be seen."""


def interleaved(values):
    """Of 64 columns, along the first axis: of each 16 the even ones come first, then the odd ones."""
    return values.reshape(4, 8, 2, -1).swapaxes(1, 2).reshape(values.shape)


def load_block(decoder, refs, slot, own):
    """From plain loads, and already decoded, by the weights' coding."""
    codes, scales = refs.codes[slot.number].reshape(-1, decoder.rows, K_STEP), refs.code_scales[slot.number]
    plgpu.commit_smem()  # a bulk copy may overwrite them, as it may after a wgmma
    block = 2 * own + refs.warpgroup
    of_weights = (scales[own], refs.warpgroup) if decoder.side_by_side == 2 else (scales[0], block)
    numbers = decoder.numbers(codes[block], *of_weights)
    return interleaved(numbers if decoder.transposed else numbers.T)


def decode(decoder, refs, loaded):
    return loaded


def load_columns(panel, first_column, byte=None):
    columns = panel[...][:, first_column : first_column + 16]
    if byte is None:
        return columns.astype(jnp.float32)
    words = lax.bitcast_convert_type(columns, jnp.uint16).astype(jnp.int32)
    return ((words >> 8 * byte & 255) - 128).astype(jnp.float32)


def pack_bytes(low, high, factor, dtype):
    low, high = (jnp.round(x * factor).astype(jnp.int32) + 128 & 255 for x in (low, high))
    return lax.bitcast_convert_type((low | high << 8).astype(jnp.uint16), dtype)


def pack_e4m3(low, high, dtype):
    low, high = (lax.bitcast_convert_type(x.astype(E4M3), jnp.uint8).astype(jnp.uint16) for x in (low, high))
    return lax.bitcast_convert_type(low | high << 8, dtype)


def store_of_rows(array, line, first, values, rows):
    @pl.loop(0, rows // 8)
    def _(i):
        array[line, pl.ds(first + i * 8, 8)] = lax.dynamic_slice_in_dim(values, i * 8, 8)


def store_columns(panel, first_column, values):
    before, after = panel[...][:, :first_column], panel[...][:, first_column + 16 :]
    panel[...] = jnp.concatenate([before, values, after], axis=1)  # a scatter would change bits that are a NaN's


def store_panels(panels, values, *, transposed=False):
    panels[...] = _as_panels(values.T if transposed else values, panels)


def load_interleaved(panel, first_row, rows):
    return interleaved(panel[...][first_row : first_row + rows].T).astype(jnp.float32)


def store_sums(array, first_line, first, values):
    for warp, of_warp in enumerate(values.reshape(4, 16, -1)):
        array[first_line + warp, pl.ds(first, values.shape[1])] = of_warp.sum(axis=0)


def store_interleaved(panel, first_row, values):
    in_order = values.reshape(4, 2, 8, -1).swapaxes(1, 2).reshape(values.shape)
    before, after = panel[...][:first_row], panel[...][first_row + values.shape[1] :]
    panel[...] = jnp.concatenate([before, in_order.T, after])


def memory_to_add(dtype, columns):
    return {"before": plgpu.SMEM((2, GROUP_ROWS, columns), dtype), "fetched": plgpu.Barrier(num_barriers=2)}


def leave(refs, buffer, target, *, add):
    """The interpreter has no copies that add: the sums are fetched, by a copy that knows the array's edges, too."""
    if add:
        before, fetched = refs.before.at[refs.warpgroup, pl.ds(0, buffer.shape[0])], refs.fetched.at[refs.warpgroup]
        plgpu.copy_gmem_to_smem(target, before, fetched)
        plgpu.barrier_wait(fetched)
        buffer[...] = (buffer[...].astype(jnp.float32) + before[...].astype(jnp.float32)).astype(buffer.dtype)
        plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, target, commit_group=False)


def _as_panels(values, panels):
    """`values` (rows, columns), cut into panels as wide as `panels`, one after the other."""
    parts = values.reshape(values.shape[0], -1, panels.shape[-1]).swapaxes(0, 1)
    return parts.reshape(panels.shape)


def wgmma(accumulator, lhs, rhs, *, first=False, transpose_lhs=False, transpose_rhs=False, packed=False):
    """From plain loads: the interpreter does not check what its own wgmma reads.

    In float32: of 16-bit operands, some CPUs add the products in an order that depends on the shapes.
    """
    lhs, rhs = lhs[...], rhs[...]
    plgpu.commit_smem()  # a bulk copy may overwrite the operands, as it may after a wgmma
    if packed:
        lhs, rhs = (lax.bitcast_convert_type(o, E4M3).reshape(o.shape[0], -1) for o in (lhs, rhs))
    lhs = lhs.T if transpose_lhs else lhs
    panels = rhs.reshape(-1, lhs.shape[1], rhs.shape[-1])
    rhs = rhs.T if transpose_rhs else jnp.concatenate(list(panels), axis=1)
    return accumulator + jnp.dot(lhs.astype(jnp.float32), rhs.astype(jnp.float32))


def finish_wgmma(accumulator):
    return accumulator


def zero_rows(panel, panels, first_row):
    values = panel[...]
    row = jnp.arange(values.shape[0])[:, None] % (values.shape[0] // panels)
    panel[...] = jnp.where(row < first_row, values, 0)
    plgpu.commit_smem()


def sigmoid(x):
    return lax.logistic(x)


def count(counter, block, turn):
    number = counter[block, turn]
    counter[block, turn] = COUNTED
    return number


def write_words(words, first, values):
    for i, value in enumerate(values):
        words[first + i] = value
