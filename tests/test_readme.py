"""What the README tells a user to paste runs."""

import re
from pathlib import Path

import jax.numpy as jnp

README = Path(__file__).parents[1] / "README.md"


def test_the_flax_example_runs():
    example = re.search(r"```python\n(import flax.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    names = {}
    exec(example[1], names)
    assert names["y"].shape == names["x"].shape
    assert jnp.isfinite(names["loss"])


def test_the_two_commands_are_single_lines():
    commands = re.findall(r"```bash\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert [c.strip().split()[-1] for c in commands] == ["train_example", ".venv/bin/pytest"]
    assert all(len(c.strip().splitlines()) == 1 for c in commands)
