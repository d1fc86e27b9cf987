"""Loads with transformers what `train_example --checkpoint` has saved, and compares its logits with the decoder's.

Run it in two environments, for neither needs what the other has. First `python -m
tests.train_example.check_with_transformers FOLDER`, which writes token ids and the decoder's logits into the folder,
then `python tests/train_example/check_with_transformers.py FOLDER` with torch and transformers. No test runs it.
"""

import sys
from pathlib import Path

FILE = "logits.safetensors"


def write_logits(folder: Path) -> None:
    """The decoder's side."""
    import jax.numpy as jnp
    import numpy as np
    from safetensors.numpy import save_file

    from train_example.model import Decoder
    from train_example.public_models.config import public_config
    from train_example.public_models.weights import load_params

    config = public_config(folder)
    model = Decoder(config, config.moe(), jnp.float32)
    ids = np.random.default_rng(0).integers(0, config.vocabulary, (2, 33), dtype=np.int32)
    logits = model.apply({"params": load_params(folder, model)}, ids)
    save_file({"ids": ids, "logits": np.asarray(logits)}, folder / FILE)


def compare_logits(folder: Path) -> None:
    """The side of transformers."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    expected = load_file(folder / FILE)
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        logits = model(input_ids=expected["ids"].long()).logits
    error = (logits - expected["logits"]).norm() / logits.norm()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    text = "It loads, and its text comes back."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    print(f"{type(model).__name__}: relative error of the logits {error:.1e}")
    assert error < 1e-5


if __name__ == "__main__":
    (write_logits if __package__ else compare_logits)(Path(sys.argv[1]))
