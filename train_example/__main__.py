"""`python -m train_example`."""

import errno
import io
import os
import sys

import jax

from train_example.config import UserError
from train_example.program.arguments import new_config, parse_arguments
from train_example.program.devices import allow_all_memory
from train_example.program.model import memory_plan
from train_example.program.run import run

_USER_ERROR = 2
_LOST = 3
_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a sample may have characters that the terminal lacks
    arguments = None
    try:
        arguments = parse_arguments(argv)
        if arguments.compile_only:
            print(memory_plan(new_config(arguments.options), arguments.compile_only))
            return 0
        allow_all_memory()
        if arguments.cluster is not None:
            arguments.cluster.join()
        run(arguments)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = error.filename or "a file of the run"
        print(f"train_example: {where} cannot be written: {error.strerror}; make room, then --resume", file=sys.stderr)
        return _USER_ERROR
    except UserError as error:
        print(f"train_example: {' '.join(str(error).split())}", file=sys.stderr)
        return _USER_ERROR
    except jax.errors.JaxRuntimeError as error:
        if arguments is None or arguments.cluster is None:
            raise
        # Ended at once: the others would wait for a process that is lost, and jax for all of them.
        reason = " ".join(str(error).split())[:300]
        message = f"this process cannot go on, perhaps another one is lost; start all again with --resume ({reason})"
        print(f"train_example: {message}", file=sys.stderr, flush=True)
        os._exit(_LOST)
    except KeyboardInterrupt:  # outside the training loop, which takes it as a request
        return _INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
