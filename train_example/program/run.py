"""A run from start to end: all is checked before anything is written, and Ctrl-C stops it where it can go on."""

import os
import shlex
import signal
from argparse import Namespace
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from pallas_kernels.mosaic.device import on_nvidia_gpu
from train_example.compile_step import step_and_evaluation
from train_example.config import TrainConfig, UserError
from train_example.data import Corpus, open_text
from train_example.generate.decoding import Generator
from train_example.generate.models import printable
from train_example.generate.sampling import Sampling
from train_example.loop import due, mesh_of, train
from train_example.model import Decoder, together
from train_example.program.adapters import save_adapters
from train_example.program.arguments import new_config, resumed_config
from train_example.program.checkpoints import Checkpoints, only_run_in
from train_example.program.devices import parallelism, state_shardings
from train_example.program.layerwise import block_by_block, trains_by_blocks
from train_example.program.metrics import MetricsLog, progress_bar, show
from train_example.program.model import first_state, generating_model, make_model, state_shapes
from train_example.program.results import plot
from train_example.public_models.tokens import token_stream
from train_example.public_models.weights import save_model
from train_example.step import TrainState, Tree

_MIB = 2**20
_MAX_COUNTED = 64 * _MIB
_PROMPT = 64
_SAMPLE = 512
_TEMPERATURE = 0.8
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MESSAGE = b"\nfinishing this step, then saving; once more to stop at once\n"


@dataclass(frozen=True)
class Setup:
    """A run ready to start.

    Attributes:
      config: how to train.
      corpus: the text.
      model: the model, which knows the mesh.
      num_parameters: how many it has.
      out: folder of the results.
      saved: where the state goes.
      first_step: steps done already, 0 for a fresh run.
      text: what tells the text from others: its size, and the entropy of its frequencies in bits per byte.
    """

    config: TrainConfig
    corpus: Corpus
    model: Decoder
    num_parameters: int
    out: Path
    saved: Checkpoints
    first_step: int
    text: dict[str, float]


def run(arguments: Namespace) -> None:
    """Trains, or goes on training, and leaves metrics, checkpoints, a figure and a sample in the run's folder.

    Raises:
      UserError: the input does not fit, or training diverged.
    """
    with ExitStack() as stack:
        setup = prepare(arguments, stack)
        config, out, is_first_process = setup.config, setup.out, jax.process_index() == 0
        log = stack.enter_context(MetricsLog(out / "metrics.jsonl" if is_first_process else None, setup.first_step))
        print(_introduction(setup), flush=True)
        if is_first_process and setup.first_step < config.steps and (out / "model").exists():
            # The model of a run that was done makes way for the next one's.
            kept = (out / "model").rename(out / f"model-{setup.first_step}")
            print(f"the model of step {setup.first_step} is now in {kept}", flush=True)
        state = _train(setup, log)
        done = int(state.step)
        if done < config.steps:
            command = f"python -m train_example --resume --out {shlex.quote(str(out))}"
            print(f"stopped after step {done} of {config.steps}; go on with: {command}")
            return
        variables: Tree = {"params": together(state.params, state.frozen), "router_state": state.router_state}
        if setup.model.parallel is not None:
            variables = multihost_utils.process_allgather(variables, tiled=True)
        if is_first_process:
            _report(setup, variables, log)
        if is_first_process and config.adapter is not None:
            save_adapters(out / "adapter", config, setup.model, state.params)
            print(f"the adapters are in {out / 'adapter'}, in PEFT's format")
        if is_first_process and config.checkpoint and (config.adapter is None or config.merge):
            if not (out / "model").exists():  # as after --resume of a run that was done
                save_model(out / "model", config.checkpoint, setup.model, variables["params"])
            print(f"the model is in {out / 'model'}, in the format that it came in")


class Interrupt(ExitStack):
    """Inside the context, the first SIGINT or SIGTERM only sets `requested`; a second one ends the program at once."""

    requested = False

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self.callback(signal.signal, number, signal.signal(number, self._request))
        return self

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        os.write(2, _MESSAGE)  # print may be at work already when a signal comes


def prepare(arguments: Namespace, stack: ExitStack) -> Setup:
    """Opens the text, and the folder until the stack ends.

    Raises:
      UserError: something does not fit.
    """
    out, options, saved, description, done = arguments.out, arguments.options, None, None, 0
    folder = out / "checkpoints"

    def opened() -> Checkpoints:
        stack.enter_context(only_run_in(out))  # first: opening removes what a run at work has not finished
        saved = stack.enter_context(closing(Checkpoints(folder)))
        if saved.steps() and not arguments.resume:
            raise UserError(f"{out} has a run already: go on with it by --resume, or choose another --out")
        return saved

    try:
        saved = opened() if folder.is_dir() else None
    except OSError as error:
        raise UserError(f"--out {out} cannot be read: {error.strerror}; choose another folder") from error
    if arguments.resume:
        if saved is None or not saved.steps():
            raise UserError(f"nothing to resume: {out} has no checkpoint; leave --resume out to start a run there")
        done = saved.newest_whole()
        description = saved.description(done)
        config = resumed_config(options, description["config"], out)
        if config.steps <= done and config.steps != description["config"]["steps"]:
            raise UserError(f"the run in {out} has done {done} steps, --steps {config.steps} must be more")
    else:
        config = new_config(options)

    stream, vocabulary = open_text(config.data), config.model.vocabulary
    if config.checkpoint:
        stream = token_stream(stream, config.checkpoint, vocabulary)
    corpus = Corpus(stream, config.sequence_length, vocabulary)
    text = {"bytes": len(corpus.stream), "unigram_bits": round(unigram_bits(corpus), 6)}
    if description is not None and description["text"] != text:
        raise UserError(f"the text is not the one that the run in {out} was trained on: give that one as --data")
    model = make_model(config, parallelism(arguments.mesh))
    num_parameters = _check(config, model)
    try:
        if saved is None:
            folder.mkdir(parents=True, exist_ok=True)
            saved = opened()
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}; choose another folder") from error
    return Setup(config, corpus, model, num_parameters, out, saved, done, text)


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


def _check(config: TrainConfig, model: Decoder) -> int:
    """The number of parameters; UserError for what cannot run on the devices here."""
    parallel, sequences = model.parallel, config.batch_size // config.accumulate
    if parallel is not None and sequences % mesh_of(parallel).size:
        raise UserError(
            f"--mesh has {mesh_of(parallel).size} devices, must divide the {sequences} sequences that --batch-size and "
            "--accumulate make of a microbatch"
        )
    state_shardings(parallel, (), config.model.moe(), config.model.width)
    if config.implementation == "mosaic_gpu" and not on_nvidia_gpu():
        raise UserError(
            "--implementation mosaic_gpu needs an NVIDIA GPU of compute capability 8.0 or newer, the device here is "
            f"{jax.devices()[0].device_kind}: choose xla, or leave the option out"
        )
    try:
        tokens = jnp.zeros((sequences, config.sequence_length), jnp.int32)
        return sum(
            leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0), tokens)["params"])
        )
    except NotImplementedError as error:
        raise UserError(f"--implementation {config.implementation} cannot run this: {error}") from error


def _train(setup: Setup, log: MetricsLog) -> TrainState:
    """Takes the steps that are left, or those until the interrupt, and saves the state after the last."""
    config, elapsed = setup.config, log.records[-1]["elapsed"] if log.records else 0.0
    restored = partial(setup.saved.restore, setup.first_step) if setup.first_step else None
    description: dict[str, Any] = {"config": asdict(config), "text": setup.text}
    with Interrupt() as interrupt, progress_bar(setup.first_step, config.steps) as bar:
        state = first_state(config, setup.model, restored)
        programs = block_by_block if trains_by_blocks(config) else step_and_evaluation
        steps = train(config, setup.model, setup.corpus, state, elapsed, programs)
        for state, record in steps:
            log.write(record)
            show(bar, record)
            stop = multihost_utils.process_allgather(np.array(interrupt.requested)).any()  # in any process
            if stop or due(config, record["step"], config.checkpoint_every):
                setup.saved.save(record["step"], state._replace(frozen={}), description)
            if stop:
                break
    return state


def _introduction(setup: Setup) -> str:
    config, corpus, stream = setup.config, setup.corpus, setup.corpus.stream
    start = f"from step {setup.first_step} " if setup.first_step else ""
    documents = f"{len(stream.documents):,} document{'s' if len(stream.documents) > 1 else ''}"
    lines = [
        f"{config.preset}: {setup.num_parameters / 1e6:,.1f} million parameters in {config.dtype} arithmetic",
        f"text: {documents}, {len(stream):,} {stream.unit}, the last {corpus.held_out_units:,} of them held out",
        f"training {start}to step {config.steps}, losses in bits per byte, results in {setup.out}",
    ]
    if config.adapter is not None:
        trained = sum(leaf.size for leaf in jax.tree.leaves(state_shapes(config, setup.model).params))
        numbers = "" if config.checkpoint else ", of random numbers, for timing"
        lines.insert(1, f"trained: {trained / 1e6:,.1f} million, beside a base in {config.base}{numbers}")
    if (scheduled := config.schedule_steps or config.steps) != config.steps:
        after = ", then a tenth of its peak" if scheduled < config.steps else ""
        lines.append(f"learning rate: that of a run of {scheduled} steps{after} (--schedule-steps)")
    if stream.unit == "tokens" and stream.end is None:
        lines.insert(2, "no end token: the model's files name none, so each document begins right after another")
    return "\n".join(lines)


def _report(setup: Setup, variables: Tree, log: MetricsLog) -> None:
    """Leaves the figure and, but for adapters, a sample; prints the sample and the final line."""
    corpus, config, stream = setup.corpus, setup.config, setup.corpus.stream
    unigram = setup.text["unigram_bits"]
    title = (
        f"{config.preset}: {setup.num_parameters / 1e6:,.1f} million parameters, "
        f"{config.steps:,} steps of {config.batch_size} × {config.sequence_length:,} {stream.unit}"
    )
    plot(log.records, unigram, title, setup.out / "training.png")
    final = f"final: held-out {log.records[-1]['held_out']:.3f} bits/byte, unigram {unigram:.3f} bits/byte"
    if config.adapter is not None:  # a generator takes a copy of each layer's base
        print(f"no sample: python -m train_example.generate --run {shlex.quote(str(setup.out))} makes some\n{final}")
        return

    prompt = stream.read(corpus.training_units, min(_PROMPT, config.sequence_length))
    sampling = Sampling(_TEMPERATURE)
    generator = Generator(generating_model(config), variables, 1, config.sequence_length, sampling, seed=config.seed)
    text = printable(stream.decode(generator.beyond(prompt.tolist(), _SAMPLE)))
    (setup.out / "sample.txt").write_text(text, encoding="utf-8")

    print(f"sample, after the first {len(prompt)} {stream.unit}:\n{text}\n")
    print(final)
