"""A run from start to end."""

import shlex
from contextlib import closing

import jax

from train_example.arguments import Arguments
from train_example.interrupt import Interrupt
from train_example.loop import train
from train_example.metrics import MetricsLog
from train_example.plot import plot
from train_example.progress import Progress
from train_example.sample import generate
from train_example.setup import Setup, make_model, prepare
from train_example.step import TrainState

_PROMPT_BYTES = 64
_SAMPLE_BYTES = 512


def run(arguments: Arguments) -> None:
    """Trains, or goes on training, and leaves metrics, checkpoints, a figure and a sample in the run's folder.

    Raises:
      UserError: the input does not fit, or training diverged.
    """
    setup = prepare(arguments)
    steps = setup.config.steps
    metrics = setup.out / "metrics.jsonl" if jax.process_index() == 0 else None
    with closing(setup.checkpoints), MetricsLog(metrics, setup.first_step) as log:
        print(_introduction(setup), flush=True)
        with Interrupt() as interrupt, Progress(setup.first_step, steps) as progress:
            state = train(setup, log, progress, interrupt)
        done = int(state.step)
        if done == steps:
            _report(setup, state, log)
        else:
            command = f"python -m train_example --resume --out {shlex.quote(str(setup.out))}"
            print(f"stopped after step {done} of {steps}; go on with: {command}")


def _introduction(setup: Setup) -> str:
    config = setup.config
    start = f"from step {setup.first_step} " if setup.first_step else ""
    return (
        f"{config.preset}: {setup.num_parameters / 1e6:,.1f} million parameters in {config.dtype} arithmetic\n"
        f"text: {len(setup.corpus.stream):,} bytes, the last {setup.corpus.held_out_bytes:,} of them held out\n"
        f"training {start}to step {config.steps}, losses in bits per byte, results in {setup.out}"
    )


def _title(setup: Setup) -> str:
    config = setup.config
    return (
        f"{config.preset}: {setup.num_parameters / 1e6:,.1f} million parameters, "
        f"{config.steps:,} steps of {config.batch_size} × {config.sequence_length:,} bytes"
    )


def _report(setup: Setup, state: TrainState, log: MetricsLog) -> None:
    """The figure, a sample, and the final line."""
    corpus, config = setup.corpus, setup.config
    variables = setup.devices.whole({"params": state.params, "router_state": state.router_state})
    if jax.process_index():
        return
    plot(log.records, corpus.unigram_bits, _title(setup), setup.out / "training.png")

    prompt = corpus.stream.read(corpus.training_bytes, min(_PROMPT_BYTES, config.sequence_length)).tobytes()
    key = jax.random.key(config.seed)
    text = generate(make_model(config), variables, prompt, _SAMPLE_BYTES, config.sequence_length, key)
    (setup.out / "sample.txt").write_text(text, encoding="utf-8")

    held_out = log.records[-1]["held_out"]
    print(f"sample, after the first {len(prompt)} bytes:\n{text}\n")
    print(f"final: held-out {held_out:.3f} bits/byte, unigram {corpus.unigram_bits:.3f} bits/byte")
