"""Random adapters of the fixtures' last layers for PEFT: `python -m tests.blaze_jax.checkpoints.write_adapters FOLDER`.

In `FOLDER/family` are the two files that PEFT reads, and `y.safetensors`, the layer's output with these adapters.
`make_peft_fixtures.py FOLDER` compares that with PEFT's.
"""

import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

from blaze_jax import LoRA, checkpoints, init_adapters, moe
from tests.blaze_jax.checkpoints.models import expected, load, model

PEFT_FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss")


def random_adapters(config, width: int):
    adapters = init_adapters(jax.random.key(0), config, width)
    return {name: 0.2 * jax.random.normal(jax.random.key(i), a.shape) for i, (name, a) in enumerate(adapters.items())}


if __name__ == "__main__":
    for family in PEFT_FAMILIES:
        layer, described = load(family), model(family)
        targets = None if family == "mixtral" else ("gate", "up", "down", "router")
        adapter = LoRA(rank=4, alpha=10, targets=targets, shared=family == "olmoe")
        config = replace(described.layer, adapter=adapter)
        adapters = random_adapters(config, described.width)
        folder = Path(sys.argv[1]) / family
        checkpoints.save_adapters(folder, {described.num_layers - 1: adapters}, config, layout=layer.layout)
        x = expected(family)["x"]
        y, _ = moe(x, layer.params | adapters, config, selection_bias=layer.selection_bias)
        save_file({"y": np.asarray(y)}, folder / "y.safetensors")
