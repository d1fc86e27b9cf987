"""The experts' kernels of a family in one program, compiled for an H200: none is dropped, and none spills registers."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blaze_jax.activations import get_activation
from pallas_kernels import ampere, hopper
from pallas_kernels.compile_only import absent, compile_for_gpu, on_gpu
from pallas_kernels.contract import Sums
from pallas_kernels.mosaic.row_groups import sum_in_order
from pallas_kernels.tuning.parameters import KINDS, NARROW, TileTuning
from tests.numerics import assert_same_bits
from tests.pallas_kernels.programs import array, down_and_gradients, up_and_back

EXPERT_KERNELS = {f"moe_{name}" for name, kind in KINDS.items() if kind is TileTuning}


def experts(kernels, tunings, token_ids, x, w_up, b_up, *down):
    groups = kernels.dispatch(token_ids, w_up[0].shape[0])
    given = *down, jnp.ones(groups.num_rows), groups

    hidden, *others = up_and_back(kernels, get_activation("swiglu").function, tunings.get, x, w_up, b_up, *given)
    return others, down_and_gradients(kernels, (x.dtype,) * 2, tunings.get, x, hidden, *given)


def arguments(pairs, d, n, num_experts):
    ids, x = array(pairs // 8, 8, dtype="int32"), array(pairs // 8, d)
    up, biases = array(num_experts, d, n), array(num_experts, n)
    return ids, x, (up, up), (biases, biases), array(num_experts, n, d), None


def assert_xla_adds_up_nothing(program):
    """Along an axis it would in an order that it chooses by timing: gradients of row weights are added up in order.

    A down bias would add a product of tokens and biases, which XLA may write as a sum.
    """
    assert re.findall(r"= (?:f32|bf16)\S* reduce\(", program.as_text()) == []


@pytest.mark.compile_only
def test_hopper_kernels_multiply(tmp_path, monkeypatch):
    """In stripes of four rows of tiles, which leave no narrower one: what provably divides by zero is unreachable.

    Wide and narrow tiles are in one program: kernels that do not know them are compiled, and so written, but once.
    """
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    wide = TileTuning(minor_dim=0, tile_width=4)

    def program(*given):
        narrow = dict.fromkeys(KINDS, wide) | dict.fromkeys(NARROW, replace(wide, columns=128))
        return [experts(hopper, tunings, *given) for tunings in (dict.fromkeys(KINDS, wide), narrow)]

    with jax.default_device(absent()):  # compile_for_gpu reads a report that is not printed where code is written
        compiled = jax.jit(program).lower(*on_gpu(arguments(2048, 1024, 512, 8))).compile()
    written = {file.stem: file.read_text() for file in tmp_path.glob("*.ptx") if "dispatch" not in file.name}
    names = {name.rpartition("_")[0] for name in written}  # jax may compile one twice, under two numbers
    assert names == EXPERT_KERNELS | {"moe_up_bias_gradients", "moe_down_bias_gradients"}
    assert [name for name, text in written.items() if "wgmma.mma_async" not in text] == []
    assert_xla_adds_up_nothing(compiled)


@pytest.mark.compile_only
@pytest.mark.parametrize(
    "sizes",
    [(2**18, 1536, 256, 128), (2**18, 4096, 1024, 128), (2**18, 1024, 4096, 16), (2**16, 512, 2048, 4)],
    ids=str,
)
def test_ampere_tiles_by_rules_and_table_spill_nothing_at_the_sizes_that_were_tuned(sizes):
    program = compile_for_gpu(partial(experts, ampere, {}), *arguments(*sizes), gpu="h200")
    assert {kernel.name for kernel in program.kernels} >= EXPERT_KERNELS
    assert program.spill_bytes == {}
    assert_xla_adds_up_nothing(program.executable)


@pytest.mark.compile_only
@pytest.mark.parametrize("sum_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", [hopper, ampere])
def test_gradients_added_to_sums_spill_nothing_and_take_their_memory(kernels, sum_dtype):
    """Those of the second of three layers."""

    def add(ids, x, ups, down):
        groups = kernels.dispatch(ids, 64)
        rows, weights = jnp.ones((groups.num_rows, 256), x.dtype), jnp.ones(groups.num_rows)
        first = ids[0, 0]
        ups, _ = kernels.up_weight_gradients(x, (rows, rows), groups, dtypes=(), bias_dtypes=(), sums=Sums(ups, first))
        options = {"dtype": None, "bias_dtype": None, "sums": Sums((down,), first)}
        return ups, kernels.down_weight_gradients(rows, x, weights, groups, **options)[0]

    up, down = (array(192, *shape, dtype=sum_dtype) for shape in ((1024, 256), (256, 1024)))
    given = array(2048, 8, dtype="int32"), array(2048, 1024), (up, up), down
    program = compile_for_gpu(add, *given, gpu="h200", donate_argnums=(2, 3))
    assert program.spill_bytes == {}
    assert program.memory.alias_size_in_bytes == 3 * up.size * up.dtype.itemsize
    assert re.findall(r"= \w+\[192,\S* (?:copy|copy-start|add)\(", program.executable.as_text()) == []


def test_sums_from_the_first_to_the_last():
    parts = np.random.default_rng(0).standard_normal((33, 50)).astype(np.float32)
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    assert_same_bits(jax.jit(sum_in_order)(parts), expected)
