"""Layers that are loaded: the same weights from each format, on any devices, in little memory.

That they are the right ones says `test_parity`.
"""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from blaze_jax import checkpoints, quantize
from blaze_jax.checkpoints import layouts, loading
from tests.blaze_jax.checkpoints.models import FAMILIES, load, save, tensors_of, write
from tests.numerics import assert_same_bits

KERNELS = ("w_gate", "w_up", "w_down")


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("family", [*FAMILIES[:4], "qwen2_moe"])
def test_a_fused_layout_holds_the_same_layer(family):
    assert_same_bits(load(f"{family}-fused")[:2], load(family)[:2])


def test_mxfp4_is_what_transformers_decodes():
    loaded = load("gpt_oss-mxfp4")
    assert loaded.params["w_up"].dtype == jnp.bfloat16
    assert_same_bits(loaded.params, load("gpt_oss-mxfp4-decoded").params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_parameters_have_the_type_asked_for(dtype):
    plain, converted = load("deepseek_v3"), load("deepseek_v3", dtype=dtype)
    assert_same_bits(converted.params, {name: value.astype(dtype) for name, value in plain.params.items()})
    assert converted.selection_bias.dtype == jnp.float32


SPECS = {
    "experts": P("a"),
    "inputs": P(None, "a"),
    "outputs": P(None, None, "b"),
    "all": P("a", None, "b"),
    "replicated": P(),
    "blocks": P(None, "a", "b"),  # devices share each block of numbers that have one scale
}


@pytest.mark.default_cases("mixtral-experts", "gpt_oss-mxfp4-outputs", "qwen3_moe-bfloat16-replicated", "*[48]-blocks")
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    "name", ["mixtral", "mixtral-fused", "gpt_oss", "gpt_oss-mxfp4", "qwen3_moe-bfloat16", "deepseek_v3-float8"]
)
def test_each_device_gets_its_part(name, spec):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    sharding = NamedSharding(mesh, SPECS[spec])
    loaded = load(name, sharding=dict.fromkeys(KERNELS, sharding))
    assert all(loaded.params[kernel].sharding == sharding for kernel in KERNELS)
    assert_same_bits(loaded[:2], load(name)[:2])


def test_one_sharding_serves_all():
    second = SingleDeviceSharding(jax.devices()[1])
    loaded = load("deepseek_v3", sharding=second)
    assert {value.sharding for value in (*loaded.params.values(), loaded.selection_bias)} == {second}


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("sharded", [False, True])
def test_less_than_two_experts_are_held_at_a_time(tmp_path, monkeypatch, sharded):
    name = "deepseek_v3-float8"
    layer = load(name, dtype="float32")
    save(name, tmp_path, layer)  # matrices of 136 inputs or outputs, which lie in two slices
    if sharded:
        monkeypatch.setattr(loading, "SLICE_BYTES", 1)
    held, largest = 0, 0

    def read(mapped, plain=layouts.copied):
        nonlocal held, largest
        values = plain(mapped)
        held += values.nbytes
        largest = max(largest, held)

        def forget(size=values.nbytes):
            nonlocal held
            held -= size

        weakref.finalize(values, forget)
        return values

    monkeypatch.setattr(layouts, "copied", read)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("a",))
    sharding = dict.fromkeys(KERNELS, NamedSharding(mesh, P(None, "a"))) if sharded else None
    assert_same_bits(load(name, tmp_path, sharding=sharding)[:2], layer[:2])
    tensors = tensors_of(tmp_path)
    assert 0 < largest < 2 * sum(value.nbytes for name, value in tensors.items() if "experts.0." in name)


def test_memory_that_is_filled_becomes_the_array(monkeypatch):
    filled = []
    plain = loading._empty
    monkeypatch.setattr(loading, "_empty", lambda *a: filled.append(plain(*a)) or filled[-1])
    params = load("olmoe").params
    pointers = {values.ctypes.data for values in filled}
    assert pointers == {params[kernel].unsafe_buffer_pointer() for kernel in KERNELS}


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("name", ["gpt_oss-mxfp4", "deepseek_v3-float8", "olmoe"])
def test_accelerators_are_filled_in_place(monkeypatch, name):
    """Does what a GPU does, on a CPU: slices turned by the device, and a donated array."""
    plain = load(name)
    monkeypatch.setattr(loading, "_is_host", lambda device: False)
    monkeypatch.setattr(loading, "SLICE_BYTES", 1)
    assert_same_bits(load(name).params, plain.params)


def test_tensors_of_any_type_are_read(tmp_path):
    stored = {name: np.arange(6).reshape(2, 3).astype(name) for name in ("int8", "uint16", "int64", "float64", "bool")}
    opened = checkpoints.Folder(write(tmp_path, stored))
    assert_same_bits({name: opened[name].read() for name in stored}, stored)
    assert_same_bits(opened["uint16"].read(1, slice(0, None, 2)), stored["uint16"][1, ::2])
    with pytest.raises(checkpoints.CheckpointError, match="'int8' has dtype F4, which numpy has not"):
        opened["int8"]._replace(dtype="F4").read()


@pytest.mark.default_cases("deepseek_v3-float8-*", "gpt_oss-mxfp4-mxfp4-True")
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("name", "base"),
    [("deepseek_v3-float8", "float8"), ("gpt_oss-mxfp4", "mxfp4"), ("gpt_oss-mxfp4", "float8"), ("olmoe", "float8")],
)
def test_a_base_stays_compressed(monkeypatch, name, base, on_device):
    """As the file has it, where it is of that form; what it stands for is what is read without."""
    plain = load(name, dtype="float32")
    if on_device:  # as a GPU does it: slices turned by the device, and a donated array
        monkeypatch.setattr(loading, "_is_host", lambda device: False)
        monkeypatch.setattr(loading, "SLICE_BYTES", 1)
    params = load(name, base=base).params
    weights = {kernel: params.pop(kernel) for kernel in KERNELS}
    assert {weight.form for weight in weights.values()} == {base}
    found = {kernel: weight.astype(jnp.float32) for kernel, weight in weights.items()}
    if base in name:
        assert_same_bits(found, {kernel: plain.params[kernel] for kernel in KERNELS})
    else:
        again = {kernel: quantize(plain.params[kernel], base) for kernel in KERNELS}
        assert_same_bits(weights, again)
    assert_same_bits(params, {other: value for other, value in load(name).params.items() if other not in KERNELS})


def test_a_base_that_cannot_be_compressed():
    with pytest.raises(ValueError, match="base='nf4' takes inputs in 64s, but w_gate has 16"):
        load("olmoe", base="nf4")
    with pytest.raises(ValueError, match="form='int4' must be one of float8, mxfp4, nf4"):
        load("olmoe", base="int4")
    sharding = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("a",)), P("a"))
    with pytest.raises(ValueError, match="base='float8' cannot be split over devices: leave w_up out"):
        load("olmoe", base="float8", sharding={"w_up": sharding})
