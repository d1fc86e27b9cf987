"""Matrices of a checkpoint, read a piece at a time and turned into the layer's orientation and type on a device."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from blaze_jax.checkpoints.block import Source
from blaze_jax.checkpoints.decode import FLOAT8_BLOCK, MXFP4_BLOCK, MXFP4_NAN, decode_float8, decode_mxfp4
from blaze_jax.checkpoints.errors import CheckpointError
from blaze_jax.checkpoints.folder import Stored
from blaze_jax.config import Parameter

PIECE_BYTES = 16 << 20
"""What is read at a time, at most about: most experts' matrices whole, which are then stored in one run."""

type Device = Any  # jax.Device, which is no type for a type checker

Format = Literal["plain", "mxfp4", "float8"]
_UNITS: dict[Format, tuple[int, int]] = {
    "plain": (1, 1),
    "mxfp4": (MXFP4_BLOCK, 1),
    "float8": (FLOAT8_BLOCK, FLOAT8_BLOCK),
}


class Piece(NamedTuple):
    """A part of a matrix `(in, out)`: rows of its inputs, columns of its outputs."""

    rows: slice
    columns: slice


def pieces(source: Source, whole: Piece) -> Iterator[Piece]:
    """A part of a matrix in pieces of about `PIECE_BYTES`, cut along the axis that the file runs along slowest."""
    rows, columns = whole
    turned = source.tensor.outputs_first
    long, other = (columns, rows) if turned else (rows, columns)
    step = max(PIECE_BYTES // (2 * FLOAT8_BLOCK * (other.stop - other.start)), 1) * FLOAT8_BLOCK
    bounds = [long.start, *range(long.start // FLOAT8_BLOCK * FLOAT8_BLOCK + step, long.stop, step), long.stop]
    for start, stop in pairwise(bounds):
        part = slice(start, stop)
        yield Piece(rows, part) if turned else Piece(part, columns)


def read_piece(
    source: Source, name: str, parameter: Parameter, expert: int, piece: Piece, dtype: DTypeLike, device: Device
) -> Array:
    """That piece of a kernel on the device: of the expert's matrix `(in, out)`, or of one that every token sees."""
    tensor, values, scales = source
    *leading, inputs, width = parameter.shape
    lead = (expert,) if leading and not tensor.of_one_expert else ()
    kind: Format = "plain" if scales is None else "mxfp4" if tensor.mxfp4 else "float8"
    of_rows, of_columns = _UNITS[kind]
    rows, columns = _cover(piece.rows, of_rows, inputs), _cover(piece.columns, of_columns, width)
    outputs = tensor.outputs(name, width, columns)
    if scales is None:
        parts = [values.read(*lead, *((outputs, rows) if tensor.outputs_first else (rows, outputs)))]
    elif kind == "mxfp4":
        blocks = _blocks(rows, MXFP4_BLOCK)
        numbers = values.read(*lead, outputs, blocks)
        parts = [numbers.reshape(len(numbers), -1), _sound(scales, scales.read(*lead, outputs, blocks))]
    else:
        blocks = _blocks(outputs, FLOAT8_BLOCK), _blocks(rows, FLOAT8_BLOCK)
        parts = [values.read(outputs, rows), _sound(scales, scales.read(*blocks))]

    turn = tensor.outputs_first
    # On a CPU, XLA's copy from the host turns a matrix ten times faster than numpy; elsewhere the device turns it.
    if turn and device.platform == "cpu":
        parts, turn = [part.T for part in parts], False
    parts = jax.device_put(parts, device)
    cut = _inside(piece.rows, rows), _inside(piece.columns, columns)
    if kind == "plain" and not turn and parts[0].dtype == dtype:
        return parts[0]
    return _decode(parts, kind, turn, cut, np.dtype(dtype))


def _sound(tensor: Stored, scales: np.ndarray) -> np.ndarray:
    """The scales; CheckpointError if one is not a number, which no model has, and which would spoil its whole block."""
    wrong = scales == MXFP4_NAN if scales.dtype == np.uint8 else ~np.isfinite(scales)
    if wrong.any():
        raise CheckpointError(f"{tensor} has scales that are no finite numbers")
    return scales


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _decode(parts: list[Array], kind: Format, turn: bool, cut: tuple[tuple[int, int], ...], dtype) -> Array:
    if turn:
        parts = [part.T for part in parts]
    match kind:
        case "plain":
            matrix = parts[0].astype(dtype)
        case "mxfp4":
            matrix = decode_mxfp4(parts[0], parts[1], dtype)
        case "float8":
            matrix = decode_float8(parts[0], parts[1], dtype)
    return matrix[tuple(slice(*bounds) for bounds in cut)]


def _cover(part: slice, unit: int, size: int) -> slice:
    """The least run of whole units around a part."""
    blocks = _blocks(part, unit)
    return slice(blocks.start * unit, min(blocks.stop * unit, size))


def _blocks(part: slice, unit: int) -> slice:
    return slice(part.start // unit, -(-part.stop // unit))


def _inside(part: slice, whole: slice) -> tuple[int, int]:
    return part.start - whole.start, part.stop - whole.start
