"""Parts of inline code: operands in shared memory, and the few words that its instructions need.

Inline code is what Pallas has no public form for on Hopper. `gather` and `panels` emit a handful of
instructions each through `plgpu.inline_mgpu`, and the kernels read as Pallas code on top. All of it leans on what jax
does not document, so look there first when a release breaks a kernel. Pallas's interpreter cannot run inline code:
`inline_interpreter` has the same functions for it.
"""

# Pallas declares neither what `inline_mgpu` returns nor that its transforms are concrete.
# pyright: reportCallIssue=false, reportAbstractUsage=false, reportArgumentType=false

import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

WARPGROUP = 128  # threads
CHUNK_BYTES = 16  # one cp.async
PANEL = K_STEP = 64
"""16-bit columns of a panel, 128 bytes. An operand in shared memory is panels one after the other."""

PANEL_BYTES = PANEL * 128

SWIZZLED = (plgpu.SwizzleTransform(128),)
"""Shared-memory layout of every panel: 128 bytes to a row, its 16-byte chunk c at place `c XOR (row mod 8)`.

Panels are not tiled as Pallas would have them, since bulk copies to and from tiles need widths that are whole tiles. A
bulk copy of a panel may reach past any edge of its array: it reads zeros there, and writes nothing.
"""

SCALAR = plgpu.Layout.WG_SPLAT


def int_type(bits):
    return ir.IntegerType.get_signless(bits)


def c32(value):
    return arith.constant(int_type(32), value)


def scalar(array):
    return array.registers.item()


def thread_index():
    return arith.remui(utils.thread_idx(), c32(WARPGROUP))


def global_pointer(ref):
    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(ref))


def shared_address(ref, offset):
    return arith.addi(llvm.ptrtoint(int_type(32), utils.memref_ptr(ref)), offset)


def as_tiles(ref, *leading):
    """Panels one after the other, (rows, columns) in all, as the tiles (*leading, rows, columns) that Mosaic knows."""
    panels = ir.MemRefType(ref.type)
    rows = np.prod(panels.shape[:-1]) // np.prod(leading)
    shape = (*leading, int(rows), panels.shape[-1])
    tiles = ir.MemRefType.get(shape, panels.element_type, memory_space=panels.memory_space)
    return utils.ptr_as_memref(utils.memref_ptr(ref), tiles)


def row_tiles(ref):
    """A panel (rows, columns) as tiles of 8 rows, the period of the swizzle."""
    return as_tiles(ref, ir.MemRefType(ref.type).shape[0] // 8, 1)


def ptx(text, *operands, constraints=""):
    llvm.inline_asm(ir.Type.parse("!llvm.void"), list(operands), text, constraints, has_side_effects=True)
