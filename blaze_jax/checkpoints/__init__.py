"""Public Mixture-of-Experts checkpoints, of the families that `docs/checkpoints.md` lists.

`read_model` reads a model's `config.json`, `load` the parameters of a layer, and `save` writes layers. On the way lie
`folder` (files and their headers), `layouts` (which part of which tensor is which parameter), `loading` (matrices,
brought to devices), `saving` (layers as tensors) and `writing` (files of them).
`hashes` tells of files that are not as they were, and `peft` reads and writes adapters.
"""

from blaze_jax.checkpoints.folder import Folder, MissingExtraError
from blaze_jax.checkpoints.hashes import check_hashes, write_hashes
from blaze_jax.checkpoints.loading import Layer, load, read_model
from blaze_jax.checkpoints.peft import load_adapters, load_module_adapters, read_adapter, save_adapters
from blaze_jax.checkpoints.saving import save
from blaze_jax.huggingface import PublicModel
from blaze_jax.json_file import CheckpointError
from pallas_kernels.codings import decode_float8, decode_mxfp4

__all__ = [
    "CheckpointError",
    "Folder",
    "Layer",
    "MissingExtraError",
    "PublicModel",
    "check_hashes",
    "decode_float8",
    "decode_mxfp4",
    "load",
    "load_adapters",
    "load_module_adapters",
    "read_adapter",
    "read_model",
    "save",
    "save_adapters",
    "write_hashes",
]
