"""Times each part of a training step on a GPU and says what the part could reach.

Nothing is saved but what `--json` and `--plot` name.
"""

import argparse
import json
import sys
from pathlib import Path

from blaze_jax.benchmark.device_trace import TraceError
from blaze_jax.benchmark.environment import describe, environment
from blaze_jax.benchmark.results_file import command_line
from train_example.compare_layers import add_options, configuration
from train_example.config import UserError
from train_example.profile_step.measure import measure
from train_example.profile_step.report import print_report
from train_example.program.devices import allow_all_memory


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    arguments = _parse(argv)
    allow_all_memory()
    values = environment()
    print(describe(values), flush=True)
    try:
        record = measure(configuration(arguments, arguments.experts_layer), arguments.traced)
    except (UserError, TraceError, NotImplementedError) as error:
        print(f"profile_step: {error}", file=sys.stderr)
        return 2
    print_report(record)
    command = command_line("train_example.profile_step", sys.argv[1:] if argv is None else argv)
    content = {"environment": values, "command": command, "records": [record]}
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if arguments.plot is not None:
        from train_example.profile_step.plot import plot

        plot(content, arguments.plot)
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m train_example.profile_step", description=__doc__)
    add_options(parser)
    add = parser.add_argument
    add("--experts-layer", default="blaze_jax", help="what computes the experts (blaze_jax)")
    add("--traced", type=int, default=5, metavar="STEPS", help="steps under the profiler (5)")
    add("--json", type=Path, metavar="FILE", help="write the result")
    add("--plot", type=Path, metavar="FILE", help="draw it as a PNG file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
