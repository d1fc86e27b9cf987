"""`expert_ffn` under the transformations of jax."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blaze_jax import RESIDUAL_NAMES, expert_ffn
from tests.expert_problems import Problem, apply, make_problem, results
from tests.numerics import assert_close, assert_same_bits
from tests.routings import ROUTINGS, random_experts

SAVES = ("pre_activations", "inputs")


def batch_of_problems(size: int = 3) -> Problem:
    """Problems of one shape, stacked along a new leading axis."""
    problems = [make_problem(random_experts(9, 2, range(4), seed), 4, seed=seed) for seed in range(size)]
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *problems)


def results_one_by_one(problems: Problem):
    outs = [results(expert_ffn, jax.tree.map(lambda a, i=i: a[i], problems)) for i in range(len(problems.x))]
    return jax.tree.map(lambda *arrays: np.stack(arrays), *outs)


def squared_error(x, params, weights, experts, target, **options):
    return jnp.square(apply(expert_ffn, x, params, weights, experts, **options) - target).mean()


@pytest.mark.slow
def test_vmap_over_tokens_and_weights():
    problems = batch_of_problems()
    out = jax.jit(jax.vmap(partial(results, expert_ffn)))(problems)
    assert_close(out, results_one_by_one(problems))


@pytest.mark.slow
def test_vmap_over_tokens_with_shared_weights():
    problems = batch_of_problems()
    shared = jax.tree.map(lambda a: a[0], problems.params)

    def loss(params):
        batched = jax.vmap(squared_error, in_axes=(0, None, 0, 0, 0))
        return batched(problems.x, params, problems.weights, problems.experts, problems.dy).mean()

    def loss_of_flattened(params):
        flat = [a.reshape(-1, a.shape[-1]) for a in (problems.x, problems.weights, problems.experts, problems.dy)]
        return squared_error(flat[0], params, *flat[1:])

    out, ref = (jax.jit(jax.value_and_grad(f))(shared) for f in (loss, loss_of_flattened))
    assert_close(out, ref)


def layers_loss(params, problems, *, scan, remat=lambda f: f):
    """Residual layers applied in turn; only the first problem's tokens are used."""

    @remat
    def layer(x, own):
        params, weights, experts = own
        return x + apply(expert_ffn, x, params, weights, experts), None

    x, own = problems.x[0], (params, problems.weights, problems.experts)
    if scan:
        x, _ = jax.lax.scan(layer, x, own)
    else:
        for i in range(len(problems.x)):
            x, _ = layer(x, jax.tree.map(lambda a, i=i: a[i], own))
    return jnp.square(x).mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    "remat",
    [
        lambda f: f,
        jax.checkpoint,
        partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)),
    ],
    ids=["keep_all", "keep_nothing", "keep_named"],
)
def test_scan_over_layers(remat):
    problems = batch_of_problems()
    loss = jax.jit(jax.value_and_grad(layers_loss), static_argnames=("scan", "remat"))
    scanned = loss(problems.params, problems, scan=True, remat=remat)
    assert_close(scanned, loss(problems.params, problems, scan=False))


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize(
    "policy", [None, jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)], ids=["no_policy", "names"]
)
def test_checkpoint_gives_the_same_bits(policy, save):
    problem = make_problem(*ROUTINGS["random"])
    loss = partial(squared_error, save=save)
    plain, recomputed = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(*problem) for f in (loss, jax.checkpoint(loss, policy=policy))
    )
    assert_same_bits(recomputed, plain)
