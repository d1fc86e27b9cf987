"""Layers from host memory: the layer on streamed weights is the layer on resident ones, whatever the form."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import pytest

from blaze_jax import LoRA, MoE, MoEConfig, checkpoints, init, quantize_experts
from blaze_jax.offload import store as stores
from blaze_jax.offload.compression import Compressed, decompressed
from blaze_jax.offload.store import POOL_LIMIT, ExpertStore, HostMemoryError, allow_host_memory
from tests.blaze_jax.checkpoints.models import FIXTURES, load, model
from tests.numerics import assert_same_bits

CONFIG = MoEConfig(num_experts=4, experts_per_token=2, expert_width=16, load_balancing_weight=0.0)
X = jax.random.normal(jax.random.key(9), (24, 32), jnp.bfloat16)


@lru_cache
def layers(number=4):
    make = jax.jit(partial(init, config=CONFIG, width=X.shape[1], dtype=jnp.bfloat16))
    return [{"params": make(jax.random.key(seed))} for seed in range(number)]


@jax.jit
def call(variables, x):
    return x + MoE(CONFIG, dtype=jnp.bfloat16).apply(decompressed(variables), x)


def step(number, variables, x):
    return call(variables, x)


@lru_cache
def resident_output():
    x = X
    for layer in layers():
        x = call(layer, x)
    return x


@pytest.mark.parametrize("bits", [None, 3, 4])
@pytest.mark.parametrize("resident", [(), (1, 2), (0, 1, 3), range(4)])
@pytest.mark.default_cases("resident1-3")
@pytest.mark.ci_cases("resident0-None", "resident3-4", "resident2-4")
def test_streamed_layers_are_resident_ones(bits, resident):
    store = ExpertStore(layers(), bits=bits, resident=resident)
    assert store.streamed == tuple(at for at in range(4) if at not in resident)
    for _ in range(2):  # the second pass begins with what came at the end of the first
        assert_same_bits(store.fold(step, X), resident_output())
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(store._layers[3])}
    assert (kinds == {"pinned_host"}) == (3 in store.streamed)


def test_no_more_layers_are_on_the_device_than_buffers():
    store, found = ExpertStore(layers() * 2), []

    def on_device():
        return sum(a.shape == (4, 16, 32) and a.sharding == store.sharding for a in jax.live_arrays())

    def watched(number, variables, x):
        found.append(on_device())
        return step(number, variables, x)

    beside = on_device()
    store.fold(watched, X)
    assert max(found) - beside <= stores.BUFFERS


def test_one_program_takes_every_layer():
    store = ExpertStore(layers(), bits=3)
    compressed = [store._layers[at]["params"]["w_down"] for at in range(4)]
    assert all(isinstance(leaf, Compressed) for leaf in compressed)
    assert len({leaf.escapes.shape for leaf in compressed}) == 1


@pytest.mark.parametrize("bits", [3, None])
def test_on_disk_as_in_memory(bits, tmp_path):
    store = ExpertStore(layers(), bits=bits)
    store.save(tmp_path)
    again = ExpertStore.open(tmp_path)
    assert len(again) == 4
    assert again.layer_bytes == store.layer_bytes
    assert_same_bits(again.fold(step, X), resident_output())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["float8", "mxfp4", "nf4"])
def test_compressed_weights_travel_and_are_written_as_they_are(form, tmp_path):
    config = MoEConfig(num_experts=3, experts_per_token=2, expert_width=64, adapter=LoRA(targets=()))
    keys = [jax.random.key(seed) for seed in range(3)]
    of_layers = [{"params": quantize_experts(init(key, config, 64, dtype=jnp.bfloat16), form)} for key in keys]
    x = jax.random.normal(jax.random.key(9), (24, 64), jnp.bfloat16)

    @jax.jit
    def call(variables, x):
        return x + MoE(config, dtype=jnp.bfloat16, train=False).apply(variables, x)

    expected = x
    for layer in of_layers:
        expected = call(layer, expected)
    store = ExpertStore(of_layers, bits=3, resident={1})  # which has nothing to do with what is compressed already
    store.save(tmp_path)
    for own in (store, ExpertStore.open(tmp_path)):
        assert_same_bits(own.fold(lambda number, variables, x: call(variables, x), x), expected)
    assert own[0]["params"]["w_up"].form == form


@pytest.mark.parametrize("base", [None, "mxfp4"])
@pytest.mark.default_cases("*")
def test_from_a_checkpoint_that_is_compressed(base):
    of, folder = model("gpt_oss-mxfp4"), FIXTURES / "gpt_oss-mxfp4"
    store = ExpertStore.from_checkpoint(folder, [of.num_layers - 1], of.layer, base=base)
    assert_same_bits(store[0]["params"], load("gpt_oss-mxfp4", base=base).params)


def test_from_a_checkpoint():
    folder = FIXTURES / "qwen3_moe-bfloat16"
    model = checkpoints.read_model(folder)
    number = next(at for at in range(model.num_layers) if at not in model.dense_layers)
    store = ExpertStore.from_checkpoint(folder, [number], model.layer, bits=4)
    loaded = checkpoints.load(folder, number, model.layer)
    for name, value in decompressed(store[0])["params"].items():
        assert_same_bits(value, loaded.params[name])


def test_host_memory_that_does_not_suffice(monkeypatch):
    with pytest.raises(ValueError, match="must have one at least"):
        ExpertStore([])
    with pytest.raises(ValueError, match="must be alike"):
        ExpertStore([{"a": jnp.ones(3)}, {"a": jnp.ones(4)}])
    monkeypatch.setattr(stores, "_available", lambda: 100)
    with pytest.raises(HostMemoryError, match=r"0\.0 GB are left: compress"):
        ExpertStore(layers())
    monkeypatch.setattr(stores, "_available", lambda: None)
    monkeypatch.delenv(POOL_LIMIT, raising=False)
    with pytest.raises(HostMemoryError, match=f"set {POOL_LIMIT}=106 or more"):
        stores.check_host_memory(2**30, 100 * 2**30, "gpu")
    monkeypatch.setenv(POOL_LIMIT, "")  # so that what is set goes again
    monkeypatch.delenv(POOL_LIMIT)
    allow_host_memory(100 * 2**30)
    stores.check_host_memory(2**30, 100 * 2**30, "gpu")
