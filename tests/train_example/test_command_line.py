"""Bad input: one line that says what is wrong, exit status 2, nothing written. And what a resumed run may change."""

import importlib
import math
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import train_example
from tests.blaze_jax.checkpoints.models import FIXTURES
from train_example.__main__ import main
from train_example.config import UserError
from train_example.loop import check_finite
from train_example.program.arguments import new_config, parse_arguments, resumed_config
from train_example.program.devices import Cluster
from train_example.program.presets import PRESETS
from train_example.step import learning_rate_schedule


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--preset tinny", "invalid choice: 'tinny'"),
        ("--data missing", "does not exist, must be a file or folder of text"),
        ("--data short", "has 2 bytes, must have at least 258"),
        ("--data folder", "holds no text"),
        ("--data /dev/null", "holds no text"),
        ("--steps -3", "-3 must be a whole number from 1"),
        ("--batch-size 1.5", "1.5 must be a whole number from 1"),
        ("--sequence-length 99999999999", "must be a whole number from 1 to 2147483647"),
        ("--seed -1", "-1 must be a whole number from 0"),
        ("--learning-rate nan", "nan must be a number of at least 0"),
        ("--weight-decay=-0.1", "-0.1 must be a number of at least 0"),
        ("--accumulate 3", "--accumulate 3 must divide --batch-size 16"),
        ("--dtype float16", "choose from"),
        ("--implementation cuda", "choose from"),
        ("--implementation mosaic_gpu", "or newer, the device here is cpu: choose xla"),
        ("--experts-layer sort+ragged_dot --implementation xla", "--implementation xla is of blaze_jax's kernels"),
        ("--step 3", "unrecognized arguments: --step 3"),
        ("--resume", "--resume needs --out FOLDER"),
        ("--resume --out new", "nothing to resume"),
        ("--out short/out", "cannot be written: Not a directory; choose another folder"),
        ("--checkpoint missing", "missing/config.json: cannot be read: No such file"),
        ("--checkpoint folder --preset tiny", "--checkpoint and --preset exclude each other"),
        (
            f"--checkpoint {FIXTURES / 'qwen3_moe'} --sequence-length 65",
            "at most 64, the max_position_embeddings of the",
        ),
        ("--trained routers", "choose from"),
        ("--mesh ring=2", "'ring=2' must be like fsdp=2,expert=4"),
        ("--mesh data=64", "--mesh asks for 64 devices, there are"),
        ("--mesh data=2 --batch-size 3", "--mesh has 2 devices, must divide the 3 sequences"),
        ("--mesh expert=3 --batch-size 3", "--mesh does not fit the model: num_experts=16 must be a multiple of the 3"),
        ("--mesh data=2 --experts-layer sort+ragged_dot", "runs on one device: leave --mesh out"),
        ("--mesh data=2 --compile-only h200", "leave --mesh and --cluster out"),
        ("--processes 2 --process 0", "several processes need --coordinator HOST:PORT"),
        ("--processes 2 --process 2 --coordinator a:1", "from 0 to N-1"),
        ("--cluster --process 0", "--cluster leaves it to the environment"),
        ("--cluster", "several processes need --out FOLDER"),
    ],
)
def test_bad_input_is_told_in_one_line(options, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_text("hi")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".hidden").write_text("hidden")
    before = sorted(tmp_path.rglob("*"))
    assert main(options.split()) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_implementation_that_cannot_run_the_model(tmp_path, capsys, monkeypatch):
    def refuse(*_, **__):
        raise NotImplementedError("too narrow")

    monkeypatch.setattr("train_example.model.MoE.__call__", refuse)
    assert main(["--implementation", "xla", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "train_example: --implementation xla cannot run this: too narrow\n"
    assert not (tmp_path / "out").exists()


def test_diverged_training():
    record = {"step": 3, "loss": 1.0, "gradient_norm": 1.0, "held_out": 1.0, "load": [[1]]}
    config = new_config({"learning_rate": 7.0})
    check_finite(config, record)
    for metric in ("loss", "gradient_norm", "held_out"):
        message = f"training diverged, {metric} is nan at step 3: try less than --learning-rate 7.0"
        with pytest.raises(UserError, match=message):
            check_finite(config, record | {metric: math.nan})


def test_options_replace_those_of_the_preset():
    options = {"preset": "1b", "steps": "7", "remat": "full", "save": "inputs", "data": "some/text"}
    arguments = parse_arguments([f"--{name}={value}" for name, value in options.items()])
    config = new_config(arguments.options)
    changed = {"steps": 7, "remat": "full", "save": "inputs", "data": str(Path("some/text").absolute())}
    assert config == replace(PRESETS["1b"], **changed)
    assert str(arguments.out).startswith("runs/1b-")
    assert arguments.cluster is None
    several = "--out x --mesh fsdp=2,expert=4 --coordinator a:1 --processes 2 --process 1"
    arguments = parse_arguments(several.split())
    assert arguments.mesh == {"fsdp": 2, "expert": 4}
    assert arguments.cluster == Cluster("a:1", 2, 1)


def test_resuming_takes_the_options_of_the_run_and_with_more_steps_its_schedule_unless_that_changes_too():
    def resumed(saved, **options):
        return resumed_config(options, asdict(saved), Path("out"))

    run = new_config({"steps": 40, "seed": 3})
    same = resumed(run, seed=3, checkpoint_every=2, data="moved")
    assert (same.steps, same.seed, same.checkpoint_every, same.data) == (40, 3, 2, "moved")
    more = resumed(run, steps=80)
    assert (more.steps, more.schedule_steps) == (80, 40)
    assert resumed(more, steps=120).schedule_steps == 40
    before, after, longer = map(learning_rate_schedule, (run, more, resumed(more, steps=120, schedule_steps=120)))
    assert [after(step) for step in (1, 20, 40)] == [before(step) for step in (1, 20, 40)]
    assert after(79) == after(40) == pytest.approx(0.1 * more.learning_rate)
    assert longer(79) > 3 * after(79)


def test_resuming_where_the_public_model_has_moved(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(FIXTURES / "olmoe", old)
    saved = asdict(new_config({"checkpoint": str(old)}))
    old.rename(new)
    with pytest.raises(UserError, match=r"old, which the run in out started from, is gone: say where by --checkpoint"):
        resumed_config({}, saved, Path("out"))
    assert resumed_config({"checkpoint": str(new)}, saved, Path("out")).checkpoint == str(new)
    with pytest.raises(UserError, match="is of a model that this version does not have"):
        resumed_config({"checkpoint": str(FIXTURES / "qwen3_moe")}, saved, Path("out"))


def test_resuming_refuses_other_options_and_a_model_that_is_no_more():
    saved = asdict(new_config({"seed": 3}))
    for name, value in {"preset": "1b", "seed": 4, "checkpoint": "x", "save": "inputs"}.items():
        with pytest.raises(UserError, match=f"has --{name} .*, cannot be resumed with {value}"):
            resumed_config({name: value}, saved, Path("out"))
    for change in ({"preset": "huge"}, {"model": {"width": 3}}, {"novelty": 1}):
        with pytest.raises(UserError, match="is of a model that this version does not have"):
            resumed_config({}, saved | change, Path("out"))


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs tqdm: pip install 'blaze_jax\[train\]'"):
        importlib.reload(train_example)
