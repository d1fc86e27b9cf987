"""What the interpreter is for: a kernel without one of its waits or fences is a race."""

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
