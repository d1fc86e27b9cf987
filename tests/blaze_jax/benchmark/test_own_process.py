"""A function in a process of its own: its result, and how it failed."""

import os
import signal
import time

import pytest

from blaze_jax.benchmark.own_process import ProcessError, how_it_ended, run_apart


@pytest.mark.slow
def test_a_result_and_an_error_come_back(capfd):
    assert run_apart(divmod, 7, 2) == (3, 1)
    with pytest.raises(ProcessError, match=r"^ZeroDivisionError: .*zero"):
        run_apart(divmod, 7, 0)
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.slow
def test_a_process_that_dies_or_drags_on_says_how():
    with pytest.raises(ProcessError, match=r"^was killed, as the system does when memory runs out"):
        run_apart(kill_yourself)
    with pytest.raises(ProcessError, match=r"^took longer than 0\.1 s$"):
        run_apart(time.sleep, 60, seconds=0.1)
    assert how_it_ended(-signal.SIGSEGV) == "was ended by signal 11"
    assert how_it_ended(3) == "ended with status 3"


def kill_yourself():
    os.kill(os.getpid(), signal.SIGKILL)
