"""What the interpreter is for: a kernel without one of its waits or fences is a race."""

import subprocess
import sys

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.hopper import gather
from tests.pallas_kernels.rows import ACTIVATIONS, D, N, Rows, needs_interpreter


def run_up_projection():
    rows = Rows(hopper, "whole_tiles_and_a_tail")
    x = rows.normal(rows.num_tokens, D, dtype="bfloat16")
    weights = tuple(rows.normal(rows.num_experts, D, N) for _ in range(2))
    return jax.block_until_ready(
        hopper.up_projection(x, weights, (), rows.groups, activation=ACTIVATIONS[2]),
    )


@needs_interpreter
@pytest.mark.parametrize(
    ("module", "name"),
    [(gather, "wait_landed"), (plgpu, "barrier_wait"), (plgpu, "wait_smem_to_gmem"), (plgpu, "commit_smem")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_missing_wait_is_a_race(monkeypatch, module, name):
    with hopper.interpreted():
        with monkeypatch.context() as patched:
            patched.setattr(module, name, lambda *args, **options: None)
            with pytest.raises(RuntimeError, match="RACE DETECTED"):
                run_up_projection()
        pre, hidden = run_up_projection()  # with everything in place, and nothing left of the failure
    assert {a.dtype.name for a in (*pre, hidden)} == {"bfloat16"}


RACE = """
import jax, jax.numpy as jnp
from pallas_kernels import simt

def moe_race(x, y):
    y[0] = x[simt.thread() % 8]

out = [jax.ShapeDtypeStruct((8,), jnp.float32)]
with simt.interpreted():
    out = jax.jit(simt.kernel(moe_race, name="moe_race", outputs=out, blocks=1, warpgroups=1))(jnp.ones(8))
"""


def test_a_process_that_ends_with_an_error_in_a_kernel_says_which():
    """Nothing that the interpreter leaves to be closed at the end hides it."""
    ended = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "moe_race: output 0, word 0: write by thread 0 of block 0" in ended.stderr
    assert "Event loop is closed" not in ended.stderr
