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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("activation", "projections"), [("swiglu", 2), ("gelu", 1)])
@pytest.mark.parametrize("save", ["pre_activations", "int8", "inputs"])
@pytest.mark.default_cases("*-swiglu-2-bfloat16")
def test_kept_bytes_follow_the_formula(save, activation, projections, dtype):
    problem = make_problem(*ROUTINGS["random"], activation=activation, dtype=dtype, param_dtype="float32")
    given = (problem.x, problem.params, problem.weights)
    _, vjp = jax.vjp(lambda *args: apply(expert_ffn, *args, problem.experts, activation=activation, save=save), *given)

    kept, given = (jax.tree.leaves(tree) for tree in (vjp, given))
    own = [array for array in kept if all(array is not other for other in given)]
    row = {"pre_activations": N * jnp.dtype(dtype).itemsize, "int8": N + 4, "inputs": 0}  # 4 for the scale of a block
    pre_activations = projections * T * K * row[save]
    indices = 4 * (T * K + (E + 1) + T * K)
    assert sum(a.nbytes for a in own) == pre_activations + indices
    assert sum(a.nbytes for a in kept) == sum(a.nbytes for a in given) + pre_activations + indices


@pytest.mark.parametrize(
    ("save", "allowed", "kept"),
    [
        ("pre_activations", None, set()),
        ("pre_activations", RESIDUAL_NAMES, set(RESIDUAL_NAMES)),
        ("pre_activations", PRE_ACTIVATION_NAMES, set(PRE_ACTIVATION_NAMES)),
        ("int8", PRE_ACTIVATION_NAMES, set(PRE_ACTIVATION_NAMES)),
        ("inputs", RESIDUAL_NAMES, {"moe_indices"}),
    ],
)
@pytest.mark.default_cases("*")
def test_checkpoint_keeps_arguments_and_exactly_what_its_policy_names(capsys, save, allowed, kept):
    *arguments, _ = make_problem(*ROUTINGS["random"])
    policy = allowed and jax.checkpoint_policies.save_only_these_names(*allowed)
    ffn = jax.checkpoint(lambda *args: apply(expert_ffn, *args, save=save), policy=policy)
    jax.ad_checkpoint.print_saved_residuals(ffn, *arguments)
    lines = capsys.readouterr().out.splitlines()
    computed = [line for line in lines if "from the argument" not in line]
    assert {line.split("named '")[1].split("'")[0] for line in computed} == kept
    # The indices take the place of the experts that they are made of.
    assert len(lines) - len(computed) == len(jax.tree.leaves(arguments)) - ("moe_indices" in kept)


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_first_pass_under_checkpoint_computes_no_pre_activations(implementation):
    """They go from the program itself: from inside a loop or a kernel no compiler removes what nobody uses."""
    problem = make_problem(*ROUTINGS["random"], dtype="bfloat16", d=24, n=16, biases=False)
    arguments = (problem.x, problem.params, problem.weights)

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
@pytest.mark.default_cases("pre_activations-float32", "inputs-bfloat16")
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
