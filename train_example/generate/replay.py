"""The experts that tokens went to while a text was generated, on disk, and passes of a model that take them again.

Reinforcement learning wants this of a Mixture of Experts: later weights would choose other experts for a text than
those that wrote it, and its likelihood would jump.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from blaze_jax import EMPTY_SLOT
from train_example.config import ModelConfig, UserError
from train_example.model import Decoder, Tree


class Recorded(NamedTuple):
    """A sequence that was generated.

    Attributes:
      prompt: how many of its tokens are the prompt.
      tokens: all of them, the generated ones behind the prompt.
      experts: those that each token went to in each Mixture-of-Experts layer, -1 in an empty slot. The last token is
        left out: nothing has looked at it.
    """

    prompt: int
    tokens: Int[np.ndarray, " S"]
    experts: Int[np.ndarray, "layers S-1 slots"]


class Replay(NamedTuple):
    """Recorded sequences as one batch, for a training step; all are padded to the longest.

    Attributes:
      tokens: all but the last of each sequence, to be given to the model; behind its end zeros, which go to no expert.
      targets: the token that follows each of them.
      generated: where the target is one that the model chose: not of the prompt, and no padding.
      variables: the collection "routing" for the model's `apply`, beside its parameters.
    """

    tokens: Int[Array, "B S"]
    targets: Int[Array, "B S"]
    generated: Bool[Array, "B S"]
    variables: Tree


def write_recorded(folder: Path, index: int, recorded: Recorded) -> None:
    """Leaves a whole file, whatever ends the process."""
    unfinished = folder / f"{index}.unfinished"
    with unfinished.open("wb") as file:
        np.savez(file, **recorded._asdict())
    os.replace(unfinished, folder / f"{index}.npz")


def read_recorded(folder: Path, model: Decoder) -> list[Recorded]:
    """The sequences that a run of `train_example.generate` has recorded, first to last.

    Raises:
      UserError: there are none, one is missing or cannot be read, or they are of another model.
    """
    files = [folder / f"{index}.npz" for index in range(len(list(folder.glob("*.npz"))))]
    if not files:
        raise UserError(f"{folder} has no sequences, must be a folder that --record-experts has left")
    return [_read(file, model) for file in files]


def replay_of(model: Decoder, sequences: Sequence[Recorded]) -> Replay:
    """The sequences as one batch for `model`."""
    tokens, experts = padded(sequences, max(len(one.tokens) for one in sequences), len(sequences))
    ends = np.array([[one.prompt, len(one.tokens)] for one in sequences])
    at = np.arange(1, tokens.shape[1])
    generated = (at >= ends[:, :1]) & (at < ends[:, 1:])
    variables = {"routing": collection_of(model.config, jnp.asarray(experts[:, :, :-1], jnp.int32))}
    return Replay(jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:]), jnp.asarray(generated), variables)


def padded(sequences: Sequence[Recorded], length: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens `(batch, length)`, zeros behind their ends; and experts `(layers, batch, length, slots)`, there -1."""
    layers, _, slots = sequences[0].experts.shape
    tokens = np.zeros((batch, length), np.int32)
    experts = np.full((layers, batch, length, slots), EMPTY_SLOT, sequences[0].experts.dtype)
    for row, one in enumerate(sequences):
        tokens[row, : len(one.tokens)] = one.tokens
        experts[:, row, : one.experts.shape[1]] = one.experts
    return tokens, experts


def collection_of(config: ModelConfig, experts: Int[Array, "layers B S slots"]) -> Tree:
    """The collection "routing" of a decoder, which its layers then take as their choice."""
    found, first = {}, 0
    for name, layers in _stacks(config).items():
        found[name] = {"moe": {"experts": experts[first : first + len(layers)]}}
        first += len(layers)
    return found


def experts_in(config: ModelConfig, collection: Any) -> Int[Array, "layers B S slots"]:
    """The choice of all layers, first to last, in the collection "routing" that a decoder has left."""
    return jnp.concatenate([collection[name]["moe"]["experts"] for name in _stacks(config)])


def record_shape(model: Decoder) -> tuple[int, int]:
    """Layers and slots of a record; UserError for a model without experts."""
    layers = 0 if model.dense_twin else sum(map(len, _stacks(model.config).values()))
    if not layers:
        raise UserError("--record-experts: the model has no experts to record, leave the option out")
    return layers, model.moe.experts_per_token or model.moe.num_experts


def record_dtype(model: Decoder) -> DTypeLike:
    """The smallest integers that hold -1 and all ids."""
    return np.min_scalar_type(-model.moe.num_experts)


def _stacks(config: ModelConfig) -> dict[str, list[int]]:
    return {name: layers for name, layers in config.stacks().items() if name.startswith("moe")}


def _read(file: Path, model: Decoder) -> Recorded:
    try:
        with file.open("rb") as opened, np.load(opened) as arrays:
            recorded = Recorded(int(arrays["prompt"]), arrays["tokens"], arrays["experts"])
    except FileNotFoundError as error:
        raise UserError(f"{file} is missing: go on with the run that records it by --resume") from error
    except Exception as error:  # what the library raises depends on the byte that is damaged
        raise UserError(f"{file} cannot be read, is it whole? {error}") from error
    tokens, experts, (layers, slots) = recorded.tokens, recorded.experts, record_shape(model)
    vocabulary, num_experts = model.config.vocabulary, model.moe.num_experts
    shape = (layers, max(tokens.size - 1, 0), slots)
    if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind != "i" or not _within(tokens, 0, vocabulary):
        raise UserError(f"{file}: tokens must be numbers from 0 to {vocabulary - 1}, is it of another model?")
    if experts.shape != shape or experts.dtype.kind != "i" or not _within(experts, EMPTY_SLOT, num_experts):
        raise UserError(
            f"{file}: experts has dtype {experts.dtype}, shape {experts.shape} and numbers up to "
            f"{experts.max(initial=EMPTY_SLOT)}, must be integers of shape {shape} (layers, tokens, slots) from -1 to "
            f"{num_experts - 1}: they are of another model"
        )
    return recorded


def _within(numbers: np.ndarray, least: int, end: int) -> bool:
    return bool(numbers.min(initial=least) >= least and numbers.max(initial=least) < end)
