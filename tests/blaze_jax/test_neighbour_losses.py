"""Losses of routers beside those of balance: between a token's neighbours, and of the activity; in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from blaze_jax import MoEConfig, Parallelism, Router, moe, route, update_activity_weight
from blaze_jax.layer import skipped
from blaze_jax.neighbour_losses import neighbour_losses
from tests.layers import DOORS, random_parameters, random_tokens
from tests.numerics import assert_close

CHUNK, EXPERTS = 4, 6
NAMES = ("chunk_loss", "locality_loss")
CONFIG = MoEConfig(
    num_experts=EXPERTS,
    experts_per_token=None,
    expert_width=8,
    activation="relu",
    router=Router(scoring="relu"),
    load_balancing_weight=0,
    activity_weight=0.5,
    chunk_loss_weight=0.05,
    chunk_tokens=CHUNK,
    locality_loss_weight=2e-3,
)


def defined(logits, mask, segments):
    """Both losses, a chunk and a pair of neighbours at a time."""
    values = jnp.maximum(logits, 0)
    total = values.sum(-1, keepdims=True)
    free = 1 - values / jnp.where(total == 0, 1, total) + 1e-5
    chunks, pairs = [], []
    for sequence, (of_token, segment) in enumerate(zip(mask, segments, strict=True)):
        for start in range(0, len(of_token), CHUNK):
            window = np.arange(start, min(start + CHUNK, len(of_token)))
            for own in np.unique(segment[window]):
                members = window[(segment[window] == own) & of_token[window]]
                chunks += [jnp.prod(free[sequence, members], axis=0).mean()] if len(members) else []
        for t in range(1, len(of_token)):
            if of_token[t - 1] and of_token[t] and segment[t - 1] == segment[t]:
                before, target = 100 * logits[sequence, t - 1], jax.nn.sigmoid(100 * logits[sequence, t])
                of_pair = target * jax.nn.log_sigmoid(before) + (1 - target) * jax.nn.log_sigmoid(-before)
                pairs.append(-of_pair.mean())
    chunk_loss = 1 - sum(chunks) / len(chunks) if chunks else 0.0 * logits.sum()
    return {"chunk_loss": chunk_loss, "locality_loss": sum(pairs) / len(pairs) if pairs else 0.0 * logits.sum()}


def gradients(losses, logits):
    total = jax.value_and_grad(lambda logits: (sum(losses(logits).values()), losses(logits)), has_aux=True)
    return jax.tree.map(np.asarray, jax.jit(total)(logits))


@pytest.mark.parametrize("case", ["whole", "masked", "packed", "all masked", "short", "none active"])
@pytest.mark.default_cases("packed")
@pytest.mark.ci_cases("whole")
def test_they_are_those_of_the_definition(case):
    length = 3 if case == "short" else 10
    logits = np.random.default_rng(0).standard_normal((2, length, EXPERTS)).astype(np.float32) * 0.05
    logits = -np.abs(logits) if case == "none active" else logits
    mask = np.arange(2 * length).reshape(2, -1) % 5 != 3 if case in ("masked", "packed") else np.ones((2, length), bool)
    mask &= case != "all masked"
    segments = np.cumsum(np.arange(2 * length).reshape(2, -1) % 3 == 2, 1) if case == "packed" else np.zeros_like(mask)
    segments = segments.astype(np.int32)
    given = None if case == "whole" else mask, segments if case == "packed" else None
    given = jax.tree.map(jnp.asarray, given)
    found = gradients(lambda l: neighbour_losses(l, given[0], given[1], NAMES, CHUNK, ()), logits)
    with jax.enable_x64(True):
        expected = gradients(lambda l: defined(l, mask, segments), logits.astype(np.float64))
    assert_close(found, expected)


def test_activity_loss_and_the_weight_of_its_next_step():
    logits, mask = np.random.default_rng(0).standard_normal((12, EXPERTS)), np.arange(12) % 4 != 1
    routing = route(jnp.asarray(logits, jnp.float32), None, scoring="relu", mask=jnp.asarray(mask))
    values, tokens = np.maximum(logits, 0)[mask], mask.sum()
    of_experts = EXPERTS / tokens * (values > 0).sum(0)
    assert_close(routing.other_losses["activity_loss"], (of_experts * values.sum(0)).sum() / tokens)
    mean = (values > 0).sum() / tokens
    for target, factor in ((mean - 1, 1.2), (mean + 1, 1 / 1.2)):
        weight = update_activity_weight(jnp.float32(1e-8), routing.tokens_per_expert, tokens, target)
        assert_close(weight, np.float32(1e-8 * factor))
    both = jnp.stack([routing.tokens_per_expert] * 2)
    assert_close(update_activity_weight(jnp.float32(1), both, tokens, mean - 1), np.float32(1.2))


@pytest.fixture(scope="module")
def problem():
    x, params = random_tokens(4, 10), random_parameters(CONFIG)
    given = {
        "mask": (jnp.arange(40) % 7 != 3).reshape(4, 10),
        "segment_ids": jnp.cumsum(jnp.arange(40).reshape(4, 10) % 4 == 3, 1),
    }
    return x, params, given, loss_and_gradients(x, params, given)


def loss_and_gradients(x, params, given, **options):
    def loss(x, params, given):
        y, routing = moe(x, params, CONFIG, train=True, **given, **options)
        return jnp.square(y).sum() + sum(routing.weighted_losses.values()), routing.weighted_losses

    return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, params, given))


@pytest.mark.slow
def test_the_layer_weighs_them(problem):
    x, params, given, ((_, weighted), _) = problem
    logits = jnp.dot(x, params["w_router"], precision="highest")
    losses = neighbour_losses(logits, given["mask"], given["segment_ids"], NAMES, CHUNK, ())
    assert_close(weighted["chunk_loss"], 0.05 * losses["chunk_loss"])
    assert_close(weighted["locality_loss"], 2e-3 * losses["locality_loss"])
    routing = route(logits.reshape(-1, EXPERTS), None, scoring="relu", mask=given["mask"].reshape(-1))
    assert_close(weighted["activity_loss"], 0.5 / (EXPERTS / 4) * routing.other_losses["activity_loss"])
    y, of_modules = DOORS["linen"](params, x, CONFIG)
    assert_close(DOORS["nnx"](params, x, CONFIG), (y, of_modules))
    assert of_modules.keys() == skipped(x, CONFIG)[1].weighted_losses.keys() == weighted.keys()
    one, _ = jax.vmap(lambda x: moe(x, params, CONFIG))(x[:, 0])
    assert_close(one, moe(x[:, :1], params, CONFIG)[0][:, 0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["automatic", "explicit", "explicit sequence", "parallel", "inside"])
@pytest.mark.ci_cases("explicit sequence")
def test_over_a_mesh_as_on_one_device(problem, kind):
    x, params, given, expected = problem
    types = (jax.sharding.AxisType.Explicit if "explicit" in kind else jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("devices",), axis_types=types)
    parallel = Parallelism(mesh, expert="devices") if kind == "parallel" else None
    spec = P(None, "devices") if kind == "explicit sequence" else P("devices")
    with jax.set_mesh(mesh):
        if kind == "inside":
            run = jax.shard_map(
                lambda x, params, given: moe(x, params, CONFIG, train=True, axis_name="devices", **given)[1],
                in_specs=(spec, P(), spec),
                out_specs=P(),
                check_vma=False,
            )
            assert_close(jax.jit(run)(x, params, given).weighted_losses, expected[0][1])
            return
        if "explicit" in kind:
            x = jax.device_put(x, jax.NamedSharding(mesh, spec))
        found = loss_and_gradients(x, params, given, parallel=parallel)
    assert_close(found, expected)


def test_what_does_not_fit_is_named():
    x, params = random_tokens(4), random_parameters(CONFIG)
    with pytest.raises(ValueError, match=r"segment_ids has dtype float32 and shape \(4,\), must be integers of shape"):
        moe(x, params, CONFIG, segment_ids=jnp.ones(4))
    with pytest.raises(ValueError, match=r"chunk_loss_weight=0\.05 must be 0 unless scoring='relu'"):
        replace(CONFIG, router=Router(top_p=0.5), activity_weight=0)
    with pytest.raises(ValueError, match="chunk_tokens=0 must be at least 1"):
        replace(CONFIG, chunk_tokens=0)
