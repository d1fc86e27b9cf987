"""From what the user asked for to all that a run needs, checked before anything is written."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic.device import on_nvidia_gpu
from train_example.arguments import Arguments, new_config, resumed_config
from train_example.checkpoint import Checkpoints
from train_example.config import TrainConfig
from train_example.data import Corpus, open_text
from train_example.devices import Devices
from train_example.errors import UserError
from train_example.model import Decoder
from train_example.tokens import TokenStream


@dataclass(frozen=True)
class Setup:
    """A run ready to start.

    Attributes:
      config: how to train.
      corpus: on what.
      model: what.
      out: where the results go.
      checkpoints: where the state goes.
      first_step: steps done already, 0 for a fresh run.
      devices: that compute.
    """

    config: TrainConfig
    corpus: Corpus
    model: Decoder
    out: Path
    checkpoints: Checkpoints
    first_step: int
    devices: Devices

    @property
    def num_parameters(self) -> int:
        shapes = jax.eval_shape(self.model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    @property
    def description(self) -> dict[str, Any]:
        """What a checkpoint says of its run."""
        return {"config": asdict(self.config), "text": _fingerprint(self.corpus)}


def prepare(arguments: Arguments) -> Setup:
    """Opens the text and the folder.

    Raises:
      UserError: something does not fit.
    """
    out = arguments.out
    checkpoints = _existing_checkpoints(out)
    done = checkpoints.latest_step if checkpoints else None
    if arguments.resume:
        if checkpoints is None or done is None:
            raise UserError(f"nothing to resume: {out} has no checkpoint; leave --resume out to start a run there")
        saved = checkpoints.description(done)
        config = resumed_config(arguments.options, saved["config"], out)
        if config.steps <= done and config.steps != saved["config"]["steps"]:
            raise UserError(f"the run in {out} has done {done} steps, --steps {config.steps} must be more")
    else:
        if done is not None:
            raise UserError(f"{out} has a run already: go on with it by --resume, or choose another --out")
        saved, config = None, new_config(arguments.options)

    corpus = make_corpus(config)
    if saved is not None and saved["text"] != _fingerprint(corpus):
        raise UserError(f"the text is not the one that the run in {out} was trained on: give that one as --data")
    devices = Devices.of(arguments.mesh)
    _check_mesh(config, devices)
    model = make_model(config, devices)
    _check_implementation(config, model)
    return Setup(config, corpus, model, out, checkpoints or _new_checkpoints(out), done or 0, devices)


def make_corpus(config: TrainConfig) -> Corpus:
    """The text of a run, in bytes, or in the tokens of the model that it starts from."""
    stream, vocabulary = open_text(config.data), config.model.vocabulary
    if config.checkpoint:
        stream = TokenStream(stream, config.checkpoint, vocabulary)
    return Corpus(stream, config.sequence_length, vocabulary)


def make_model(config: TrainConfig, devices: Devices = Devices()) -> Decoder:
    """The model of a run."""
    moe = config.model.moe(save=config.save, implementation=config.implementation)
    return Decoder(
        config.model,
        moe,
        jnp.dtype(config.dtype),
        remat=config.remat,
        experts_layer=config.experts_layer,
        attention=config.attention,
        unroll=config.unroll,
        parallel=devices.parallel,
    )


def _check_mesh(config: TrainConfig, devices: Devices) -> None:
    sequences = config.batch_size // config.accumulate
    if sequences % devices.count:
        raise UserError(
            f"--mesh has {devices.count} devices, must divide the {sequences} sequences that --batch-size and "
            "--accumulate make of a microbatch"
        )
    if devices.parallel is not None and config.experts_layer != "blaze_jax":
        raise UserError(f"--experts-layer {config.experts_layer} runs on one device: leave --mesh out")
    devices.shardings((), config.model.moe(), config.model.width)


def _check_implementation(config: TrainConfig, model: Decoder) -> None:
    if config.implementation == "mosaic_gpu" and not on_nvidia_gpu():
        raise UserError(
            "--implementation mosaic_gpu needs an NVIDIA GPU of compute capability 8.0 or newer, the device here is "
            f"{jax.devices()[0].device_kind}: choose xla, or leave the option out"
        )
    tokens = jnp.zeros((config.batch_size // config.accumulate, config.sequence_length), jnp.int32)
    try:
        jax.eval_shape(model.init, jax.random.key(0), tokens)
    except NotImplementedError as error:
        raise UserError(f"--implementation {config.implementation} cannot run this: {error}") from error


def _existing_checkpoints(out: Path) -> Checkpoints | None:
    folder = _folder(out)
    try:
        return Checkpoints(folder) if folder.is_dir() else None
    except OSError as error:
        raise UserError(f"--out {out} cannot be read: {error.strerror}") from error


def _new_checkpoints(out: Path) -> Checkpoints:
    try:
        _folder(out).mkdir(parents=True, exist_ok=True)
        return Checkpoints(_folder(out))
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}; choose another folder") from error


def _folder(out: Path) -> Path:
    return out / "checkpoints"


def _fingerprint(corpus: Corpus) -> dict[str, float]:
    return {"bytes": len(corpus.stream), "unigram_bits": round(corpus.unigram_bits, 6)}
