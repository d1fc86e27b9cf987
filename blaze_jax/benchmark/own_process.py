"""Runs a function in a process of its own, whose memory, devices and death are not the caller's."""

import multiprocessing
import signal
import traceback
from collections.abc import Callable
from typing import Any


class ProcessError(RuntimeError):
    """A process ended without a result; the message says how, in a line."""


def run_apart(function: Callable, *arguments: Any, seconds: float | None = None) -> Any:
    """The result of `function(*arguments)`, computed by a new process.

    Args:
      function: a module's own; it, its arguments and its result are pickled.
      arguments: its arguments.
      seconds: after which the process is ended; None for as long as it takes.

    Raises:
      ProcessError: the function raised, the process died, or the time was over.
    """
    context = multiprocessing.get_context("spawn")
    answer, end = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(end, function, arguments))
    process.start()
    end.close()
    try:
        if not answer.poll(seconds):
            raise ProcessError(f"took longer than {seconds:g} s")
        result, problem = answer.recv()
    except EOFError:
        process.join()
        raise ProcessError(how_it_ended(process.exitcode or 0)) from None
    finally:
        process.kill()  # it is done, or shall be
        process.join()
    if problem:
        raise ProcessError(problem)
    return result


def how_it_ended(status: int) -> str:
    """The exit status of a process, negative for a signal, in words."""
    if -status == signal.SIGKILL:
        return "was killed, as the system does when memory runs out: choose smaller sizes"
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


def _answer(end, function: Callable, arguments: tuple) -> None:
    try:
        answer = function(*arguments), ""
    except Exception as error:
        traceback.print_exc()
        answer = None, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    end.send(answer)
