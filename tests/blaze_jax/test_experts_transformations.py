"""`expert_ffn` under vmap, scan, checkpoint and shard_map, and in an optimizer's step."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import P, lax

from blaze_jax import RESIDUAL_NAMES, expert_ffn
from blaze_jax.oracle import dense_expert_ffn
from tests.expert_problems import apply, make_problem, on, on_gpus
from tests.numerics import assert_close, assert_same_bits
from tests.over_devices import make_mesh
from tests.routings import ROUTINGS, random_experts

BY_NAME = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)


def loss(x, params, weights, experts, target, function=expert_ffn, **options):
    return jnp.square(apply(function, x, params, weights, experts, **options) - target).sum()


def gradients(function, problem):
    return jax.jit(jax.value_and_grad(function, argnums=(0, 1, 2)))(*problem)


@pytest.mark.slow
@on("xla", "xla_batched")
@pytest.mark.ci_cases("xla_batched")
def test_vmap_and_scan_over_tokens_and_weights(kernels):
    problems = [make_problem(random_experts(9, 2, range(4), seed), 4, seed=seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *problems)
    mapped = jax.jit(jax.vmap(kernels.results))(stacked)
    _, scanned = jax.jit(lambda stacked: lax.scan(lambda _, p: (None, kernels.results(p)), None, stacked))(stacked)
    expected = jax.tree.map(lambda *arrays: jnp.stack(arrays), *map(kernels.results, problems))
    assert_close((mapped, scanned), (expected, expected))


@pytest.mark.parametrize("save", ["pre_activations", "inputs"])
@pytest.mark.parametrize("policy", [None, BY_NAME], ids=["no_policy", "names"])
def test_checkpoint_gives_the_same_bits(policy, save):
    problem, plain = make_problem(*ROUTINGS["random"]), partial(loss, save=save)
    assert_same_bits(gradients(jax.checkpoint(plain, policy=policy), problem), gradients(plain, problem))


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"devices": 4})


@pytest.fixture
def problem(kernels):
    return make_problem(random_experts(36, 2, range(5)), 5, **kernels.suits)


@pytest.mark.slow
@on("xla", "xla_batched", "ampere")
@pytest.mark.parametrize(
    ("check_vma", "save", "split"),
    [
        (True, "pre_activations", True),
        (True, "inputs", True),
        (True, "pre_activations", False),
        (False, "pre_activations", True),
    ],
)
@pytest.mark.ci_cases("True-pre_activations-True-xla")
def test_gradient_of_sharded_tokens(mesh, kernels, problem, check_vma, save, split):
    data, run = P("devices") if split else P(), partial(loss, function=kernels.function)

    @partial(jax.shard_map, mesh=mesh, in_specs=(data, P(), data, data, data), out_specs=P(), check_vma=check_vma)
    def sharded(*args):
        value = run(*args, save=save)
        return lax.psum(value, "devices") if split else value

    assert_close(gradients(sharded, problem), gradients(run, problem), kernels.tolerance["float32"])


@on("xla")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.slow
def test_gradient_inside_sharded_tokens(mesh, kernels, problem, check_vma):
    data = P("devices")
    specs = {"in_specs": (data, P(), data, data, data), "out_specs": (P(), (data, P(), data))}

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, check_vma=check_vma, **specs)
    def sharded(*args):
        value, (dx, d_params, d_weights) = jax.value_and_grad(loss, argnums=(0, 1, 2))(*args)
        if not check_vma:  # with it, the replicated parameters' gradients come summed
            d_params = lax.psum(d_params, "devices")
        return lax.psum(value, "devices"), (dx, d_params, d_weights)

    assert_close(sharded(*problem), gradients(loss, problem))


@on("xla")
@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_of_sharded_expert_width(mesh, kernels, problem, check_vma):
    last, middle = P(None, None, "devices"), P(None, "devices", None)
    specs = {"w_gate": last, "w_up": last, "w_down": middle, "b_gate": P(None, "devices"), "b_up": P(None, "devices")}
    problem = problem._replace(params={name: problem.params[name] for name in specs})

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), specs, P(), P(), P()), out_specs=P(), check_vma=check_vma)
    def sharded(x, params, weights, experts, target):
        y = lax.psum(apply(expert_ffn, x, params, weights, experts), "devices")
        return jnp.square(y - target).sum()

    assert_close(gradients(sharded, problem), gradients(loss, problem))


@on_gpus
def test_checkpoint_scan_and_a_jitted_optax_step(kernels):
    problem = kernels.problem("random", biases=False)

    def loss(params, policy):
        def layer(x, scale):
            return x + scale * apply(expert_ffn, x, params, problem.weights, problem.experts), None

        y, _ = lax.scan(jax.checkpoint(layer, policy=policy), problem.x, jnp.array([0.5, 0.25], problem.x.dtype))
        return jnp.square(y.astype(jnp.float32) - problem.dy.astype(jnp.float32)).mean()

    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params, BY_NAME)
        again = jax.grad(loss)(params, None)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value, grads, again

    params, values = problem.params, []
    state = optimizer.init(params)
    for _ in range(4):
        params, state, value, grads, again = step(params, state)
        assert_same_bits(grads, again)
        values.append(float(value))
    assert values[-1] < 0.9 * values[0]


@on_gpus
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("d", [256, 640])
def test_layers_stacked_by_scan(kernels, d, residual):
    """Kernels that write in place get slices of stacks, and XLA hands them over as it likes."""
    layers = [make_problem(*ROUTINGS["random"], d=d, n=256, dtype="bfloat16", seed=i) for i in range(4)]
    stacks = jax.tree.map(lambda *a: jnp.stack(a), *layers)

    def loss(function, x, params, weights):
        def layer(x, arguments):
            y = apply(function, x, *arguments)
            return (x + y if residual else y), None

        y, _ = lax.scan(layer, x, (params, weights, stacks.experts))
        return jnp.vdot(y.astype(jnp.float32), stacks.dy[0].astype(jnp.float32))

    def gradients(function, stacks):
        run = jax.jit(jax.grad(partial(loss, function), argnums=(0, 1, 2)))
        return run(stacks.x[0], stacks.params, stacks.weights)

    out, expected = gradients(expert_ffn, stacks), gradients(dense_expert_ffn, stacks.cast(jnp.float32))
    assert_close(out, expected, 2 * kernels.tolerance["bfloat16"])
