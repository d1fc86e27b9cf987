"""From what the user asked for to all that a run needs, checked before anything is written."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from blaze_jax import Parallelism
from pallas_kernels.mosaic.device import on_nvidia_gpu
from train_example.compile_step import jit_once
from train_example.config import TrainConfig, UserError
from train_example.data import Corpus, open_text
from train_example.model import Decoder
from train_example.program.arguments import Arguments, new_config, resumed_config
from train_example.program.checkpoints import Checkpoints
from train_example.program.devices import device_count, parallelism, state_shardings
from train_example.program.experts_layer import experts_function
from train_example.public_models.tokens import TokenStream
from train_example.public_models.weights import load_params
from train_example.step import TrainState, init_state, make_optimizer

_MIB = 2**20
_MAX_COUNTED = 64 * _MIB


@dataclass(frozen=True)
class Setup:
    """A run ready to start.

    Attributes:
      config: how to train.
      corpus: the text.
      model: the model, which knows the mesh.
      out: folder of the results.
      checkpoints: where the state goes.
      first_step: steps done already, 0 for a fresh run.
      unigram_bits: entropy of the text's frequencies, in bits per byte.
    """

    config: TrainConfig
    corpus: Corpus
    model: Decoder
    out: Path
    checkpoints: Checkpoints
    first_step: int
    unigram_bits: float

    @property
    def num_parameters(self) -> int:
        shapes = jax.eval_shape(self.model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    @property
    def description(self) -> dict[str, Any]:
        """The description of the run that goes into its checkpoints."""
        return {"config": asdict(self.config), "text": _fingerprint(self.corpus, self.unigram_bits)}


def prepare(arguments: Arguments) -> Setup:
    """Opens the text and the folder.

    Raises:
      UserError: something does not fit.
    """
    out = arguments.out
    checkpoints = _checkpoints(out)
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
    unigram = unigram_bits(corpus)
    if saved is not None and saved["text"] != _fingerprint(corpus, unigram):
        raise UserError(f"the text is not the one that the run in {out} was trained on: give that one as --data")
    parallel = parallelism(arguments.mesh)
    _check_mesh(config, parallel)
    model = make_model(config, parallel)
    _check_implementation(config, model)
    checkpoints = checkpoints or _checkpoints(out, make=True)
    assert checkpoints is not None
    return Setup(config, corpus, model, out, checkpoints, done or 0, unigram)


def make_corpus(config: TrainConfig) -> Corpus:
    """The text of a run, in bytes, or in the tokens of the model that it starts from."""
    stream, vocabulary = open_text(config.data), config.model.vocabulary
    if config.checkpoint:
        stream = TokenStream(stream, config.checkpoint, vocabulary)
    return Corpus(stream, config.sequence_length, vocabulary)


def unigram_bits(corpus: Corpus) -> float:
    """Entropy of the frequencies, in bits per byte; from 64 evenly spaced Mi of the units where there are more."""
    size = len(corpus.stream)
    starts = range(0, size, _MIB)
    if size > _MAX_COUNTED:
        starts = np.linspace(0, size - _MIB, _MAX_COUNTED // _MIB).astype(np.int64).tolist()
    counts = np.zeros(corpus.vocabulary, np.int64)
    for start in starts:
        counts += np.bincount(corpus.stream.read(start, min(_MIB, size - start)), minlength=corpus.vocabulary)
    share = counts[counts > 0] / counts.sum()
    return float((share * np.log2(1 / share)).sum()) / corpus.stream.bytes_per_unit


def make_model(config: TrainConfig, parallel: Parallelism | None = None) -> Decoder:
    """The model of a run."""
    return Decoder(
        config.model,
        config.model.moe(save=config.save, implementation=config.implementation),
        jnp.dtype(config.dtype),
        remat=config.remat,
        experts=experts_function(config.experts_layer),
        attention=config.attention,
        unroll=config.unroll,
        parallel=parallel,
    )


def first_state(setup: Setup) -> TrainState:
    """The state to go on from: the checkpoint's, the public model's, or a fresh one."""
    config, model = setup.config, setup.model
    init = partial(init_state, config, model)
    like = jax.eval_shape(init)
    shardings = state_shardings(model.parallel, like, model.moe, config.model.width)
    if setup.first_step:
        if shardings is not None:
            like = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), like, shardings)
        return setup.checkpoints.restore(setup.first_step, like)
    if config.checkpoint:
        params = load_params(config.checkpoint, model, shardings and shardings.params)
        make_moments = jit_once(make_optimizer(config).init, shardings and shardings.optimizer_state)
        step = jax.device_put(jnp.int32(0), shardings and shardings.step)
        return TrainState(step, params, {}, make_moments(params))
    return jit_once(init, shardings)()


def _check_mesh(config: TrainConfig, parallel: Parallelism | None) -> None:
    sequences, devices = config.batch_size // config.accumulate, device_count(parallel)
    if sequences % devices:
        raise UserError(
            f"--mesh has {devices} devices, must divide the {sequences} sequences that --batch-size and "
            "--accumulate make of a microbatch"
        )
    if parallel is not None and config.experts_layer != "blaze_jax":
        raise UserError(f"--experts-layer {config.experts_layer} runs on one device: leave --mesh out")
    state_shardings(parallel, (), config.model.moe(), config.model.width)


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


def _checkpoints(out: Path, *, make: bool = False) -> Checkpoints | None:
    """The checkpoints in the run's folder; None where there is no place for them yet, unless it is to be made."""
    folder = out / "checkpoints"
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        return Checkpoints(folder) if folder.is_dir() else None
    except OSError as error:
        done = "written" if make else "read"
        raise UserError(f"--out {out} cannot be {done}: {error.strerror}; choose another folder") from error


def _fingerprint(corpus: Corpus, unigram: float) -> dict[str, float]:
    return {"bytes": len(corpus.stream), "unigram_bits": round(unigram, 6)}
