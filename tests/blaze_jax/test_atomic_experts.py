"""Experts of one neuron each, against the paper's definition in float64, in every form and through every door."""

import re
from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import P

from blaze_jax import EMPTY_SLOT, AtomicConfig, AtomicMoE, Parallelism, atomic_experts, atomic_forms, atomic_moe
from blaze_jax.atomic_experts import best_pairs
from blaze_jax.implementation import demanded_family
from blaze_jax.nnx import AtomicMoE as NnxAtomicMoE
from pallas_kernels.compile_only import on_gpu
from tests.expert_problems import ON_GPUS, on
from tests.numerics import assert_close, assert_same_bits

WIDTH, TOKENS = 16, 24
CONFIG = AtomicConfig(num_experts=36, experts_per_token=5, shared_width=3)
MASK = jnp.arange(TOKENS) % 3 != 1


def problem(config, dtype=jnp.float32, tokens=TOKENS, width=WIDTH):
    """Parameters, tokens and running statistics as after some training."""
    keys = jax.random.split(jax.random.key(0), 4)
    side = config.grid_side
    statistics = {
        "mean": jax.random.normal(keys[1], (2, side)),
        "var": jax.random.uniform(keys[2], (2, side), minval=0.5, maxval=2.0),
    }
    params, x = atomic_experts.init(keys[0], config, width), jax.random.normal(keys[3], (tokens, width))
    return jax.tree.map(lambda a: a.astype(dtype), (params, x, statistics))


def probe(y, number=None):
    """A sum of the outputs in which each has a weight of its own, by the token's number."""
    rows = y.reshape(-1, y.shape[-1])
    number = jnp.arange(len(rows)) if number is None else number
    return jnp.vdot(rows, jnp.cos(number[:, None] * WIDTH + jnp.arange(y.shape[-1])).astype(y.dtype))


@partial(jax.jit, static_argnames=("config", "train", "parallel"))
def ours(params, x, statistics, config, train=True, mask=None, number=None, parallel=None):
    """Output and statistics; gradients of parameters and tokens."""

    def loss(params, x):
        y, routing = atomic_moe(x, params, statistics, config, train=train, mask=mask, parallel=parallel)
        return probe(y, number) + routing.entropy, (y, routing)

    return jax.grad(loss, (0, 1), has_aux=True)(params, x)


def definition(params, x, statistics, config, train=True):
    """The same of the paper's equations, with every pair of scores and every expert of a token."""

    def normalised(scores, mean, var):
        if train:
            mean, var = scores.mean(0), scores.var(0)
        return (scores - mean) / jnp.sqrt(var + config.norm_epsilon)

    def loss(params, x):
        scores = [x @ w for w in params["w_router"]]
        a, b = (
            jax.nn.log_softmax(normalised(s, statistics["mean"][i], statistics["var"][i])) for i, s in enumerate(scores)
        )
        sums = (a[:, :, None] + b[:, None]).reshape(len(x), -1)
        experts = jnp.argsort(-sums, axis=1, stable=True)[:, : config.experts_per_token]
        weights = jnp.exp(jnp.take_along_axis(sums, experts, 1))
        hidden = jax.nn.silu(jnp.einsum("td,tkd->tk", x, params["w_up"][experts]))
        y = jnp.einsum("tk,tk,tkd->td", weights, hidden, params["w_down"][experts])
        y += (jax.nn.silu(x @ params["shared_w_gate"]) * (x @ params["shared_w_up"])) @ params["shared_w_down"]
        moved = {"mean": jnp.stack([s.mean(0) for s in scores]), "var": jnp.stack([s.var(0, ddof=1) for s in scores])}
        moved = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, statistics, moved) if train else statistics
        entropy = -(jnp.exp(sums) * sums).sum(1).mean()
        return probe(y) + entropy, (y, (experts, weights, moved, entropy))

    return jax.grad(loss, (0, 1), has_aux=True)(params, x)


@pytest.mark.parametrize("slots", [1, 5, 9, 36])
@pytest.mark.parametrize("form", ["dense", "grouped", "gathered"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.default_cases("float32-gathered-9")
@pytest.mark.ci_cases("float32-grouped-5")
def test_every_form_is_the_definition_in_float64(dtype, form, slots, monkeypatch):
    config = replace(CONFIG, experts_per_token=slots, form=form)
    monkeypatch.setattr(atomic_forms, "_BLOCK_NUMBERS", 9 * 36)  # so that there are several blocks
    monkeypatch.setattr(atomic_forms, "_RUN", 4)
    monkeypatch.setattr(atomic_forms, "_RUNS", 3)
    with jax.enable_x64(True):
        inputs = problem(config, jnp.float64)
        for train in (True, False) if slots == 5 and dtype == "float64" else (True,):
            expected = jax.jit(definition, static_argnums=(3, 4))(*inputs, config, train)
            d, (y, routing) = ours(*(jax.tree.map(lambda a: a.astype(dtype), inputs)), config, train)
            assert_same_bits(np.asarray(routing.experts), np.asarray(expected[1][1][0], np.int32))
            assert_close((d, (y, tuple(routing)[1:])), (expected[0], (expected[1][0], expected[1][1][1:])))


@pytest.mark.parametrize("number", [1, 3, 7, 10, 49])
@pytest.mark.default_cases("10")
def test_the_best_pairs_are_those_of_all_sums(number):
    side = 7
    for values in (jnp.arange(3) / 4, jnp.linspace(-3, 0, 999)):  # quarters make many equal sums, all exact
        rows, columns = (jax.random.choice(jax.random.key(i), values, (300, side)) for i in (1, 2))
        sums = (rows[:, :, None] + columns[:, None]).reshape(300, -1)
        expected = jnp.argsort(-sums, axis=1, stable=True)[:, :number]
        row, column = best_pairs(rows, columns, number)
        if values.size == 3:
            assert_same_bits(row * side + column, expected)
        found = jnp.take_along_axis(sums, row * side + column, 1)
        assert_same_bits(found, jnp.take_along_axis(sums, expected, 1))
    row, column = best_pairs(rows.at[0].set(jnp.nan), columns, number)
    assert len(set(np.asarray(row[0] * side + column[0]).tolist())) == number


def test_an_expert_with_all_pairs_gets_them_all(monkeypatch):
    monkeypatch.setattr(atomic_forms, "_RUN", 4)
    monkeypatch.setattr(atomic_forms, "_RUNS", 3)
    ids = jnp.sort(jax.random.randint(jax.random.key(0), (53, 1), 0, 60) % 23 // 20)  # 3 or less of 40 experts
    ids = jnp.where(jnp.arange(53)[:, None] % 5 == 0, 40, ids)
    x, factor = jax.random.normal(jax.random.key(1), (53, 8)), jax.random.normal(jax.random.key(2), (53, 1))
    start = atomic_forms.Neurons(jnp.ones((40, 8)), jnp.zeros((40, 8)))
    up, down = atomic_forms._added_by_expert(start, (x, 2 * x), (factor, factor), ids)
    expected = jnp.zeros((40, 8)).at[ids[:, 0]].add(factor * x, mode="drop")
    assert_close((up, down), (expected + 1, 2 * expected))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["grouped", "gathered"])
def test_no_sum_depends_on_the_order_and_no_array_has_every_pair(form, monkeypatch):
    monkeypatch.setattr(atomic_forms, "_BLOCK_NUMBERS", 2**16)
    config = AtomicConfig(num_experts=64, experts_per_token=16, form=form)
    inputs = problem(config, tokens=4096, width=64)
    lowered = jax.jit(ours, static_argnames="config").lower(*inputs, config=config)
    scatters = re.findall(
        r'"stablehlo.scatter".*?unique_indices = (\w+).*?-> tensor<[^>]*x(\w+)>', lowered.as_text(), re.S
    )
    assert scatters
    assert {unique for unique, dtype in scatters if dtype.startswith("f")} == {"true"}
    all_pairs = 4096 * 16 * 64 * 4
    assert lowered.compile().memory_analysis().temp_size_in_bytes < all_pairs


@pytest.mark.slow
def test_a_masked_token_is_as_if_it_were_not_there():
    params, x, statistics = problem(CONFIG)
    (d_params, dx), (y, routing) = ours(params, jnp.where(MASK[:, None], x, jnp.nan), statistics, CONFIG, mask=MASK)
    (ref_d_params, ref_dx), (ref_y, ref) = ours(params, x[MASK], statistics, CONFIG, number=jnp.nonzero(MASK)[0])
    assert_close((d_params, dx[MASK], y[MASK], tuple(routing)[2:]), (ref_d_params, ref_dx, ref_y, tuple(ref)[2:]))
    for array in (y, dx, routing.weights):
        assert_same_bits(array[~MASK], jnp.zeros_like(array[~MASK]))
    assert (routing.experts[~MASK] == EMPTY_SLOT).all()
    nothing, _ = ours(params, x, statistics, CONFIG, mask=jnp.zeros_like(MASK))
    assert all(jnp.isfinite(a).all() for a in jax.tree.leaves(nothing))
    _, (_, routing) = ours(params, x, statistics, CONFIG, mask=jnp.zeros_like(MASK))
    assert_same_bits(dict(routing.batch_statistics), statistics)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["automatic", "explicit", "parallel", "shard_map", "check_vma"])
@pytest.mark.parametrize("form", ["grouped", "gathered", "dense"])
@pytest.mark.ci_cases("gathered-check_vma", "gathered-automatic", "dense-explicit")
def test_over_a_mesh_everything_is_that_of_one_device(form, kind):
    config = replace(CONFIG, form=form)
    params, x, statistics = problem(config)
    x, mask = x.reshape(4, 6, WIDTH), MASK.reshape(4, 6)
    expected = ours(params, x, statistics, config, mask=mask)
    devices = 5 if kind == "automatic" else 4  # five do not divide the tokens
    types = (jax.sharding.AxisType.Explicit if kind == "explicit" else jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("devices",), axis_types=types, devices=jax.devices()[:devices])

    def run(params, x, mask):
        if kind in ("automatic", "explicit"):
            return ours(params, x, statistics, config, mask=mask)
        if kind == "parallel":
            return ours(params, x, statistics, config, mask=mask, parallel=Parallelism(data="devices"))

        def layer(params, x, mask):
            y, routing = atomic_moe(x, params, statistics, config, train=True, mask=mask, axis_name="devices")
            return y, routing

        out = P("devices"), atomic_experts.AtomicRouting(P("devices"), P("devices"), P(), P())
        specs = {"in_specs": (P(), P("devices"), P("devices")), "out_specs": out, "check_vma": kind == "check_vma"}

        def loss(params, x):
            y, routing = jax.shard_map(layer, mesh=mesh, **specs)(params, x, mask)
            return probe(y) + routing.entropy, (y, routing)

        return jax.grad(loss, (0, 1), has_aux=True)(params, x)

    with jax.set_mesh(mesh):
        if kind == "explicit":
            x, mask = jax.device_put((x, mask), jax.NamedSharding(mesh, P("devices")))
        d, (y, routing) = jax.jit(run)(params, x, mask)
    (ref_d, (ref_y, ref)) = expected
    assert_same_bits(np.asarray(routing.experts), np.asarray(ref.experts))
    assert_close((d, y, tuple(routing)[1:]), (ref_d, ref_y, tuple(ref)[1:]))


def test_the_modules_are_the_function():
    params, x, statistics = problem(CONFIG)
    y, routing = jax.jit(partial(atomic_moe, config=CONFIG, train=True))(x, params, statistics)
    linen = AtomicMoE(CONFIG)
    variables = {"params": params, "batch_stats": statistics}
    out, moved = linen.apply(variables, x, train=True, mutable=["batch_stats"])
    assert_close((out, moved["batch_stats"]), (y, routing.batch_statistics))
    with pytest.warns(UserWarning, match="do not move in training"):
        linen.apply(variables, x, train=True)
    evaluated, _ = atomic_moe(x, params, routing.batch_statistics, CONFIG)
    assert_close(linen.apply(variables | moved, x, train=False), evaluated)
    module = NnxAtomicMoE(WIDTH, CONFIG, rngs=nnx.Rngs(0))
    for name, value in {**params, **statistics}.items():
        getattr(module, name).set_value(value)
    module.train()
    assert_close(nnx.jit(lambda m, x: m(x))(module, x), y)
    assert_close({name: getattr(module, name)[...] for name in statistics}, dict(routing.batch_statistics))
    module.eval()
    assert_close(module(x), evaluated)
    drawn = linen.init(jax.random.key(0), x)
    assert_same_bits(drawn["batch_stats"], CONFIG.batch_statistics())
    shapes = {name: p.shape for name, p in CONFIG.parameters(WIDTH).items()}
    assert {name: a.shape for name, a in nn.unbox(drawn["params"]).items()} == shapes
    drawn = nn.unbox(drawn["params"])
    assert 0.8 < float(drawn["w_down"].std()) < 1.2
    assert 0.8 < float(drawn["w_up"].std()) * WIDTH**0.5 < 1.2


@pytest.mark.slow
def test_it_is_transformed_as_the_layer_is():
    config = replace(CONFIG, form="gathered")
    params, x, statistics = problem(config)
    _, (y, _) = ours(params, x, statistics, config)

    def block(x):
        return atomic_moe(x, params, statistics, config, train=True)[0]

    def through_scan(x):
        return jax.lax.scan(lambda carry, _: (jax.checkpoint(block)(carry), None), x, None, length=1)[0]

    assert_close(through_scan(x), y)
    assert_close(jax.vmap(block)(jnp.stack([x, 2 * x])), jnp.stack([y, block(2 * x)]))
    of_batch = jax.grad(lambda x: probe(through_scan(x)))(x)
    assert_close(of_batch, jax.grad(lambda x: probe(block(x)))(x))
    with pytest.raises(NotImplementedError, match="reverse mode only"):
        jax.jvp(block, (x,), (x,))
    with jax.numpy_dtype_promotion("strict"):
        narrow, routing16 = atomic_moe(x.astype(jnp.bfloat16), params, statistics, config)
    assert (narrow.dtype, routing16.weights.dtype) == (jnp.bfloat16, jnp.float32)
    assert_close(narrow, atomic_moe(x, params, statistics, config)[0].astype(jnp.bfloat16))
    empty, _ = atomic_moe(x[:0], params, statistics, config, train=True)
    assert empty.shape == (0, WIDTH)


@pytest.mark.parametrize("form", ["dense", "grouped", "gathered"])
def test_half_precision_is_near(form):
    config = replace(CONFIG, form=form)
    params, x, statistics = problem(config)
    x = x.astype(jnp.bfloat16).astype(jnp.float32)
    (d, dx), (y, _) = ours(params, x.astype(jnp.bfloat16), statistics, config)
    (ref_d, ref_dx), (ref_y, _) = ours(params, x, statistics, config)
    assert d["w_up"].dtype == jnp.float32
    assert_close((d, dx, y), (ref_d, ref_dx, ref_y), 2e-2)


def test_the_form_goes_by_size():
    assert [atomic_forms.choose_form(*s) for s in ((1024, 8), (2**14, 64), (2**16, 2**12), (2**20, 64))] == [
        "dense",
        "grouped",
        "grouped",
        "gathered",
    ]


@pytest.mark.compile_only
@pytest.mark.parametrize("family", ["hopper", "ampere"])
@pytest.mark.parametrize("form", ["grouped", "gathered"])
def test_the_kernels_compile(form, family):
    config = AtomicConfig(num_experts=64**2, experts_per_token=16, form=form, implementation="mosaic_gpu")
    inputs = jax.eval_shape(partial(problem, config, jnp.bfloat16, 512, 128))
    with demanded_family(family):
        text = jax.jit(ours, static_argnames="config").lower(*on_gpu(inputs), config=config).compile().as_text()
    assert "moe_combine" in text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 35}, "num_experts=35 must be a square number"),
        ({"experts_per_token": 37}, "experts_per_token=37 must be from 1 to num_experts=36"),
        ({"activation": "swiglu"}, "activation='swiglu' must be without a gate"),
        ({"form": "fast"}, "form='fast' must be None or one of dense, grouped, gathered"),
        ({"norm_momentum": 1.0}, "norm_momentum=1.0 must be"),
        ({"num_experts": 4.0}, "num_experts=4.0 must be an integer"),
    ],
)
@pytest.mark.default_cases("*")
def test_a_field_that_does_not_fit_is_named(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(CONFIG, **fields)


def test_arguments_that_do_not_fit_are_named():
    params, x, statistics = problem(CONFIG)
    for arguments, message in [
        ((x[:, :3], params, statistics, CONFIG), r"params\['w_router'\] has shape"),
        ((x, params, {"mean": statistics["mean"]}, CONFIG), "batch_statistics lacks var"),
        ((x, params, None, CONFIG), "must be a mapping"),
        ((x, params, statistics, None), "must be an AtomicConfig"),
        ((x.astype(int), params, statistics, CONFIG), "x must be a floating array"),
    ]:
        with pytest.raises(ValueError, match=message):
            atomic_moe(*arguments)
    for role in ("fsdp", "expert", "tensor"):
        with pytest.raises(NotImplementedError, match=f"parallel has {role}='a'.*give these axes the role data"):
            atomic_moe(x, params, statistics, CONFIG, parallel=Parallelism(**{role: "a"}))
    with pytest.raises(ValueError, match="mask has dtype"):
        atomic_moe(x, params, statistics, CONFIG, mask=jnp.ones(3, bool))


@pytest.mark.parametrize("form", ["grouped", "gathered"])
@on("hopper", "ampere", *ON_GPUS)
@pytest.mark.slow
def test_interpreted_kernels_are_the_definition(kernels, form):
    config = AtomicConfig(num_experts=64, experts_per_token=5, form=form)
    params, x, statistics = problem(config)
    params, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(jnp.float32), (params, x))
    (ref_d, ref_dx), (ref_y, ref) = ours(params, x, statistics, config, mask=MASK)
    narrow, x16 = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params, x))
    config = replace(config, implementation="mosaic_gpu")
    (d, dx), (y, routing) = ours(narrow, x16, statistics, config, mask=MASK)
    assert_same_bits(routing.experts, ref.experts)
    assert_close((d, dx, y), (ref_d, ref_dx, ref_y), 2e-2)
    again = ours(narrow, x16, statistics, config, mask=MASK)
    assert_same_bits(again, ((d, dx), (y, routing)))
