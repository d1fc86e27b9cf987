"""What the backward pass keeps, what is alive for a moment, and how much is computed."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.interpreters import partial_eval

from blaze_jax import PRE_ACTIVATION_NAMES, RESIDUAL_NAMES, Activation, expert_ffn
from blaze_jax.benchmark.sizes import Sizes, abstract_inputs, forward_and_backward
from pallas_kernels.xla.dispatch import tile_pairs
from tests.expert_problems import apply, make_problem, results
from tests.routings import ROUTINGS, random_experts

T, K, E, D, N = 37, 2, 6, 20, 12


def residuals(problem, **options):
    """What the backward pass keeps, and of that what is not one of the arguments themselves."""
    arguments = (problem.x, problem.params, problem.weights)
    _, vjp = jax.vjp(lambda *args: apply(expert_ffn, *args, problem.experts, **options), *arguments)
    kept = jax.tree.leaves(vjp)
    forwarded = {id(a) for a in jax.tree.leaves(arguments)}
    return kept, [array for array in kept if id(array) not in forwarded]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("activation", "projections"), [("swiglu", 2), ("gelu", 1)])
@pytest.mark.parametrize("save", ["pre_activations", "inputs"])
@pytest.mark.default_cases("pre_activations-swiglu-2-bfloat16", "inputs-swiglu-2-bfloat16")
def test_kept_bytes_follow_the_formula(save, activation, projections, dtype):
    problem = make_problem(*ROUTINGS["random"], activation=activation, dtype=dtype, param_dtype="float32")
    kept, own = residuals(problem, activation=activation, save=save)

    itemsize = jnp.dtype(dtype).itemsize
    pre_activations = projections * T * K * N * itemsize if save == "pre_activations" else 0
    indices = 4 * (T * K + (E + 1) + T * K)
    assert sum(a.nbytes for a in own) == pre_activations + indices
    arguments = jax.tree.leaves((problem.x, problem.params, problem.weights))
    assert sum(a.nbytes for a in kept) == sum(a.nbytes for a in arguments) + pre_activations + indices


def saved_lines(capsys, function, *args) -> list[str]:
    jax.ad_checkpoint.print_saved_residuals(function, *args)
    return capsys.readouterr().out.splitlines()


def names_of(lines: list[str]) -> set[str]:
    """Names of the saved values that are not arguments."""
    return {line.split("named '")[1].split("'")[0] for line in lines if "from the argument" not in line}


@pytest.mark.parametrize(
    ("save", "allowed", "kept"),
    [
        ("pre_activations", RESIDUAL_NAMES, set(RESIDUAL_NAMES)),
        ("pre_activations", PRE_ACTIVATION_NAMES, set(PRE_ACTIVATION_NAMES)),
        ("inputs", RESIDUAL_NAMES, {"moe_indices"}),
    ],
)
@pytest.mark.default_cases("*")
def test_policy_keeps_exactly_the_named(capsys, save, allowed, kept):
    x, params, weights, experts, _ = make_problem(*ROUTINGS["random"])
    policy = jax.checkpoint_policies.save_only_these_names(*allowed)
    ffn = jax.checkpoint(lambda *args: apply(expert_ffn, *args, save=save), policy=policy)
    assert names_of(saved_lines(capsys, ffn, x, params, weights, experts)) == kept


def test_checkpoint_without_policy_keeps_only_arguments(capsys):
    x, params, weights, experts, _ = make_problem(*ROUTINGS["random"])
    ffn = jax.checkpoint(lambda *args: apply(expert_ffn, *args))
    lines = saved_lines(capsys, ffn, x, params, weights, experts)
    assert len(lines) == 9
    assert names_of(lines) == set()


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_first_pass_under_checkpoint_computes_no_pre_activations(implementation):
    """They go from the program itself: from inside a loop or a kernel no compiler removes what nobody uses."""
    problem = make_problem(*ROUTINGS["random"], dtype="bfloat16", d=24, n=16, biases=False)
    params = {name: p for name, p in problem.params.items() if p is not None}
    arguments = (problem.x, params, problem.weights)

    def layer(*args):
        return apply(expert_ffn, *args, problem.experts, implementation=implementation)

    def up_projection_outputs(function):
        jaxpr = jax.make_jaxpr(jax.jit(function))(*arguments).jaxpr
        jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        (outputs,) = (len(e.outvars) for e in equations(jaxpr) if e.primitive.name == "computed_if_used")
        return outputs

    assert up_projection_outputs(lambda *args: jax.vjp(layer, *args)) == 3
    assert up_projection_outputs(lambda *args: jax.vjp(jax.checkpoint(layer), *args)[0]) == 1


def equations(jaxpr):
    """All equations of a jaxpr and of those inside."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@cache
def temporary_bytes(num_experts, save, dtype) -> int:
    """Temporaries of forward and backward together, as the compiler plans them."""
    inputs = abstract_inputs(Sizes(1024, 2048, 32, num_experts, 4), dtype)
    step = jax.jit(forward_and_backward(partial(expert_ffn, save=save)))
    return step.lower(*inputs, inputs[0]).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("save", ["pre_activations", "inputs"])
def test_no_buffer_of_routed_tokens(save, dtype):
    routed_tokens = 1024 * 4 * 2048 * jnp.dtype(dtype).itemsize
    assert temporary_bytes(8, save, dtype) < routed_tokens


@pytest.mark.slow
def test_temporaries_do_not_grow_with_the_number_of_experts():
    few, many = (temporary_bytes(num_experts, "pre_activations", "float32") for num_experts in (8, 256))
    counts = 4 * (1024 * 4 // tile_pairs(256)) * 256  # the dispatch's, by tile and expert
    assert many < few + 8 * counts


@pytest.mark.parametrize("num_experts", [4, 64, 1024])
def test_work_does_not_grow_with_the_number_of_experts(num_experts):
    """Counts the rows that pass through the activation, forward and backward, tile tails included."""
    rows = []

    def silu(x):
        jax.debug.callback(lambda: rows.append(x.shape[-2]))
        return jax.nn.silu(x)

    experts = random_experts(128, 2, range(num_experts))
    problem = make_problem(experts, num_experts, d=2, n=2, activation="silu", biases=False)
    results(expert_ffn, problem, activation=Activation("counted_silu", silu, gated=False))
    jax.effects_barrier()
    used = np.unique(experts).size
    assert 2 * experts.size <= sum(rows) <= 2 * (2 * experts.size + 8 * used)
