"""What a run shows while it trains: a bar on a terminal, and a line per evaluation everywhere."""

import sys
from contextlib import AbstractContextManager

from tqdm import tqdm

from train_example.metrics import Record


class Progress(AbstractContextManager):
    """A live bar on stderr where that is a terminal, and lines on stdout that do not disturb it."""

    def __init__(self, first_step: int, steps: int):
        self._bar = tqdm(
            desc="compiling",
            total=steps,
            initial=first_step,
            unit="step",
            file=sys.stderr,
            disable=None,  # unless it is a terminal
            dynamic_ncols=True,
        )

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def start(self) -> None:
        """Starts the clock of the bar; before that it says that the program compiles."""
        self._bar.set_description_str("")
        self._bar.unpause()

    def update(self, record: Record) -> None:
        """Shows a step's metrics."""
        self._bar.set_postfix_str(_summary(record), refresh=False)
        self._bar.update()
        if "held_out" in record:
            self.say(f"step {record['step']}: {_summary(record)}, held-out {record['held_out']:.3f}")

    def say(self, text: str) -> None:
        """Prints a line on stdout."""
        self._bar.write(text, file=sys.stdout)
        sys.stdout.flush()


def _summary(record: Record) -> str:
    return (
        f"loss {record['loss']:.3f}, {record['tokens_per_second']:,.0f} tokens/s, "
        f"busiest expert {record['balance']:.2f}× its share"
    )
