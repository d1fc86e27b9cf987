"""A layer in chunks of its experts: what it has beside them stays, and the sum is the layer's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blaze_jax import LoRA, MoE, MoEConfig, Router
from blaze_jax.offload.chunks import plus_chunk, split_layer, with_experts
from tests.numerics import assert_close

SIZES = {"num_experts": 6, "experts_per_token": 2, "expert_width": 24}
CONFIGS = {
    "plain": (MoEConfig(**SIZES), False),
    "all_of_it": (MoEConfig(**SIZES, shared_width=8, latent_width=12, router_bias=True, selection_bias=True), True),
    "open_ended": (MoEConfig(**SIZES, router=Router(scoring="relu"), mean_experts=1.5), False),
    "ungated": (MoEConfig(**SIZES, activation="relu2"), False),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("chunks", [1, 3, 6])
@pytest.mark.default_cases("6-all_of_it")
@pytest.mark.ci_cases("3-*")
def test_the_sum_of_chunks_is_the_layer(name, chunks):
    config, use_bias = CONFIGS[name]
    layer = MoE(config, use_bias=use_bias, bias_init=jax.nn.initializers.normal(), train=False)
    x = jax.random.normal(jax.random.key(0), (2, 20, 16))
    mask = jnp.arange(20)[None] < jnp.array([[20], [13]])
    variables = jax.tree.map(jnp.asarray, dict(layer.init(jax.random.key(1), x)))
    expected = layer.apply(variables, x, mask=mask)

    rest, parts = split_layer(variables, config, chunks)
    assert {len(array) for part in parts for array in jax.tree.leaves(part)} == {6 // chunks}
    total = None
    for number, part in enumerate(parts):
        total = jax.jit(plus_chunk, static_argnums=0)(layer, rest, part, number, x, total, mask)
    assert total.dtype == jnp.float32
    found = with_experts(layer, rest, x, total, mask)
    assert_close(found, expected, 1e-6)
    np.testing.assert_array_equal(found[1, 13:], 0)


@pytest.mark.parametrize(
    ("chunks", "more", "message"),
    [
        (4, {}, "chunks=4 must divide num_experts=6"),
        (2, {"adapter": LoRA(rank=4)}, "must be 1 for a layer with adapters"),
    ],
)
def test_what_cannot_be_cut(chunks, more, message):
    with pytest.raises(ValueError, match=message):
        split_layer({"params": {}}, MoEConfig(**SIZES, **more), chunks)
