"""`python -m train_example` with a preset "tiny" that is small enough for tests."""

import runpy

from tests.train_example.small import CONFIG
from train_example.program.presets import PRESETS

PRESETS["tiny"] = CONFIG
runpy.run_module("train_example", run_name="__main__")
