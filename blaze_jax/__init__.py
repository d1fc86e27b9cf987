"""A memory-efficient, dropless Mixture-of-Experts layer for JAX."""

from blaze_jax import atomic_experts as atomic_experts
from blaze_jax import checkpoints as checkpoints
from blaze_jax import nnx as nnx
from blaze_jax.activations import ACTIVATION_NAMES, Activation, clamped_swiglu
from blaze_jax.active_experts import update_activity_weight
from blaze_jax.adapters import LoRA, adapter_mask, join_adapters, merge, split_adapters
from blaze_jax.atomic_experts import AtomicConfig, AtomicRouting, atomic_moe
from blaze_jax.casts import cast_experts, with_casts
from blaze_jax.config import DenseTwin, MoEConfig
from blaze_jax.dispatch import build_dispatch
from blaze_jax.experts import expert_ffn
from blaze_jax.experts_vjp import INDEX_NAME, PRE_ACTIVATION_NAMES, RESIDUAL_NAMES
from blaze_jax.layer import auxiliary_losses, init, init_adapters, moe, statistics
from blaze_jax.linen import AtomicMoE, MoE
from blaze_jax.parallelism import Parallelism, transport_options
from blaze_jax.quantized import quantize, quantize_experts
from blaze_jax.router import Router
from blaze_jax.routing import Routing, route, update_selection_bias
from blaze_jax.version import __version__
from pallas_kernels.codings import QuantizedWeight
from pallas_kernels.contract import EMPTY_SLOT, Dispatch
from pallas_kernels.fp8 import CastWeight

# Without the modules, such as `nnx`: an import of all these names must not replace `flax.nnx`.
__all__ = [
    "ACTIVATION_NAMES",
    "EMPTY_SLOT",
    "INDEX_NAME",
    "PRE_ACTIVATION_NAMES",
    "RESIDUAL_NAMES",
    "Activation",
    "AtomicConfig",
    "AtomicMoE",
    "AtomicRouting",
    "CastWeight",
    "DenseTwin",
    "Dispatch",
    "LoRA",
    "MoE",
    "MoEConfig",
    "Parallelism",
    "QuantizedWeight",
    "Router",
    "Routing",
    "__version__",
    "adapter_mask",
    "atomic_moe",
    "auxiliary_losses",
    "build_dispatch",
    "cast_experts",
    "clamped_swiglu",
    "expert_ffn",
    "init",
    "init_adapters",
    "join_adapters",
    "merge",
    "moe",
    "quantize",
    "quantize_experts",
    "route",
    "split_adapters",
    "statistics",
    "transport_options",
    "update_activity_weight",
    "update_selection_bias",
    "with_casts",
]
