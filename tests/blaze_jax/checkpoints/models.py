"""The fixtures: small models as transformers writes them, and what it computes with them."""

import json
from functools import cache
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from blaze_jax import checkpoints

FIXTURES = Path(__file__).parent / "fixtures"
FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss")


@cache
def model(family: str) -> checkpoints.PublicModel:
    return checkpoints.read_model(FIXTURES / family)


def load(name: str, **options) -> checkpoints.Layer:
    """The last layer of the fixture of that name."""
    described = model(name.partition("-")[0] if name != "deepseek_v3-float8" else name)
    return checkpoints.load(FIXTURES / name, described.num_layers - 1, described.layer, **options)


@cache
def expected(family: str) -> dict[str, np.ndarray]:
    return load_file(FIXTURES / family / "expected.safetensors")


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder but the expected results, read without this library; types must be numpy's."""
    files = [path for path in sorted(folder.glob("*.safetensors")) if path.name != "expected.safetensors"]
    return {name: value for path in files for name, value in load_file(path).items()}


def write(folder: Path, tensors: dict, config: dict | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder
