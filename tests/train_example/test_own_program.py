"""The files that one copies to build one's own: few, short, with public names alone; and the page's program runs."""

import ast
import io
import re
import sys
import tokenize
import tomllib

import pytest

import blaze_jax
from tests.train_example.small import ROOT

PROGRAMS = ("__main__", "compare_layers", "compare_precisions", "profile_step")
CORE = sorted(path for path in (ROOT / "train_example").glob("*.py") if path.stem not in PROGRAMS)
"""All that is not in a folder beside; the programs open what is."""
PUBLIC = {"flax", "jax", "jaxtyping", "numpy", "optax"}


def lines_of_code(source):
    """How many lines hold code, not only comments, docstrings or nothing."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def test_model_step_data_and_loop_are_some_700_lines_in_eight_files():
    assert len(CORE) <= 8
    assert sum(lines_of_code(path.read_text()) for path in CORE) <= 725


def test_they_use_what_an_import_of_blaze_jax_offers():
    own = {f"train_example.{path.stem}" for path in CORE}
    for path in CORE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= PUBLIC | sys.stdlib_module_names, path
            if isinstance(node, ast.ImportFrom):
                package = node.module.split(".")[0]
                if package == "blaze_jax":
                    assert node.module == package, path
                    assert {alias.name for alias in node.names} <= set(blaze_jax.__all__), path
                else:
                    assert package in PUBLIC | sys.stdlib_module_names or node.module in own, (path, node.module)


@pytest.mark.slow
def test_the_pages_program_of_ones_own_trains_and_generates(capsys):
    training, generation, replay = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "example.md").read_text(), re.DOTALL
    )
    names = {}
    exec(training, names)
    losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < losses[0] - 0.5
    exec(generation, names)
    assert len(capsys.readouterr().out.splitlines()) == 2
    exec(replay, names)
    loss, gradient = map(float, capsys.readouterr().out.split())
    assert loss != 0
    assert gradient > 0


def test_the_wheel_has_no_example():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert {name.split(".")[0] for name in packages} == {"blaze_jax", "pallas_kernels"}
