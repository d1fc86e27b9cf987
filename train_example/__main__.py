"""`python -m train_example`."""

import io
import sys

from train_example.arguments import new_config, parse_arguments
from train_example.errors import UserError
from train_example.memory import allow_all_memory
from train_example.plan import memory_plan, plan_text
from train_example.train import run

_USER_ERROR = 2
_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a sample may have characters that the terminal lacks
    try:
        arguments = parse_arguments(argv)
        if arguments.compile_only:
            config = new_config(arguments.options)
            print(plan_text(config, memory_plan(config)))
            return 0
        allow_all_memory()
        run(arguments)
    except UserError as error:
        print(f"train_example: {' '.join(str(error).split())}", file=sys.stderr)
        return _USER_ERROR
    except KeyboardInterrupt:  # outside the training loop, which takes it as a request
        return _INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
