"""A run from start to end, which Ctrl-C stops where it can go on."""

import os
import shlex
import signal
from contextlib import ExitStack, closing
from types import FrameType
from typing import Self

import jax

from train_example.loop import due, train
from train_example.program.arguments import Arguments
from train_example.program.devices import any_process, whole
from train_example.program.metrics import MetricsLog, Progress
from train_example.program.results import generate, plot
from train_example.program.setup import Setup, first_state, make_model, prepare
from train_example.public_models.tokens import TokenStream
from train_example.public_models.weights import Params, save_model
from train_example.step import TrainState, Tree

_PROMPT = 64
_SAMPLE = 512
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MESSAGE = b"\nfinishing this step, then saving; once more to stop at once\n"


def run(arguments: Arguments) -> None:
    """Trains, or goes on training, and leaves metrics, checkpoints, a figure and a sample in the run's folder.

    Raises:
      UserError: the input does not fit, or training diverged.
    """
    setup = prepare(arguments)
    steps, is_first_process = setup.config.steps, jax.process_index() == 0
    metrics = setup.out / "metrics.jsonl" if is_first_process else None
    with closing(setup.checkpoints), MetricsLog(metrics, setup.first_step) as log:
        print(_introduction(setup), flush=True)
        if is_first_process and setup.first_step < steps:
            _set_aside(setup)
        state = _train(setup, log)
        done = int(state.step)
        if done == steps:
            variables = whole(setup.model.parallel, {"params": state.params, "router_state": state.router_state})
            if is_first_process:
                _report(setup, variables, log)
                if setup.config.checkpoint:
                    _save(setup, setup.config.checkpoint, variables["params"])
        else:
            command = f"python -m train_example --resume --out {shlex.quote(str(setup.out))}"
            print(f"stopped after step {done} of {steps}; go on with: {command}")


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


def _train(setup: Setup, log: MetricsLog) -> TrainState:
    """Takes the steps that are left, or those until the interrupt, and saves the state after the last."""
    config, elapsed = setup.config, log.records[-1]["elapsed"] if log.records else 0.0
    with Interrupt() as interrupt, Progress(setup.first_step, config.steps) as progress:
        state = first_state(setup)
        for state, record in train(config, setup.model, setup.corpus, state, elapsed):  # noqa: B020  (the next one)
            log.write(record)
            progress.update(record)
            stop = any_process(interrupt.requested)
            if stop or due(config, record["step"], config.checkpoint_every):
                setup.checkpoints.save(record["step"], state, setup.description)
            if stop:
                break
    return state


def _set_aside(setup: Setup) -> None:
    """Gives the model of a run that was done another name, where the run goes on: its place is that of the next."""
    model = setup.out / "model"
    if model.exists():
        kept = model.rename(model.with_name(f"model-{setup.first_step}"))
        print(f"the model of step {setup.first_step} is now in {kept}", flush=True)


def _save(setup: Setup, origin: str, params: Params) -> None:
    out = setup.out / "model"
    if not out.exists():  # as after --resume of a run that was done
        save_model(out, origin, setup.model, params)
    print(f"the model is in {out}, in the format that it came in")


def _introduction(setup: Setup) -> str:
    config, corpus, stream = setup.config, setup.corpus, setup.corpus.stream
    start = f"from step {setup.first_step} " if setup.first_step else ""
    documents = f"{stream.documents:,} document{'s' if stream.documents > 1 else ''}"
    lines = [
        f"{config.preset}: {setup.num_parameters / 1e6:,.1f} million parameters in {config.dtype} arithmetic",
        f"text: {documents}, {len(stream):,} {stream.unit}, the last {corpus.held_out_units:,} of them held out",
        f"training {start}to step {config.steps}, losses in bits per byte, results in {setup.out}",
    ]
    if (scheduled := config.schedule_steps or config.steps) != config.steps:
        after = ", then a tenth of its peak" if scheduled < config.steps else ""
        lines.append(f"learning rate: that of a run of {scheduled} steps{after} (--schedule-steps)")
    if isinstance(stream, TokenStream) and stream.end is None:
        lines.insert(2, "no end token: the model's files name none, so each document begins right after another")
    return "\n".join(lines)


def _report(setup: Setup, variables: Tree, log: MetricsLog) -> None:
    """Leaves the figure and a sample, and prints the sample and the final line."""
    corpus, config, unit = setup.corpus, setup.config, setup.corpus.stream.unit
    title = (
        f"{config.preset}: {setup.num_parameters / 1e6:,.1f} million parameters, "
        f"{config.steps:,} steps of {config.batch_size} × {config.sequence_length:,} {unit}"
    )
    plot(log.records, setup.unigram_bits, title, setup.out / "training.png")

    prompt = corpus.stream.read(corpus.training_units, min(_PROMPT, config.sequence_length))
    key = jax.random.key(config.seed)
    model = make_model(config)  # of one device
    text = generate(model, variables, prompt, _SAMPLE, config.sequence_length, key, corpus.stream.decode)
    (setup.out / "sample.txt").write_text(text, encoding="utf-8")

    held_out = log.records[-1]["held_out"]
    print(f"sample, after the first {len(prompt)} {unit}:\n{text}\n")
    print(f"final: held-out {held_out:.3f} bits/byte, unigram {setup.unigram_bits:.3f} bits/byte")
