"""The fixtures: small models as transformers writes them, and what it computes with them."""

import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from blaze_jax import checkpoints

FIXTURES = Path(__file__).parent / "fixtures"
FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss")
LATER = ("qwen2_moe", "qwen3_next", "deepseek_v2", "minimax_m2", "granitemoe", "ernie4_5_moe", "dbrx", "minicpm")
"""Families of which a fixture holds the last layer alone."""

BLOCKS = dict.fromkeys(["mixtral", "minimax_m2", "granitemoe"], "model.layers.{}.block_sparse_moe.")
BLOCKS["dbrx"] = "transformer.blocks.{}.ffn."


@cache
def model(name: str) -> checkpoints.PublicModel:
    """The model of that fixture; those of one family differ in format, but for the wider model in float8."""
    return checkpoints.read_model(FIXTURES / (name.partition("-")[0] if name != "deepseek_v3-float8" else name))


def load(name: str, folder: Path | checkpoints.Folder | None = None, **options) -> checkpoints.Layer:
    """The last layer of the fixture of that name, or of a folder that holds such a model."""
    return checkpoints.load(folder or FIXTURES / name, model(name).num_layers - 1, model(name).layer, **options)


def save(name: str, folder: Path, layer: checkpoints.Layer, **options) -> list[Path]:
    """Writes the last layer of such a model."""
    return checkpoints.save(folder, {model(name).num_layers - 1: layer}, model(name).layer, **options)


def block(name: str) -> str:
    """How the names of the last layer's tensors begin."""
    form = BLOCKS.get(name.removesuffix("-bfloat16").removesuffix("-gradients"), "model.layers.{}.mlp.")
    return form.format(model(name).num_layers - 1)


def copied(name: str, tmp_path: Path) -> Path:
    """A copy of the fixture's folder, without the expected results."""
    folder = shutil.copytree(FIXTURES / name, tmp_path / "model")
    (folder / "expected.safetensors").unlink(missing_ok=True)
    return folder


@cache
def expected(family: str) -> dict[str, np.ndarray]:
    return load_file(FIXTURES / family / "expected.safetensors")


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder but the expected results, read without this library."""
    files = [path for path in sorted(folder.glob("*.safetensors")) if path.name != "expected.safetensors"]
    return {name: value for path in files for name, value in load_file(path).items()}


def write(folder: Path, tensors: dict, config: dict | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def parsed(content: bytes) -> tuple[dict, bytes]:
    """Header and body of a file, by the format's definition."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header: dict | bytes, body: bytes, length: int | None = None) -> bytes:
    """A file of that header and body; its length may be a lie."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body
