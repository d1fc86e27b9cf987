"""Layers back to back in turns, the record they leave, and SonicMoE on a stand-in for PyTorch."""

import importlib
import time
from unittest.mock import MagicMock

import jax.numpy as jnp
import pytest

from blaze_jax.benchmark import layers
from blaze_jax.benchmark.back_to_back import take_turns
from blaze_jax.benchmark.layers import Candidate, Limits, compare
from blaze_jax.benchmark.peers import DENSE_DISPATCH, SONICMOE
from blaze_jax.benchmark.sizes import BOTH, PASSES, Sizes
from blaze_jax.benchmark.sonicmoe import TILES, _try_fewer
from blaze_jax.benchmark.tables import terminal
from blaze_jax.benchmark.timing import Timing

SIZES = Sizes(16, 8, 4, 3, 2)


def test_calls_take_turns_and_each_turn_lasts():
    began, spans = time.perf_counter(), {"quick": [], "slow": []}

    def call(name, seconds):
        def run():
            time.sleep(seconds)
            spans[name].append(time.perf_counter() - began)
            return jnp.zeros(())

        return run

    calls = {"quick": call("quick", 0.002), "slow": call("slow", 0.006)}
    times = take_turns(calls, turns=3, seconds=0.06, gauge=lambda: (1400.0, 690.0))
    for row in times.values():
        assert (len(row["samples_us"]), row["mhz"], row["watts"]) == (3, 1400.0, 690.0)
    assert 2 < times["slow"]["us"] / times["quick"]["us"] < 3.5
    order = sorted((at, name) for name in spans for at in spans[name])
    turns = [name for i, (_, name) in enumerate(order) if i == 0 or order[i - 1][1] != name]
    assert turns == ["quick", "slow"] * 4  # once before, to compile, and three turns
    assert len(spans["quick"]) * times["quick"]["us"] > 3 * 0.075e6  # 0.06 s, and most of a third before


def stand_in(missing=""):
    """Modules in place of those of SonicMoE and PyTorch, but for one that is missing."""
    torch = MagicMock(__version__="2.0+cu130")
    torch.from_dlpack = lambda array: MagicMock(shape=array.shape)
    functional = MagicMock()
    functional._UpProjection.apply.return_value = "hidden", "kept"
    modules = {"torch": torch, "sonicmoe": MagicMock(__version__="0.1"), "sonicmoe.functional": functional}

    def import_module(name):
        if name == missing:
            raise ImportError(f"No module named '{name}'", name=name)
        return modules.setdefault(name, MagicMock())

    return modules, import_module


def measured(monkeypatch, import_module):
    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.setattr(layers, "take_turns", lambda calls, turns, **_: take_turns(calls, turns=turns, seconds=0.01))
    return compare(SIZES, jnp.dtype("float32"), peers=[DENSE_DISPATCH, SONICMOE], repeats=1, turns=2)


@pytest.mark.slow
def test_the_record_has_ratios_and_what_the_table_shows(monkeypatch):
    modules, import_module = stand_in()
    record = measured(monkeypatch, import_module)
    ours, dense, sonic = record["layers"]
    assert (sonic["layer"], sonic["backend"]) == (SONICMOE, "0.1, torch 2.0")
    for row in (ours, dense, sonic):
        assert row["status"] == "ok"
        for name, factor in PASSES.items():
            run, our_run = row[name]["sustained"], ours[name]["sustained"]
            assert len(run["samples_us"]) == 2
            assert run["ratio_to_ours"] == pytest.approx(run["us"] / our_run["us"])
            assert run["tflops"] == pytest.approx(factor * SIZES.forward_flops / run["us"] / 1e6)
    shown = terminal(record)
    assert "SonicMoE (0.1, torch 2.0)" in shown
    assert "back to back), copy" in shown
    assert modules["torch"].cuda.synchronize.called  # jax waits for what PyTorch computes


def test_a_peer_may_tune_itself_in_its_first_call():
    calls = iter([0.1, 0.0])
    peer = Candidate(SONICMOE, "", calls={BOTH: lambda: time.sleep(next(calls))})
    peer.prepare(BOTH, SIZES, Limits(seconds=0.05))
    assert peer.status == "ok"
    assert peer.first_us[BOTH] < 0.05e6


@pytest.mark.slow
def test_a_time_of_another_clock_is_not_compared(monkeypatch):
    def time_calls(calls, repeats):
        return {name: Timing("wall" if name == SONICMOE else "device", [1.0], {}, "why") for name in calls}

    monkeypatch.setattr(layers, "time_calls", time_calls)
    ours, _, sonic = measured(monkeypatch, stand_in()[1])["layers"]
    assert ours[BOTH]["us"] == 1.0
    assert sonic[BOTH].keys() == {"note", "sustained"}


@pytest.mark.slow
def test_a_peer_that_is_not_there_or_fails_has_a_reason(monkeypatch):
    _, import_module = stand_in(missing="sonicmoe.functional")
    (*_, sonic) = measured(monkeypatch, import_module)["layers"]
    assert sonic["status"].startswith("SonicMoE cannot be imported: No module named")
    modules, import_module = stand_in()
    modules["torch"].autograd.grad.side_effect = RuntimeError("RESOURCE_EXHAUSTED: or so")
    (*_, sonic) = measured(monkeypatch, import_module)["layers"]
    assert sonic["status"].startswith("out of memory: RuntimeError")


def test_its_tuner_tries_fewer_tiles_where_they_can_serve():
    def config(*fields, swap_ab=False):
        names = "tile_m", "tile_n", "pingpong", "cluster_m", "cluster_n"
        tiles = MagicMock(**dict(zip(names, fields, strict=True)), swap_ab=swap_ab)
        return MagicMock(all_kwargs=lambda: {"config": tiles})

    class Autotuner:
        def prune_configs(self, arguments):
            return arguments

    good, other = config(*min(TILES)), config(64, 64, False, 1, 1)
    autotuner = MagicMock(Autotuner=Autotuner)
    for _ in range(2):
        _try_fewer(autotuner)
    assert Autotuner().prune_configs([good, other, config(*min(TILES), swap_ab=True)]) == [good]
    assert Autotuner().prune_configs([other]) == [other]
