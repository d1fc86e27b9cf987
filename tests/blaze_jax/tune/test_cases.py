"""What is tuned: the very places that a layer looks up, and candidates that differ and lower for CUDA."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from blaze_jax import expert_ffn
from blaze_jax.benchmark.inputs import abstract_inputs, forward_and_backward
from blaze_jax.benchmark.sizes import Sizes
from blaze_jax.tune.cases import make_operands, mma_candidates, orders, tuning_cases
from pallas_kernels import ampere, hopper
from pallas_kernels.compile_only import compile_for_gpu, kernel_texts
from pallas_kernels.tuning import files as tuning_files
from pallas_kernels.tuning.parameters import H200, KINDS, MMA, TileTuning, mma_heuristic, nvidia_gpu

SIZES = Sizes(1000, 1024, 512, 8, 4)
OPERANDS = jax.eval_shape(make_operands, *abstract_inputs(SIZES, jnp.bfloat16))
CASES = {case.kernel: case for kernels in (ampere, hopper) for case in tuning_cases(OPERANDS, kernels)}


@pytest.mark.parametrize("kernels", [hopper, ampere])
def test_everything_is_tuned_under_the_name_and_shape_that_a_layer_looks_up(kernels, monkeypatch, tmp_path):
    looked_up = set()
    file = tmp_path / "tuning.json"  # another table: what was traced before is traced again
    file.write_text("")
    monkeypatch.setenv("BLAZE_JAX_TUNING", str(file))

    class Recorder(dict):
        def get(self, key, default=None):
            looked_up.add(key)
            return default

    monkeypatch.setattr(tuning_files, "user_tunings", lambda parse: Recorder())
    monkeypatch.setattr("blaze_jax.implementation.compute_capability", lambda: "8.0" if kernels is ampere else "9.0")
    layer = partial(expert_ffn, implementation="mosaic_gpu")
    inputs = abstract_inputs(SIZES, jnp.bfloat16)
    jax.eval_shape(forward_and_backward(layer), *inputs, inputs[0])
    gpu = nvidia_gpu() or H200
    assert looked_up == {(gpu, case.kernel, case.shape) for case in tuning_cases(OPERANDS, kernels)}
    assert set(CASES) == set(KINDS)


@pytest.mark.parametrize("kernel", KINDS)
def test_candidates_lower_for_cuda(kernel):
    case = CASES[kernel]
    run = jax.jit(partial(case.run, case.candidates[-1]))
    text = run.trace(OPERANDS).lower(lowering_platforms=("cuda",)).as_text()
    assert ("moe_down_projection" if kernel == "column_block" else f"moe_{kernel.removeprefix(MMA)}") in text


def test_a_kernel_with_fewer_slots_lowers_for_cuda():
    run = jax.jit(partial(CASES["down_backward"].run, TileTuning(stages=2)))
    assert "moe_down_backward" in run.trace(OPERANDS).lower(lowering_platforms=("cuda",)).as_text()


def program(case, tuning) -> str:
    """The traced program without addresses of functions; of threads, the text of the kernels it is lowered to."""
    if case.kernel.startswith(MMA):
        run = jax.jit(partial(case.run, tuning))
        return str(kernel_texts(run.trace(OPERANDS).lower(lowering_platforms=("cuda",))))
    return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(partial(case.run, tuning))(OPERANDS)))


@pytest.mark.parametrize("kernel", KINDS)
def test_every_candidate_is_another_program(kernel):
    case = CASES[kernel]
    candidates = case.candidates[:3]
    assert len({program(case, tuning) for tuning in (*candidates, candidates[0])}) == len(candidates) > 1


@pytest.mark.compile_only
@pytest.mark.parametrize("kernel", [name for name, kind in KINDS.items() if kind is TileTuning])
def test_tuned_kernels_fit_shared_memory_and_registers(kernel):
    program = compile_for_gpu(partial(CASES[kernel].run, TileTuning(minor_dim=1, tile_width=8)), OPERANDS)
    assert [k.name for k in program.kernels if kernel in k.name]
    assert program.spill_bytes == {}


@pytest.mark.parametrize(
    ("capability", "dtype", "most"), [("8.0", "bfloat16", 163), ("8.6", "bfloat16", 99), ("9.0", "float32", 227)]
)
def test_candidates_for_ampere_fit_the_gpu(monkeypatch, capability, dtype, most):
    monkeypatch.setattr("pallas_kernels.tuning.parameters.compute_capability", lambda: capability)
    default = mma_heuristic("mma_up_projection", dtype)
    candidates = mma_candidates(default, dtype)
    assert candidates[0] == default
    assert len({*candidates}) == len(candidates) > 3
    assert max(t.shared_bytes for t in candidates) <= most * 1024
    assert dtype != "float32" or {t.k_step for t in candidates} == {64}
    assert {t.abreast for t in candidates} == {1, 4, 8, 16}


def test_orders_that_come_to_the_same_are_tried_once():
    default = TileTuning()
    assert orders(default, 1000, 1) == orders(default, 1, 9) == (default,)
    along_columns = [t.tile_width for t in orders(default, 1000, 2) if t.minor_dim == 1]
    assert along_columns == [8, 1]  # 8, 4 and 16 cut two columns alike
    assert len(orders(default, 1000, 100)) == 8
    assert orders(default, 1000, 100)[0] == default
