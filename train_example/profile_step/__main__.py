"""Times each part of a training step on a GPU and says what the part could reach.

Nothing is saved but what `--json` and `--plot` name.
"""

import argparse
import sys
from pathlib import Path

from blaze_jax.benchmark.results import ResultsFile, command_line, describe, environment
from blaze_jax.benchmark.tables import terminal
from blaze_jax.benchmark.timing import TraceError
from train_example.config import UserError
from train_example.profile_step.measure import measure
from train_example.profile_step.run import add_options, configuration, count
from train_example.program.devices import allow_all_memory


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parse(argv)
    allow_all_memory()
    try:
        file = ResultsFile(arguments.json, environment(), command_line("train_example.profile_step", argv))
        print(describe(file.content["environment"]), flush=True)
        file.add(measure(configuration(arguments, arguments.experts_layer), arguments.traced))
    except (UserError, TraceError, NotImplementedError, ValueError) as error:
        print(f"profile_step: {error}", file=sys.stderr)
        return 2
    print(terminal(file.content["records"][0]))
    if arguments.plot is not None:
        from blaze_jax.benchmark.plots import draw_one  # needs matplotlib

        draw_one(file.content, arguments.plot)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m train_example.profile_step", description=__doc__)
    add_options(parser)
    add = parser.add_argument
    add("--experts-layer", default="blaze_jax", help="what computes the experts (blaze_jax)")
    add("--traced", type=count, default=5, metavar="STEPS", help="steps under the profiler (5)")
    add("--json", type=Path, metavar="FILE", help="write the result")
    add("--plot", type=Path, metavar="FILE", help="draw it as a PNG file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
