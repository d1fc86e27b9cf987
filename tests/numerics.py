"""How results are compared: by the scaled error of whole tensors, or bit by bit."""

import math

import jax
import numpy as np

TOLERANCE = {"int32": 1e-12, "float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}


def scaled_error(out, ref) -> float:
    """`‖out − ref‖ / ‖ref‖`, which no scale of the tensor can hide; infinite if only `ref` is zero."""
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    difference, size = np.linalg.norm(out - ref), np.linalg.norm(ref)
    if size == 0:
        return 0.0 if difference == 0 else math.inf
    return float(difference / size)


def assert_close(out, ref, tolerance: float | None = None) -> None:
    """Asserts that each tensor of `out` is within `tolerance` of its twin, by default that of its own dtype."""

    def check(path, a, b):
        a, b = np.asarray(a), np.asarray(b)
        name = jax.tree_util.keystr(path)
        assert a.shape == b.shape, f"{name}: shape {a.shape}, expected {b.shape}"
        bar = TOLERANCE[a.dtype.name] if tolerance is None else tolerance
        error = scaled_error(a, b)
        assert error < bar, f"{name}: scaled error {error:.2e}, must be below {bar:.0e}"

    jax.tree_util.tree_map_with_path(check, out, ref)


def assert_same_bits(out, ref) -> None:
    """Asserts equal structure, dtypes, shapes and bytes."""

    def check(path, a, b):
        a, b = np.asarray(a), np.asarray(b)
        name = jax.tree_util.keystr(path)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{name}: {a.dtype}{a.shape}, expected {b.dtype}{b.shape}"
        assert a.tobytes() == b.tobytes(), f"{name}: differs in {np.sum(a != b)} of {a.size} values"

    jax.tree_util.tree_map_with_path(check, out, ref)
