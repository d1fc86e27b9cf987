"""How candidates are compared: bits first, then time, and what cannot run is left out."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from blaze_jax.benchmark.timing import KernelTotal, Timing
from blaze_jax.tune.cases import Case
from blaze_jax.tune.measure import choose, kernel_us, tune
from pallas_kernels.tuning.parameters import TileTuning

CANDIDATES = tuple(TileTuning(tile_width=width) for width in (1, 2, 4, 8))
DEFAULT, SAME, WRONG, BROKEN = CANDIDATES


def run(tuning, operands):
    """Results that differ below the last row used for one candidate, and past it for another."""
    if tuning == BROKEN:
        raise NotImplementedError("cannot be lowered")
    row = {SAME: 3, WRONG: 2}.get(tuning)
    x = operands["x"]
    return {"y": x if row is None else x.at[row].add(1)}


class Operands(dict):
    """A pytree of the operands that `run` takes, with the one attribute that is asked of it."""

    dispatch = SimpleNamespace(expert_token_offsets=jnp.array([0, 3]))


jax.tree_util.register_pytree_node(Operands, lambda o: ((o["x"],), None), lambda _, leaves: Operands(x=leaves[0]))


def tuned(candidates, seconds=60.0):
    operands: Any = Operands(x=jnp.ones((5, 4), jnp.bfloat16))
    return tune(Case("up_projection", "shape", run, True, candidates), operands, seconds=seconds, repeats=2)


def test_other_bits_and_failures_are_left_out():
    found = tuned(CANDIDATES)
    assert found.tried == 2
    assert found.tuning in (DEFAULT, SAME)
    assert any(note.startswith(f"{WRONG} gives other bits than {DEFAULT}") for note in found.notes)
    assert f"{BROKEN} does not compile: NotImplementedError: cannot be lowered" in found.notes
    assert 0 < found.us <= found.heuristic_us


def test_the_time_allowed_is_kept():
    found = tuned((DEFAULT, SAME, WRONG), seconds=0.0)
    assert found.tried == 2
    assert any("2 of 3 candidates tried" in note for note in found.notes)


def test_a_default_that_does_not_run_is_an_error():
    with pytest.raises(RuntimeError, match=r"up_projection: TileTuning.*does not compile"):
        tuned((BROKEN, DEFAULT))


def test_small_savings_do_not_replace_the_default():
    assert choose({"default": 100.0, "other": 99.5}, "default") == "default"
    assert choose({"default": 100.0, "other": 98.0, "third": 98.5}, "default") == "other"


def test_the_time_of_the_kernel_alone():
    timing = Timing("device", [10.0], {"copy": KernelTotal(1, 4.0), "moe_combine_mosaic_gpu": KernelTotal(2, 6.0)})
    assert kernel_us(timing, "combine") == 6.0
    assert kernel_us(timing, "column_block") == 10.0
