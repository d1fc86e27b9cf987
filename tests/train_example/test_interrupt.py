"""Signals as requests to stop."""

import os
import signal
import subprocess
import sys

import pytest

from tests.train_example.small import ROOT
from train_example.program.run import Interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_is_a_request_and_arms_the_second(number, capfd):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Interrupt() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), number)
        assert interrupt.requested
        assert "once more to stop at once" in capfd.readouterr().err
        assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


PROGRAM = """
import time
from train_example.program.run import Interrupt
with Interrupt() as interrupt:
    print("ready", flush=True)
    while not interrupt.requested:
        time.sleep(0.01)
    print("asked to stop", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_ends_the_program_at_once(number):
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        for expected in ("ready\n", "asked to stop\n"):
            assert process.stdout.readline() == expected
            process.send_signal(number)
        assert process.wait(timeout=30) == -number
