from blaze_jax.experts import expert_ffn
from blaze_jax.dispatch import build_dispatch
