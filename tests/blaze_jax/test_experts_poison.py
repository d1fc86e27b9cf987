"""A value that is not finite stays where the mathematics puts it."""

import numpy as np
import pytest

from tests.expert_problems import make_problem
from tests.numerics import assert_same_bits
from tests.routings import ROUTINGS

POISONED_TOKEN = 5
ROW_TENSORS = ("y", "x", "weights")

pytestmark = [
    pytest.mark.parametrize("save", ["pre_activations", "inputs"]),
    pytest.mark.parametrize(("routing", "value"), [("random", np.nan), ("many_tiles", np.inf)]),
]


def split(out, tokens, experts):
    """Every tensor cut to the rows of `tokens` or of `experts`."""
    return {name: value[tokens if name in ROW_TENSORS else experts] for name, value in out.items()}


@pytest.mark.parametrize("where", ["x", "dy"])
def test_token_poisons_only_its_row_and_its_experts(kernels, routing, save, value, where):
    case = ROUTINGS[routing]
    problem = make_problem(*case)
    poisoned = problem._replace(**{where: getattr(problem, where).at[POISONED_TOKEN].set(value)})
    out, ref = kernels(poisoned, save=save), kernels(problem, save=save)

    other_tokens = np.arange(len(case.experts)) != POISONED_TOKEN
    other_experts = ~np.isin(np.arange(case.num_experts), case.experts[POISONED_TOKEN])
    assert_same_bits(split(out, other_tokens, other_experts), split(ref, other_tokens, other_experts))
    reached = out["y"] if where == "x" else out["x"]
    assert not np.isfinite(reached[POISONED_TOKEN]).any()


def test_weights_of_an_expert_poison_only_its_tokens(kernels, routing, save, value):
    case = ROUTINGS[routing]
    problem = make_problem(*case)
    expert = 0
    poisoned = problem._replace(params={name: p.at[expert].set(value) for name, p in problem.params.items()})
    out, ref = kernels(poisoned, save=save), kernels(problem, save=save)

    other_tokens = (case.experts != expert).all(1)
    other_experts = np.arange(case.num_experts) != expert
    # A slot's own gradient only sees its own expert: the other slots of a poisoned token stay as they were too.
    assert_same_bits(split(out, other_tokens, other_experts), split(ref, other_tokens, other_experts))
    assert_same_bits(out["weights"][case.experts != expert], ref["weights"][case.experts != expert])
    assert not np.isfinite(out["y"][~other_tokens]).any()
