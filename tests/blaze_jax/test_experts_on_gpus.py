"""The kernels for GPUs: lowered for CUDA on any machine, interpreted, and on a GPU held to the oracle."""

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P

from blaze_jax import RESIDUAL_NAMES, expert_ffn
from blaze_jax.activations import ACTIVATION_NAMES
from blaze_jax.implementation import demanded_family
from blaze_jax.oracle import dense_expert_ffn
from pallas_kernels import ampere
from tests.expert_problems import KERNELS, apply, lowered, make_problem, results
from tests.numerics import assert_close, assert_same_bits
from tests.routings import ROUTINGS, Case, random_experts

D, N = 320, 256
LIMIT = 1e-2


@pytest.fixture(params=[None, "ampere"], ids=["own", "ampere"])
def family(request):
    """The kernels that this GPU gets, or those for every GPU since Ampere."""
    with demanded_family(request.param):
        jax.clear_caches()  # of what was traced for others
        yield
    jax.clear_caches()


@pytest.fixture
def interpreted_ampere():
    with demanded_family("ampere"), ampere.interpreted():
        jax.clear_caches()
        yield
    jax.clear_caches()


def on_gpus(test):
    """A test of each family on a GPU."""
    return pytest.mark.gpu(pytest.mark.usefixtures("family")(test))


def set_mesh():
    return jax.set_mesh(jax.make_mesh((1,), ("data",)))


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
    ("family", "mesh", "options"),
    [
        ("ampere", nullcontext, {"dtype": "float32"}),
        ("ampere", set_mesh, {}),
        ("hopper", nullcontext, {"param_dtype": "float32", "biases": True}),  # others in test_experts_compiled.py
        ("hopper", nullcontext, {"activation": "reglu"}),
        ("hopper", nullcontext, {"activation": "gelu"}),
        ("hopper", nullcontext, {"activation": "relu", "param_dtype": "float32", "biases": True}),
    ],
)
@pytest.mark.default_cases("ampere-*")
def test_forward_and_backward_lower_for_cuda(family, mesh, options):
    activation = {name: value for name, value in options.items() if name == "activation"}
    with demanded_family(family), mesh():
        jax.clear_caches()
        text = lowered("cuda", problem_of(ROUTINGS["random"], **options), implementation="mosaic_gpu", **activation)
    assert [kernel for kernel in KERNELS if kernel not in text] == []


def on_kernels(x, params, weights, experts, **options):
    return apply(expert_ffn, x, params, weights, experts, implementation="mosaic_gpu", **options)


def mapped(*arguments):
    return jax.vmap(on_kernels)(*jax.tree.map(lambda a: jnp.stack([a] * 3), arguments))


def scanned(x, *rest):
    layer = jax.checkpoint(lambda y, _: (y + on_kernels(y, *rest), None))
    return jax.lax.scan(layer, x, None, length=2)[0]


@pytest.mark.parametrize("function", [scanned, mapped])  # others in test_layers_share_kernels.py
@pytest.mark.slow
def test_transformations_lower_for_cuda(function):
    problem = problem_of(ROUTINGS["random"])
    gradient = jax.grad(lambda *a: function(*a, problem.experts).astype(jnp.float32).sum(), (0, 1, 2))
    traced = jax.jit(gradient).trace(problem.x, problem.params, problem.weights)
    assert "moe_down_backward" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_no_kernel_writes_through_the_pointer_of_an_operand():
    """XLA may take the result from elsewhere; see `launches.py`, and the scan over layers on the GPU below."""
    problem = problem_of(ROUTINGS["random"])
    step = jax.grad(lambda *a: on_kernels(*a, problem.experts).astype(jnp.float32).sum(), (0, 1, 2))
    assert "new_ref" not in str(jax.make_jaxpr(step)(problem.x, problem.params, problem.weights))


@pytest.mark.parametrize(
    ("save", "biases", "dtype", "limit"),
    [
        ("pre_activations", True, "float32", 2e-3),
        ("pre_activations", True, "bfloat16", 2e-2),
        ("inputs", False, "float16", 5e-3),
    ],
)
@pytest.mark.usefixtures("interpreted_ampere")
def test_the_interpreted_layer_matches_the_oracle_with_the_same_bits_twice(save, biases, dtype, limit):
    problem = problem_of(ROUTINGS["empty_slots"], d=24, n=40, dtype=dtype, biases=biases)
    out, again = (results(expert_ffn, problem, implementation="mosaic_gpu", save=save) for _ in range(2))
    assert_same_bits(out, again)
    for name, value in results(dense_expert_ffn, problem.cast(jnp.float32)).items():
        assert_close(out[name], value, limit)


@pytest.mark.parametrize(("check_vma", "split"), [(True, "tokens"), (True, "nothing"), (False, "tokens")])
@pytest.mark.usefixtures("interpreted_ampere")
def test_interpreted_inside_shard_map(check_vma, split):
    case = ROUTINGS["random"]
    problem = make_problem(case.experts[:36], case.num_experts, d=24, n=40)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    by_token = P("data") if split == "tokens" else P()

    def loss(x, params, weights, experts, target, **options):
        return jnp.square(apply(expert_ffn, x, params, weights, experts, **options) - target).sum()

    @partial(jax.shard_map, mesh=mesh, in_specs=(by_token, P(), *[by_token] * 3), out_specs=P(), check_vma=check_vma)
    def over_devices(*arguments):
        value = loss(*arguments, implementation="mosaic_gpu")
        return jax.lax.psum(value, "data") if split == "tokens" else value

    found = jax.jit(jax.value_and_grad(over_devices, argnums=(0, 1, 2)))(*problem)
    expected = jax.value_and_grad(partial(loss, implementation="xla"), argnums=(0, 1, 2))(*problem)
    assert_close(found, expected, 2e-3)


@on_gpus
@pytest.mark.parametrize("name", ROUTINGS)
def test_every_routing(name):
    assert_matches_oracle(problem_of(ROUTINGS[name]))


@on_gpus
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("param_dtype", ["float32", None])
def test_every_dtype(dtype, param_dtype):
    out = assert_matches_oracle(problem_of(ROUTINGS["many_tiles"], dtype=dtype, param_dtype=param_dtype))
    assert out["w_up"].dtype == (param_dtype or dtype)
    assert out["y"].dtype == dtype


@on_gpus
@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_every_activation_with_biases(activation):
    assert_matches_oracle(problem_of(ROUTINGS["random"], activation=activation, biases=True), activation=activation)


@on_gpus
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(
    ("tokens", "d", "n"), [(1000, 512, 768), (777, 264, 328), (300, 1088, 256), (130, 72, 40), (9, 8, 8)]
)
def test_sizes(tokens, d, n, biases):
    problem = problem_of(Case(random_experts(tokens, 4, range(16)), 16), d=d, n=n, biases=biases)
    assert_matches_oracle(problem)


@on_gpus
def test_same_bits_on_every_run_and_in_both_save_modes():
    problem = problem_of(ROUTINGS["many_tiles"])
    first = results(expert_ffn, problem, implementation="mosaic_gpu")
    for save in ("pre_activations", "inputs"):
        again = results(expert_ffn, problem, implementation="mosaic_gpu", save=save)
        assert_same_bits(again, first)


@on_gpus
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


@on_gpus
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


@on_gpus
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


@on_gpus
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
