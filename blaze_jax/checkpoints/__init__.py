"""Public Mixture-of-Experts checkpoints: layers of Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3 and gpt-oss."""

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
