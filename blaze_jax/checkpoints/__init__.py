"""Public Mixture-of-Experts checkpoints: Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3, Kimi-K2, GLM-4.5, gpt-oss."""

from blaze_jax.checkpoints.decode import decode_float8, decode_mxfp4
from blaze_jax.checkpoints.errors import CheckpointError, MissingExtraError
from blaze_jax.checkpoints.folder import Folder
from blaze_jax.checkpoints.huggingface import PublicModel, read_model
from blaze_jax.checkpoints.layer import Layer
from blaze_jax.checkpoints.loading import load
from blaze_jax.checkpoints.saving import save

__all__ = [
    "CheckpointError",
    "Folder",
    "Layer",
    "MissingExtraError",
    "PublicModel",
    "decode_float8",
    "decode_mxfp4",
    "load",
    "read_model",
    "save",
]
