"""What the README tells a user to paste runs."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp

import blaze_jax
import blaze_jax.profiler
from blaze_jax.benchmark.inputs import expert_inputs, forward_and_backward
from blaze_jax.benchmark.plots import draw
from blaze_jax.benchmark.readme import END, render, split_readme
from blaze_jax.benchmark.results_file import RECORDED, read_results
from blaze_jax.benchmark.sizes import Sizes
from tests.numerics import assert_close

README = Path(__file__).parents[1] / "README.md"


def test_the_flax_example_runs():
    example = re.search(r"```python\n(import flax.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    names = {}
    exec(example[1], names)
    assert names["y"].shape == names["x"].shape
    assert jnp.isfinite(names["loss"])


def test_the_data_parallel_recipe_gives_the_gradient_of_one_device():
    example = re.search(r"```python\n(from functools import partial\nimport jax.*?)```", README.read_text(), re.DOTALL)
    assert example is not None
    names = {}
    exec(example[1], names)
    assert names["mesh"].size == jax.device_count() > 1

    def loss(params, x):
        y, routing = blaze_jax.moe(x, params, names["config"], train=True)
        return jnp.square(y).mean() + sum(routing.weighted_losses.values())

    expected = jax.jit(jax.value_and_grad(loss))(names["params"], names["x"])
    assert_close((names["value"], names["gradient"]), expected)


def test_the_functions_example_runs():
    (example,) = re.findall(r"```python\n(params = blaze_jax\.init.*?)```", README.read_text(), re.DOTALL)
    config = blaze_jax.MoEConfig(num_experts=32, experts_per_token=8, expert_width=4)
    weights = {f"w_{name}": jnp.ones((32, 4, 4)) for name in ("gate", "up", "down")}
    names = {"blaze_jax": blaze_jax, "jax": jax, "config": config, "width": 4, "x": jnp.ones((16, 4)), **weights}
    exec(example, names | {"logits": jnp.zeros((16, 32)), "bias": jnp.zeros(32)})


def test_the_two_commands_are_single_lines():
    commands = re.findall(r"```bash\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert [c.strip().split()[-1] for c in commands] == ["train_example", ".venv/bin/pytest"]
    assert all(len(c.strip().splitlines()) == 1 for c in commands)


def test_the_results_are_those_of_the_files_and_no_others():
    text = README.read_text(encoding="utf-8")
    before, block = split_readme(text)
    recorded = [read_results(path) for path in sorted(RECORDED.glob("*.json"))]
    assert block.strip("\n") == render(recorded)
    elsewhere = re.sub(r"```.*?```", "", before + text.split(END, 1)[1], flags=re.DOTALL)
    measured = re.findall(r"\d[\d.,]*\s?(?:ms|µs|us|[TG]FLOP/s|[TG]B/s|MiB/s|GiB|tokens/s)\b", elsewhere)
    assert measured == []


def test_every_figure_of_results_is_drawn_of_a_file(tmp_path):
    _, text = split_readme(README.read_text(encoding="utf-8"))
    shown = re.findall(r"!\[[^\]]*\]\((blaze_jax/benchmark/results/[^)]+\.png)\)", text)
    on_disk = sorted(str(path.relative_to(README.parent)) for path in RECORDED.glob("*.png"))
    assert sorted(shown) == on_disk
    if on_disk:
        recorded = [read_results(path) for path in sorted(RECORDED.glob("*.json"))]
        assert sorted(path.name for path in draw(recorded, tmp_path)) == [Path(name).name for name in on_disk]


def test_the_memory_profiler_example_runs(capsys, tmp_path, monkeypatch):
    (example,) = re.findall(
        r"```python\n(import blaze_jax\.profiler.*?)```", README.read_text(encoding="utf-8"), re.DOTALL
    )
    monkeypatch.chdir(tmp_path)
    sizes = Sizes(16, 8, 8, 4, 2)
    inputs = expert_inputs(sizes, jnp.float32)
    step = jax.jit(forward_and_backward(blaze_jax.expert_ffn))
    names = {"blaze_jax": blaze_jax, "train_step": lambda inputs, dy: step(*inputs, dy), "state": inputs}
    exec(example, names | {"batch": inputs[0]})
    assert "gate" in capsys.readouterr().out
    assert (tmp_path / "memory.png").exists()
