"""Modules that are initialised inside `jax.shard_map` get one device's numbers, each device its part of them."""

import flax.linen as nn
import jax
import pytest
from flax import nnx
from jax import P
from jax.sharding import AxisType

import blaze_jax
from blaze_jax import MoE, MoEConfig, Parallelism
from tests.layers import WIDTH, random_tokens
from tests.numerics import assert_close

CONFIG = MoEConfig(num_experts=4, experts_per_token=2, expert_width=8, shared_width=8, router_bias=True)
OPTIONS = {"use_bias": True, "bias_init": nn.initializers.normal(1.0)}
MESHES = {  # what fsdp splits: experts; the width of the model, where it does not divide them
    "all": {"fsdp": 2, "expert": 2, "tensor": 2},
    "width": {"fsdp": 5},
}


def created(form: str, parallel: Parallelism | None) -> dict:
    """A module's parameters."""
    if form == "linen":
        module = MoE(CONFIG, parallel=parallel, **OPTIONS)
        return nn.unbox(module.init(jax.random.key(0), random_tokens(2))["params"])
    module = blaze_jax.nnx.MoE(WIDTH, CONFIG, parallel=parallel, rngs=nnx.Rngs(0), **OPTIONS)
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(("form", "axes"), [("linen", "all"), ("nnx", "all"), ("linen", "width")])
@pytest.mark.default_cases("linen-all-False")
def test_parts_are_those_of_one_device(form, axes, check_vma):
    sizes = MESHES[axes]
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    parallel = Parallelism(mesh, **{role: role for role in sizes})
    specs = parallel.specs(CONFIG, WIDTH, use_bias=True)
    assert any(spec != P(*[None] * len(spec)) for spec in specs.values())
    over = jax.shard_map(lambda: created(form, parallel), mesh=mesh, in_specs=(), out_specs=specs, check_vma=check_vma)
    assert_close(jax.jit(over)(), jax.jit(lambda: created(form, None))(), 1e-6)  # XLA fuses them in other ways
