"""What a reader pastes from the documents runs, and does what the text around it says."""

import re
import shutil
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import blaze_jax
from docs.write_benchmarks import DOCS, README, RESULTS, recorded_results, written
from tests.blaze_jax.checkpoints.models import FIXTURES
from tests.numerics import assert_close, assert_same_bits

PAGES = {path.stem: path for path in (README, *DOCS.glob("*.md"))}
WITH_CODE = {name for name, path in PAGES.items() if "```python" in path.read_text(encoding="utf-8")}
WITH_OWN_TEST = {"README", "adapters", "checkpoints", "example", "fp8", "memory", "routers", "sharding", "tutorial"}


@cache
def run(page: str, folder: Path) -> dict:
    """The names that a page's blocks leave, pasted into one file."""
    blocks = re.findall(r"```python\n(.*?)```", PAGES[page].read_text(encoding="utf-8"), re.DOTALL)
    names = {"__name__": page}
    exec("\n".join(blocks), names)
    return names


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pasted")


@pytest.fixture(autouse=True)
def in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(WITH_CODE - WITH_OWN_TEST))
def test_the_code_runs(page, folder, capsys):
    assert run(page, folder)


def test_the_readme_uses_the_layer(folder):
    names = run("README", folder)
    assert names["y"].shape == names["x"].shape
    assert jnp.isfinite(names["loss"])


@pytest.mark.slow
def test_adapters_are_trained(folder):
    names = run("adapters", folder)
    assert names["history"][-1] < 0.95 * names["history"][0]
    assert names["merged"].keys() == names["base"].keys()
    assert_same_bits(names["again"], names["adapters"])
    frozen = [name for name in names["params"] if "lora" not in name]
    assert not any(jax.tree.leaves(names["linen_gradient"]["block"][name]) for name in frozen)


@pytest.mark.slow
def test_the_page_on_products_in_8_bits_says_that_its_layer_is_too_small_for_them(folder):
    with pytest.warns(UserWarning, match="less than 65536 rows .* are faster so, and these have 2048"):
        names = run("fp8", folder)
    assert all(jnp.isfinite(gradient).all() for gradient in jax.tree.leaves(names["gradients"]))
    assert names["y"].shape == (2048, 1024)


def test_the_platforms_export_for_a_gpu_and_a_cpu(folder):
    names = run("platforms", folder)
    assert names["export"].deserialize(names["saved"]).platforms == ("cuda", "cpu")
    assert_same_bits(names["y"], names["layer"](names["params"], names["x"]))


@pytest.mark.slow
def test_the_tutorial_trains(folder):
    names = run("tutorial", folder)
    assert names["history"][-1] < 0.75 * names["history"][0]
    assert names["load"].sum() == 2 * 256
    assert names["y"].shape == names["x"].shape


@pytest.mark.slow
def test_all_ways_to_shard_give_the_gradient_of_one_device(folder):
    names = run("sharding", folder)
    assert names["mesh"].size == jax.device_count() > 1
    expected = jax.jit(jax.value_and_grad(names["whole_loss"]))(names["params"], names["x"])
    assert_close((names["value"], names["gradient"]), expected)
    assert_close((names["value_over_devices"], names["gradient_over_devices"]), expected)
    assert names["split"].sharding.spec[0] == "data"
    placed = (
        *names["at_rest"].values(),
        *names["moments"][0].mu.values(),
        *jax.tree.leaves(nnx.state(names["nnx_optimizer"])),
    )
    for array in jax.tree.leaves(placed):
        assert array.addressable_shards[0].data.size * (jax.device_count() if array.ndim else 1) == array.size
    with jax.set_mesh(names["split"].sharding.mesh):
        assert_close(jax.jit(jax.value_and_grad(names["whole_loss"]))(names["shared"], names["split"]), expected)


@pytest.mark.slow
def test_a_checkpointed_block_has_the_same_gradient_and_a_profile(folder, capsys):
    names = run("memory", folder)

    def loss(params):
        return (names["x"] + blaze_jax.moe(jnp.tanh(names["x"]), params, names["config"])[0]).sum()

    assert_close(names["gradients"], jax.jit(jax.grad(loss))(names["params"]))
    assert (folder / "memory.png").exists()
    names["profiler"].summary()
    assert "gate" in capsys.readouterr().out


@pytest.mark.slow
def test_the_routers_page_moves_the_bias(folder):
    names = run("routers", folder)
    assert_same_bits(names["recorded"]["routing"]["experts"], names["chosen"])
    assert abs(names["bias"]).max() > 0


@pytest.mark.slow
def test_the_checkpoints_page_reads_and_writes_a_layer(folder):
    shutil.copytree(FIXTURES / "qwen3_moe", folder / "Qwen3-30B-A3B")
    names = run("checkpoints", folder)
    written = blaze_jax.checkpoints.load(folder / "my-layers", 0, names["config"])
    assert_same_bits(written.params, names["trained"].params)
    assert names["y"].shape == names["x"].shape


def test_the_two_commands_of_the_readme_are_single_lines():
    commands = re.findall(r"```bash\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert [c.strip().split()[-1] for c in commands] == ["train_example", ".venv/bin/pytest"]
    assert all(len(c.strip().splitlines()) == 1 for c in commands)


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 130


@pytest.mark.parametrize("page", ["README", "benchmarks"])
def test_the_results_are_those_of_the_files(page):
    text = PAGES[page].read_text(encoding="utf-8")
    assert written(text, recorded_results()) == text
    assert "<!-- results: " in text


def test_nothing_measured_is_written_by_hand():
    for name in sorted(set(PAGES) - {"performance", "performance_log"}):
        text = PAGES[name].read_text(encoding="utf-8")
        text = re.sub(r"<!-- results.*?<!-- end of results -->|```.*?```", "", text, flags=re.DOTALL)
        measured = re.findall(r"\d[\d.,]*\s?(?:ms|µs|us|[TG]FLOP/s|[TG]B/s|MiB/s|GiB|tokens/s)\b", text)
        assert measured == [], name


def test_every_figure_is_shown_and_every_link_leads_somewhere():
    shown = set()
    for path in PAGES.values():
        text = path.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            if not target.startswith("http"):
                assert (path.parent / target).exists(), (path.name, target)
                shown.add((path.parent / target).resolve())
    assert {path.resolve() for path in (*RESULTS.glob("*.png"), *DOCS.glob("*.png"), *DOCS.glob("*.svg"))} <= shown
