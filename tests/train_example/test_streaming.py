"""Generation with experts from host memory: the tokens of resident experts, whatever stays, is compressed, or batched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blaze_jax.offload.store import ExpertStore
from tests.numerics import assert_close, assert_same_bits
from tests.train_example.test_generate import GREEDY, MOST, NOTHING, apart, generator, model_and_variables, prompts_of
from train_example.generate import streaming
from train_example.generate.sampling import Sampling
from train_example.generate.streaming import StreamingGenerator, without_experts


def streaming_generator(name="own", sampling=GREEDY, bits=None, resident=(), pass_tokens=64):
    model, variables = model_and_variables(name)
    rest, experts = without_experts(apart(model, variables))
    store = ExpertStore(experts, bits=bits, resident=resident)
    options = {"sampling": sampling, "stops": NOTHING, "pass_tokens": pass_tokens}
    return StreamingGenerator(model, rest, store, 4, 32, **options)


@pytest.mark.parametrize("name", ["own", "qwen3_moe", "olmoe"])
@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.default_cases("0-own", "0.8-qwen3_moe")
def test_tokens_are_those_of_resident_experts(name, temperature, monkeypatch):
    monkeypatch.setattr(streaming, "_MICRO_TOKENS", 18)
    monkeypatch.setattr(streaming, "_MICRO_LENGTH", 6)  # three sequences at a time, then one; pieces of 6, 6 and 4
    sampling = Sampling(temperature)
    streamed, resident = streaming_generator(name, sampling), generator(name, sampling)
    prompts = prompts_of(resident.model)
    found = streamed.generate(prompts, MOST)
    assert found == resident.generate(prompts, MOST)
    assert_close(streamed.prefilled(prompts, MOST).logits[:3], resident.prefilled(prompts, MOST).logits[:3], 1e-5)
    for of_streamed, of_resident in zip(streamed.score(prompts), resident.score(prompts), strict=True):
        np.testing.assert_allclose(of_streamed, of_resident, rtol=1e-5, atol=1e-5)


def test_where_the_experts_are_changes_no_bit():
    outputs = []
    for resident in [(), (0,), (0, 1)]:
        streamed = streaming_generator(resident=resident)
        outputs.append(streamed.prefilled(prompts_of(streamed.model), MOST).logits)
    assert_same_bits(outputs[0], outputs[1])
    assert_same_bits(outputs[0], outputs[2])


def test_a_store_of_another_model():
    model, variables = model_and_variables("own")
    rest, experts = without_experts(apart(model, variables))
    with pytest.raises(ValueError, match="the store has 1 layers, must have the model's 2"):
        StreamingGenerator(model, rest, ExpertStore(experts[:1]), 4, 32)
