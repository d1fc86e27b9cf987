"""The Hopper kernels: lowered for CUDA on any machine, and on a Hopper GPU held to the oracle."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from blaze_jax import RESIDUAL_NAMES, expert_ffn
from blaze_jax.activations import ACTIVATION_NAMES
from blaze_jax.oracle import dense_expert_ffn
from tests.expert_problems import apply, lowered, make_problem, results
from tests.numerics import assert_close, assert_same_bits
from tests.routings import ROUTINGS, Case, random_experts

D, N = 320, 256
LIMIT = 1e-2
KERNELS = (
    "moe_dispatch_count",
    "moe_dispatch_place",
    "moe_up_projection",
    "moe_down_projection",
    "moe_combine",
    "moe_down_backward",
    "moe_up_weight_gradients",
    "moe_down_weight_gradients",
    "moe_up_backward",
)


def problem_of(case, **options):
    options = {"d": D, "n": N, "dtype": "bfloat16", "biases": False} | options
    return make_problem(case.experts, case.num_experts, **options)


def assert_matches_oracle(problem, **options):
    out = results(expert_ffn, problem, implementation="mosaic_gpu", **options)
    activation = {k: v for k, v in options.items() if k == "activation"}
    expected = results(dense_expert_ffn, problem.cast(jnp.float32), **activation)
    for name, value in expected.items():
        assert_close(out[name], value, LIMIT)
    return out


@pytest.mark.parametrize(
    ("activation", "param_dtype", "biases"),
    [
        ("swiglu", "float32", True),  # others are compiled, too, in test_experts_compiled.py
        ("reglu", "bfloat16", False),
        ("gelu", "bfloat16", False),
        ("relu", "float32", True),
    ],
)
@pytest.mark.slow
def test_forward_and_backward_lower_for_cuda(activation, param_dtype, biases):
    problem = problem_of(ROUTINGS["random"], activation=activation, param_dtype=param_dtype, biases=biases)
    text = lowered("cuda", problem, activation=activation, implementation="mosaic_gpu")
    for kernel in KERNELS:
        assert kernel in text, kernel


def lowered_for_cuda(function, *arguments) -> str:
    """The gradient of `function` in all arguments but the last, lowered for a GPU that need not be there."""
    grad = jax.grad(lambda *a: function(*a).astype(jnp.float32).sum(), tuple(range(len(arguments) - 1)))
    return jax.jit(grad).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def on_kernels(x, params, weights, experts, **options):
    return apply(expert_ffn, x, params, weights, experts, implementation="mosaic_gpu", **options)


def mapped(*arguments):
    return jax.vmap(on_kernels)(*jax.tree.map(lambda a: jnp.stack([a] * 3), arguments))


def scanned(x, *rest):
    layer = jax.checkpoint(lambda y, _: (y + on_kernels(y, *rest), None))
    return jax.lax.scan(layer, x, None, length=2)[0]


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(partial(on_kernels, save="inputs"), id="save inputs"),
        pytest.param(jax.checkpoint(on_kernels), id="checkpoint"),
        pytest.param(
            jax.checkpoint(on_kernels, policy=jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)),
            id="checkpoint with names",
        ),
        pytest.param(scanned, id="scan of checkpoint"),
        pytest.param(mapped, id="vmap"),
    ],
)
@pytest.mark.slow
def test_transformations_lower_for_cuda(function):
    problem = problem_of(ROUTINGS["random"])
    text = lowered_for_cuda(function, problem.x, problem.params, problem.weights, problem.experts)
    assert "moe_down_backward" in text


def test_no_kernel_writes_through_the_pointer_of_an_operand():
    """XLA may take the result from elsewhere; see `in_place.py`, and the scan over layers on the GPU below."""
    problem = problem_of(ROUTINGS["random"])
    step = jax.grad(lambda *a: on_kernels(*a, problem.experts).astype(jnp.float32).sum(), (0, 1, 2))
    assert "new_ref" not in str(jax.make_jaxpr(step)(problem.x, problem.params, problem.weights))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.slow
def test_shard_map_lowers_for_cuda(check_vma):
    problem = problem_of(Case(random_experts(40, 2, range(6)), 6))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    data, whole = jax.P("data"), jax.P()
    sharded = jax.shard_map(
        on_kernels, mesh=mesh, in_specs=(data, whole, data, data), out_specs=data, check_vma=check_vma
    )
    arguments = (problem.x, problem.params, problem.weights, problem.experts)
    assert "moe_down_backward" in lowered_for_cuda(sharded, *arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROUTINGS)
def test_every_routing(name):
    assert_matches_oracle(problem_of(ROUTINGS[name]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("param_dtype", ["float32", None])
def test_every_dtype(dtype, param_dtype):
    out = assert_matches_oracle(problem_of(ROUTINGS["many_tiles"], dtype=dtype, param_dtype=param_dtype))
    assert out["w_up"].dtype == (param_dtype or dtype)
    assert out["y"].dtype == dtype


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_every_activation_with_biases(activation):
    assert_matches_oracle(problem_of(ROUTINGS["random"], activation=activation, biases=True), activation=activation)


@pytest.mark.gpu
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(
    ("tokens", "d", "n"), [(1000, 512, 768), (777, 264, 328), (300, 1088, 256), (130, 72, 40), (9, 8, 8)]
)
def test_sizes(tokens, d, n, biases):
    problem = problem_of(Case(random_experts(tokens, 4, range(16)), 16), d=d, n=n, biases=biases)
    assert_matches_oracle(problem)


@pytest.mark.gpu
def test_same_bits_on_every_run_and_in_both_save_modes():
    problem = problem_of(ROUTINGS["many_tiles"])
    first = results(expert_ffn, problem, implementation="mosaic_gpu")
    for save in ("pre_activations", "inputs"):
        again = results(expert_ffn, problem, implementation="mosaic_gpu", save=save)
        assert_same_bits(again, first)


@pytest.mark.gpu
def test_nan_token_poisons_no_other_row_or_expert():
    problem = problem_of(ROUTINGS["random"])
    clean = results(expert_ffn, problem, implementation="mosaic_gpu")
    bad = results(expert_ffn, problem._replace(x=problem.x.at[5].set(jnp.nan)), implementation="mosaic_gpu")
    others = np.arange(problem.x.shape[0]) != 5
    own = np.isin(np.arange(6), problem.experts[5])
    for name in ("y", "x", "weights"):
        assert_same_bits(bad[name][others], clean[name][others])
    for name in ("w_gate", "w_up", "w_down"):
        assert_same_bits(bad[name][~own], clean[name][~own])


@pytest.mark.gpu
def test_checkpoint_scan_and_a_jitted_optax_step():
    problem = problem_of(ROUTINGS["random"])

    def loss(params, policy):
        def layer(x, scale):
            return x + scale * apply(expert_ffn, x, params, problem.weights, problem.experts), None

        layer = jax.checkpoint(layer, policy=policy)
        y, _ = jax.lax.scan(layer, problem.x, jnp.array([0.5, 0.25], problem.x.dtype))
        return jnp.square(y.astype(jnp.float32) - problem.dy.astype(jnp.float32)).mean()

    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params, jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES))
        again = jax.grad(loss)(params, None)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value, grads, again

    params = {name: p for name, p in problem.params.items() if p is not None}
    state, values = optimizer.init(params), []
    for _ in range(4):
        params, state, value, grads, again = step(params, state)
        assert_same_bits(grads, again)
        values.append(float(value))
    assert values[-1] < 0.9 * values[0]


@pytest.mark.gpu
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("d", [256, 640])
def test_layers_stacked_by_scan(d, residual):
    """Kernels that write in place get slices of stacks, and XLA hands them over as it likes."""
    layers = [make_problem(ROUTINGS["random"].experts, 6, d=d, n=N, dtype="bfloat16", seed=i) for i in range(4)]
    stacks = jax.tree.map(lambda *a: jnp.stack(a), *layers)

    def loss(function, x, params, weights):
        def layer(x, arguments):
            y = apply(function, x, *arguments)
            return (x + y if residual else y), None

        y, _ = jax.lax.scan(layer, x, (params, weights, stacks.experts))
        return jnp.vdot(y.astype(jnp.float32), stacks.dy[0].astype(jnp.float32))

    def gradients(function, *arguments):
        return jax.jit(jax.grad(partial(loss, function), argnums=(0, 1, 2)))(*arguments)

    problem = stacks.cast(jnp.float32)
    out = gradients(expert_ffn, stacks.x[0], stacks.params, stacks.weights)
    expected = gradients(dense_expert_ffn, problem.x[0], problem.params, problem.weights)
    assert_close(out, expected, 2 * LIMIT)


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    """2M tokens: the pre-activations alone have 2^32 elements. Tokens at both ends are held to the oracle."""
    tokens, d, n, num_experts = 2**21, 512, 2048, 4
    experts = np.random.default_rng(0).integers(0, num_experts, (tokens, 1), np.int32)
    small = make_problem(experts[:64], num_experts, d=d, n=n, biases=False, dtype="bfloat16")
    x = jax.random.normal(jax.random.key(0), (tokens, d), jnp.bfloat16)
    weights = jax.random.uniform(jax.random.key(1), (tokens, 1))
    out = results(expert_ffn, small._replace(x=x, weights=weights, experts=jnp.asarray(experts), dy=x))
    for part in (slice(0, 512), slice(tokens - 512, tokens)):
        few = small._replace(x=x[part], weights=weights[part], experts=jnp.asarray(experts[part]), dy=x[part])
        expected = results(dense_expert_ffn, few.cast(jnp.float32))
        for name in ("y", "x", "weights"):
            assert_close(out[name][part], expected[name], LIMIT)
