"""The tuner: candidates that differ and lower, trials with other bits or failures left out, and the command."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from blaze_jax import expert_ffn, tune
from blaze_jax.benchmark.sizes import Sizes, abstract_inputs, forward_and_backward
from blaze_jax.benchmark.timing import KernelTotal, Timing
from blaze_jax.implementation import FAMILIES, demanded_family
from blaze_jax.tune import (
    Found,
    candidates,
    choose,
    compare,
    compile_trials,
    kernel_us,
    line,
    main,
    mma_candidates,
    orders,
    trials,
)
from pallas_kernels.compile_only import compile_for_gpu, kernel_texts
from pallas_kernels.mosaic.device import compute_capability
from pallas_kernels.mosaic.interpreter import interpreted
from pallas_kernels.tuning import read_tunings, tried
from pallas_kernels.tuning.parameters import (
    KINDS,
    MMA,
    ColumnBlock,
    MmaTuning,
    TileTuning,
    mma_heuristic,
    nvidia_gpu,
)

INPUTS = abstract_inputs(Sizes(1000, 1024, 512, 8, 4), jnp.bfloat16)
SHAPE = "rows=2^12,d=1024,n=512,E=8,bfloat16"
FAMILY_KERNELS = {
    "hopper": {name for name in KINDS if not name.startswith(MMA)},
    "ampere": {name for name in KINDS if name.startswith(MMA)},
}


def layer(*arguments):
    return forward_and_backward(partial(expert_ffn, implementation="mosaic_gpu"))(*arguments)


def texts_of_kernels(trial):
    with tried(trial):
        run = jax.jit(lambda *arguments: layer(*arguments)).trace(*INPUTS, INPUTS[0])
        return set(kernel_texts(run.lower(lowering_platforms=("cuda",))))


@pytest.mark.slow
@pytest.mark.ci_cases("ampere")
@pytest.mark.parametrize("family", FAMILY_KERNELS)
def test_trials_of_a_layer_lower_and_every_kernel_in_them_is_another(family):
    with demanded_family(family):
        with tried({}) as seen:
            jax.eval_shape(lambda *arguments: layer(*arguments), *INPUTS, INPUTS[0])
        assert seen.shapes == dict.fromkeys(FAMILY_KERNELS[family], SHAPE)
        made = trials({kernel: candidates(kernel, SHAPE)[:2] for kernel in seen.shapes})
        assert len(made) == (2 if family == "ampere" else 3)  # with column blocks by themselves
        rules, others = (texts_of_kernels(trial) for trial in made[:2])
    assert len(others - rules) >= 6
    assert len(rules & others) < 5  # the combine and the dispatch have nothing to tune


@pytest.mark.slow
@pytest.mark.compile_only
def test_tuned_kernels_fit_shared_memory_and_registers():
    tuned = {name for name, kind in KINDS.items() if kind is TileTuning}
    with tried(dict.fromkeys(tuned, TileTuning(minor_dim=1, tile_width=8))), demanded_family("hopper"):
        program = compile_for_gpu(layer, *INPUTS, INPUTS[0])
    assert {name for name in tuned if any(name in kernel.name for kernel in program.kernels)} == tuned
    assert program.spill_bytes == {}


@pytest.mark.parametrize(
    ("capability", "dtype", "most"), [("8.0", "bfloat16", 163), ("8.6", "bfloat16", 99), ("9.0", "float32", 227)]
)
def test_candidates_for_ampere_fit_the_gpu(monkeypatch, capability, dtype, most):
    monkeypatch.setattr("pallas_kernels.tuning.parameters.compute_capability", lambda: capability)
    default = mma_heuristic("mma_up_projection", dtype)
    found = mma_candidates(default, dtype)
    assert found[0] == default
    assert len({*found}) == len(found) > 3
    assert max(t.shared_bytes for t in found) <= most * 1024
    assert dtype != "float32" or {t.k_step for t in found} == {64}
    assert {t.abreast for t in found} == {1, 4, 8, 16}


def test_orders_that_come_to_the_same_are_tried_once():
    default = TileTuning()
    assert orders(default, 1000, 1) == orders(default, 1, 9) == (default,)
    along_columns = [t.tile_width for t in orders(default, 1000, 2) if t.minor_dim == 1]
    assert along_columns == [8, 1]  # 8, 4 and 16 cut two columns alike
    assert len(orders(default, 1000, 100)) == 8
    assert orders(default, 1000, 100)[0] == default


UP, DOWN = "up_projection", "down_backward"
DEFAULT, SAME, WRONG, BROKEN = (TileTuning(tile_width=width) for width in (1, 2, 4, 8))
CHOICES = {UP: (DEFAULT, SAME, WRONG), DOWN: (DEFAULT, SAME), "column_block": (ColumnBlock(), ColumnBlock(256))}


def test_a_trial_changes_every_kernel_that_has_a_candidate_left_and_column_blocks_alone():
    rules = {UP: DEFAULT, DOWN: DEFAULT, "column_block": ColumnBlock()}
    assert trials(CHOICES) == [
        rules,
        rules | {UP: SAME, DOWN: SAME},
        rules | {UP: WRONG},
        rules | {"column_block": ColumnBlock(256)},
    ]


def compiled(*tunings, seconds=60.0):
    """Programs whose result depends on what the up projection has."""
    wanted = iter(tunings)

    def made():
        tuning = next(wanted)
        if tuning == BROKEN:
            raise NotImplementedError("cannot be lowered")
        return lambda x: x + (tuning == WRONG)

    return compile_trials(made, (jnp.ones(5),), [{UP: t} for t in tunings], seconds, lambda what: None)


def test_other_bits_and_failures_are_left_out():
    programs, notes = compiled(DEFAULT, SAME, WRONG, BROKEN)
    found = compare(programs, (jnp.ones(5),), {UP: (DEFAULT, SAME, WRONG, BROKEN)}, {UP: "s"}, 2, print, notes)[UP]
    assert found.tried == 2
    assert found.tuning in (DEFAULT, SAME)
    assert 0 < found.us <= found.heuristic_us
    assert f"{UP}: {BROKEN} does not compile: NotImplementedError: cannot be lowered" in notes
    assert any(note.startswith(f"{UP}: {WRONG} gives other bits than the rules") for note in notes)


def test_the_time_allowed_is_kept():
    programs, notes = compiled(DEFAULT, SAME, WRONG, seconds=0.0)
    assert len(programs) == 2
    assert any("2 of 3 trials made" in note for note in notes)


def test_rules_that_do_not_run_are_an_error():
    with pytest.raises(RuntimeError, match=r"the layer does not compile: NotImplementedError"):
        compiled(BROKEN, DEFAULT)


def test_small_savings_do_not_replace_the_default():
    assert choose({"default": 100.0, "other": 99.5}, "default") == "default"
    assert choose({"default": 100.0, "other": 98.0, "third": 98.5}, "default") == "other"


def test_the_time_of_the_kernel_alone():
    kernels = {"copy": 4.0, "moe_combine_mosaic_gpu": 6.0, "moe_up_backward_mosaic_gpu": 2.0, "moe_up_projection": 3.0}
    timing = Timing("device", [15.0], {name: KernelTotal(1, us) for name, us in kernels.items()})
    assert kernel_us(timing, "mma_up_backward") == 2.0
    assert kernel_us(timing, "column_block") == 8.0  # what works in blocks of columns
    assert kernel_us(Timing("wall", [15.0]), "up_backward") == 15.0


CONFIG = ["--config", "512,1024,512,8,4"]


@pytest.mark.skipif(nvidia_gpu() is not None, reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_a_line(capsys, tmp_path):
    file = tmp_path / "tuning.json"
    assert main([*CONFIG, "--output", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "there is no NVIDIA GPU since Ampere here" in err
    assert not file.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the following arguments are required: --config"),
        ([*CONFIG, "--kernel", "sideways"], "invalid choice: 'sideways'"),
        ([*CONFIG, "--seconds", "0"], "--seconds 0.0 must be positive"),
        ([*CONFIG, "--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_options_that_do_not_fit(options, message, capsys):
    with pytest.raises(SystemExit):
        main(options)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "variable", "message"),
    [
        ([], "", "BLAZE_JAX_TUNING is empty, which means no file: say --output FILE"),
        (["--output", "{tmp}/bad.json"], "", "bad.json is no file of tuned parameters"),
        (["--output", "{tmp}/bad.json/below.json"], "", "cannot be written"),
    ],
)
def test_a_file_that_cannot_be_written_is_told_before_measuring(
    options, variable, message, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr("blaze_jax.tune.nvidia_gpu", lambda: "NVIDIA H200")
    monkeypatch.setattr("blaze_jax.tune.tune_layer", lambda *_, **__: pytest.fail("measured"))
    monkeypatch.setenv("BLAZE_JAX_TUNING", variable)
    (tmp_path / "bad.json").write_text("{}")
    assert main([*CONFIG, *(o.format(tmp=tmp_path) for o in options)]) == 2
    assert message in capsys.readouterr().err


def test_what_is_found_is_printed_and_written(capsys, monkeypatch, tmp_path):
    found = Found("rows=2^11,d=8", TileTuning(tile_width=8), 90.0, 100.0, 5)
    monkeypatch.setattr("blaze_jax.tune.nvidia_gpu", lambda: "NVIDIA H200")
    monkeypatch.setattr("blaze_jax.tune.tune_layer", lambda *_, **__: ({"up_projection": found}, ["a note"]))
    for options in ([], ["--output", str(tmp_path / "own.json")]):
        monkeypatch.setenv("BLAZE_JAX_TUNING", str(tmp_path / "user.json"))
        assert main([*CONFIG, *options]) == 0
        out = capsys.readouterr().out
        assert line("up_projection", found) in out
        assert "note: a note" in out
    assert "100.0 us ->      90.0 us -10.0%, best of 5: stages=4, minor_dim=0, tile_width=8" in line("x", found)
    for name in ("user.json", "own.json"):
        tunings, problems = read_tunings(tmp_path / name)
        assert tunings == {("NVIDIA H200", "up_projection", "rows=2^11,d=8"): TileTuning(tile_width=8)}
        assert problems == []


@pytest.fixture
def tuned(capsys, monkeypatch, tmp_path):
    """Runs the command and returns what its file holds, by kernel."""

    def run(config, family, seconds):
        monkeypatch.setenv("BLAZE_JAX_TUNING", "")
        file = tmp_path / "tuning.json"
        assert main([*config, "--family", family, "--seconds", seconds, "--output", str(file)]) == 0
        out = capsys.readouterr().out
        assert "does not compile" not in out
        assert "other bits" not in out
        tunings, problems = read_tunings(file)
        assert problems == []
        (entries,) = json.loads(file.read_text())["tunings"].values()
        assert all(e["measured"]["us"] > 0 for shapes in entries.values() for e in shapes.values())
        return {kernel: tuning for (_, kernel, _), tuning in tunings.items()}

    return run


@pytest.mark.slow
@pytest.mark.skipif(nvidia_gpu() is not None, reason="in the interpreter")
def test_the_whole_command_in_the_interpreter(monkeypatch, tuned):
    rule, other = MmaTuning(128, 32, 2), MmaTuning(128, 32, 3)
    monkeypatch.setattr(tune, "candidates", lambda kernel, shape: (rule, other))
    monkeypatch.setattr("blaze_jax.tune.nvidia_gpu", lambda: "NVIDIA H200")
    with interpreted():
        found = tuned(["--config", "8,8,8,2,1"], "ampere", "600")
    assert found.keys() == FAMILY_KERNELS["ampere"]
    assert set(found.values()) <= {rule, other}


@pytest.mark.gpu
@pytest.mark.skipif(nvidia_gpu() is None, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_tuning_on_the_gpu(tuned, family):
    if family == "hopper" and compute_capability() != "9.0":
        pytest.skip("needs a Hopper GPU")
    assert tuned(CONFIG, family, "30").keys() == FAMILY_KERNELS[family]
