"""A public model small enough for tests: random weights, and a tokenizer of its own."""

import json
from pathlib import Path
from pydoc_data.topics import topics

import jax
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from pallas_kernels.codings import encode_mxfp4
from tests.blaze_jax.checkpoints.models import FIXTURES, tensors_of

VOCABULARY = 300
END = "<|end|>"


def write_tiny_checkpoint(folder: Path, family: str = "qwen3_moe", *, mxfp4: bool = False) -> Path:
    """The fixture of that family with a larger vocabulary, in float32; with `mxfp4`, experts as in gpt-oss' files."""
    rng = np.random.default_rng(0)
    tensors = tensors_of(FIXTURES / family)
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & tensors.keys():
        tensors[name] = rng.standard_normal((VOCABULARY, tensors[name].shape[1]), np.float32) / 4
    if mxfp4:
        tensors = dict(item for tensor in tensors.items() for item in in_mxfp4(*tensor))
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    alphabet = ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, special_tokens=[END], show_progress=False)
    tokenizer.train_from_iterator([topics["lists"], topics["strings"]], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((FIXTURES / family / "config.json").read_text())
    config |= {"vocab_size": VOCABULARY, "eos_token_id": tokenizer.token_to_id(END)}
    config |= {"quantization_config": {"quant_method": "mxfp4"}} if mxfp4 else {}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def in_mxfp4(name: str, values: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """The tensors that hold a tensor, those of experts' matrices, (in, out), with their blocks along the inputs."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return [(name, values)]
    blocks, scales = (np.asarray(stored).swapaxes(1, 2) for stored in jax.vmap(encode_mxfp4)(values))
    blocks = blocks.reshape(*scales.shape, -1)
    return [(f"{name}{end}", np.ascontiguousarray(of)) for end, of in (("_blocks", blocks), ("_scales", scales))]
