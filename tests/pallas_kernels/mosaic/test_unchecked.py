"""Functions of arrays for which `jax.shard_map` does not check over which axes values vary."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import P

from pallas_kernels.compat import unchecked, varying_axes
from tests.numerics import assert_same_bits


@pytest.mark.parametrize("check_vma", [True, False])
def test_results_vary_as_the_arrays_do_together(check_vma):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    numbers = jnp.arange(4.0)

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=check_vma)
    def run(same, split):
        out = unchecked(lambda a, b: a[:2] + b)(same, split)
        assert varying_axes(out) == varying_axes(split)
        return out

    assert_same_bits(jax.jit(run)(numbers, numbers), jnp.asarray([0.0, 2.0, 2.0, 4.0]))
