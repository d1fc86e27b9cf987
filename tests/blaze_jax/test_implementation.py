"""Which kernels a call gets."""

import inspect

import jax
import jax.numpy as jnp
import pytest

from blaze_jax.checks import warn_once
from blaze_jax.implementation import (
    choose_dispatch_implementation,
    choose_implementation,
    choose_router_implementation,
    demanded_family,
    kernels_of,
)
from pallas_kernels import ampere, hopper, xla
from pallas_kernels.family import Kernels


def choose(implementation, *, dtype=jnp.bfloat16, up_dtype=None, d=256, n=256, num_experts=4, biases=0):
    """What is chosen for tokens, weights and biases of these sizes."""

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    up = array(num_experts, d, n, dtype=up_dtype or dtype)
    weights = (array(num_experts, d, n), up, array(num_experts, n, d))
    return choose_implementation(implementation, array(16, d), weights, (array(num_experts, n),) * biases)


def test_every_name_has_its_kernels_unless_another_family_is_demanded():
    assert kernels_of("xla") is kernels_of("mosaic_gpu", num_tokens=0) is xla
    assert kernels_of("mosaic_gpu") is hopper
    assert kernels_of("mosaic_gpu", dtype=jnp.float32) is ampere
    with demanded_family("ampere"):
        assert kernels_of("mosaic_gpu") is ampere
        assert kernels_of("xla") is xla
        with demanded_family(None):
            assert kernels_of("mosaic_gpu") is hopper
    assert kernels_of("mosaic_gpu") is hopper


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("family", [xla, ampere, hopper], ids=lambda family: family.__name__)
def test_a_family_has_all_that_the_contract_declares(family):
    declared = {name for name in vars(Kernels) if not name.startswith("_")}
    assert {"up_projection", "in_parts", "transformable"} <= declared <= vars(family).keys()
    for name in (name for name in declared if isinstance(vars(Kernels)[name], staticmethod)):
        contract, own = (dict(inspect.signature(getattr(f, name)).parameters) for f in (Kernels, family))
        if family.in_parts is None:
            contract.pop("into", None)
        added = [own.pop(other) for other in own.keys() - contract.keys()]
        assert [(p.name, p.kind) for p in own.values()] == [(p.name, p.kind) for p in contract.values()], name
        assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in added), name


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="asks what a machine without a GPU gets")
def test_portable_kernels_serve_everywhere_and_a_demand_is_met():
    assert choose(None) == choose("xla") == choose(None, dtype=jnp.float32, d=3, biases=2) == "xla"
    assert choose("mosaic_gpu") == "mosaic_gpu"


class Device:
    """What jax says of an accelerator."""

    def __init__(self, device_kind, compute_capability=None):
        self.device_kind, self.compute_capability = device_kind, compute_capability


@pytest.mark.parametrize(
    ("backend", "device", "changes", "message"),
    [
        ("gpu", Device("NVIDIA H200", "9.0"), {"num_experts": 2049}, "num_experts=2049 must be"),
        ("gpu", Device("NVIDIA H200", "9.0"), {"d": 100}, "d=100 must be a multiple of 8"),
        ("gpu", Device("NVIDIA A100", "8.0"), {"n": 100}, "n=100 must be a multiple of 8"),
        ("gpu", Device("Tesla V100", "7.0"), {}, ".* of compute capability 8.0 and newer, and this is Tesla V100"),
        ("gpu", Device("AMD MI300X", "gfx942"), {}, "they are for NVIDIA GPUs .*, and this is AMD MI300X"),
        ("tpu", Device("TPU v5"), {}, "they are for NVIDIA GPUs .*, and this is TPU v5"),
    ],
)
def test_an_accelerator_without_the_kernels_is_told_once(monkeypatch, backend, device, changes, message):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    warn_once.cache_clear()
    assert choose("xla", **changes) == "xla"
    with pytest.warns(UserWarning, match=f"slower than the kernels for NVIDIA GPUs: {message}") as warned:
        assert choose(None, **changes) == "xla"
    assert "implementation='xla' says that this is meant" in str(warned[0].message)
    assert choose(None, **changes) == "xla"


def compute_on(monkeypatch, capability):
    """As if jax computed on such a GPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device("NVIDIA", capability)])


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"])
def test_every_gpu_since_ampere_gets_its_kernels(monkeypatch, capability):
    compute_on(monkeypatch, capability)
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        assert choose(None, dtype=dtype) == "mosaic_gpu"
        narrow = dtype != jnp.float32
        assert kernels_of("mosaic_gpu", dtype=dtype) is (hopper if capability == "9.0" and narrow else ampere)
    logits = jax.ShapeDtypeStruct((16, 4), jnp.float32)
    assert choose_router_implementation(None, logits, 2) == "mosaic_gpu"
    assert choose_dispatch_implementation(None, jax.ShapeDtypeStruct((16, 2), jnp.int32), 4) == "mosaic_gpu"


def test_products_in_full_float32_are_for_the_portable_form(monkeypatch):
    compute_on(monkeypatch, "9.0")
    warn_once.cache_clear()
    with jax.default_matmul_precision("highest"):
        with pytest.warns(UserWarning, match="jax_default_matmul_precision is 'highest', and .* rounded to tf32"):
            assert choose(None, dtype=jnp.float32) == "xla"
        assert choose(None) == choose("mosaic_gpu", dtype=jnp.float32) == "mosaic_gpu"


@pytest.mark.parametrize("implementation", ["mosaic_gpu", None])
def test_kernels_that_spill_say_so_once(monkeypatch, implementation):
    compute_on(monkeypatch, "9.0")
    monkeypatch.setattr(hopper, "why_kernels_spill", lambda: "the kernels spill, because of that")
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="the kernels spill, because of that"):
        assert choose(implementation) == "mosaic_gpu"
    assert choose(implementation) == "mosaic_gpu"
    assert choose("xla") == "xla"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": jnp.int8}, "x has dtype int8, the tensor cores take bfloat16, float16 or float32"),
        ({"d": 100}, "d=100 must be a multiple of 8"),
        ({"n": 100}, "n=100 must be a multiple of 8"),
        ({"num_experts": 2049}, "num_experts=2049 must be at most 2048"),
        ({"up_dtype": jnp.float32}, "w_gate and w_up have dtypes bfloat16 and float32"),
        ({"up_dtype": jnp.float8_e4m3fn}, "a weight or bias has dtype float8_e4m3fn"),
    ],
)
@pytest.mark.default_cases("*")
def test_kernels_that_cannot_run_it_say_why(changes, reason):
    with pytest.raises(NotImplementedError, match=f"implementation='mosaic_gpu' cannot run this: {reason}"):
        choose("mosaic_gpu", **changes)
