"""Whole runs of the program, as a user starts and stops them."""

import contextlib
import io
import os
import re
import shutil
import signal
import sys
import time

import pytest

from tests.train_example.small import CONFIG, metrics, start
from train_example.__main__ import main
from train_example.generate.__main__ import main as generate
from train_example.program.checkpoints import only_run_in
from train_example.program.presets import PRESETS
from train_example.program.run import Interrupt

STEPS = CONFIG.steps
OPTIONS = ["--accumulate", "2", "--evaluate-every", "10", "--checkpoint-every", "6"]
PAIRS = CONFIG.batch_size * CONFIG.sequence_length * CONFIG.model.experts_per_token
TIMING = ("elapsed", "tokens_per_second", "peak_memory_gib")


def wait_for_step(out, step):
    deadline = time.monotonic() + 300
    while len(metrics(out)) < step:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def numbers(out):
    """The metrics without what depends on the machine's mood."""
    return [{k: v for k, v in record.items() if k not in TIMING} for record in metrics(out)]


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def small_preset(monkeypatch):
    """Calls in this process know the model of the other ones."""
    monkeypatch.setitem(PRESETS, "tiny", CONFIG)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Folder and standard output of a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("finished") / "run"
    stdout = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(stdout):
        patch.setitem(PRESETS, "tiny", CONFIG)
        assert main(["--out", str(out), *OPTIONS]) == 0
    return out, stdout.getvalue()


@pytest.mark.slow
def test_last_line_says_how_good_the_model_is(finished):
    last = finished[1].splitlines()[-1]
    ((held_out, unigram),) = re.findall(r"^final: held-out (\S{5}) bits/byte, unigram (\S{5}) bits/byte$", last)
    held_out, unigram = float(held_out), float(unigram)
    assert 4 < unigram < 5.5
    assert re.search(r"^text: 1 document, [\d,]+ bytes, the last ", finished[1], re.MULTILINE)
    if sys.version_info < (3, 13):  # whose text ends less like the rest
        assert held_out < 0.95 * unigram
    measured = [record["held_out"] for record in metrics(finished[0]) if "held_out" in record]
    assert measured[-1] < 0.95 * measured[0]
    assert held_out == pytest.approx(measured[-1], abs=1e-3)


@pytest.mark.slow
def test_the_folder_has_metrics_of_every_step_figure_sample_and_checkpoints(finished):
    out, stdout = finished
    records = metrics(out)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert [record["step"] for record in records if "held_out" in record] == [10, 20, 30, 40]
    for record in records:
        assert 0 < record["loss"] < 12
        assert record["gradient_norm"] > 0
        assert 0 < record["learning_rate"] <= 1.001 * CONFIG.learning_rate
        assert record["balance"] >= 1
        assert record["tokens_per_second"] > 0
        assert [sum(load) for load in record["load"]] == [PAIRS] * CONFIG.model.num_layers
    elapsed = [record["elapsed"] for record in records]
    assert elapsed == sorted(elapsed)
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")
    sample = (out / "sample.txt").read_text()
    assert len(sample.encode()) >= 512
    assert sample in stdout
    assert sorted(int(path.name) for path in (out / "checkpoints").iterdir()) == [30, 36, 40]


@pytest.mark.slow
def test_stopped_killed_and_resumed_run_is_the_undisturbed_one(finished, tmp_path, capsys):
    out = tmp_path / "run"
    process = start(out, *OPTIONS)
    wait_for_step(out, 8)
    assert main(["--out", str(out), "--resume"]) == 2
    assert f"{out} has a run at work, process {process.pid} on" in capsys.readouterr().err
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    done = len(metrics(out))
    assert 8 <= done < STEPS
    assert stdout.splitlines()[-1] == (
        f"stopped after step {done} of {STEPS}; go on with: python -m train_example --resume --out {out}"
    )
    assert (out / "checkpoints" / str(done)).is_dir()

    process = start(out, "--resume")
    wait_for_step(out, done + 12)
    process.kill()
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    assert len(metrics(out)) < STEPS
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 39, "lo')  # as if killed while writing

    assert main(["--out", str(out), "--resume"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert numbers(out) == numbers(finished[0])
    assert said.out.splitlines()[-1] == finished[1].splitlines()[-1]
    assert (out / "sample.txt").read_text() == (finished[0] / "sample.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "has a run already: go on with it by --resume, or choose another --out"),
        (["--resume", "--seed", "1"], "has --seed 0, cannot be resumed with 1"),
        (["--resume", "--steps", "39"], "has done 40 steps, --steps 39 must be more"),
        (["--resume", "--data", "OTHER TEXT"], "the text is not the one"),
    ],
)
def test_a_run_is_not_overwritten_or_mixed_up(finished, tmp_path, capsys, options, message):
    other = tmp_path / "text"
    other.write_text("another text\n" * 100)
    before = files(finished[0])
    assert main(["--out", str(finished[0]), *(str(other) if o == "OTHER TEXT" else o for o in options)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert files(finished[0]) == before


@pytest.mark.slow
def test_a_runs_model_generates_while_it_may_be_at_work(finished, capsys):
    before = files(finished[0])
    with only_run_in(finished[0]):
        assert generate(["--run", str(finished[0]), "--prompt", "if ", "--stop", "\n", "--temperature", "0"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("if ")
    assert re.search(r"step 40: stops at '\\n'\n1?\d bytes, the first", said.err)
    assert {path: content for path, content in files(finished[0]).items() if path.name != "lock"} == {
        path: content for path, content in before.items() if path.name != "lock"
    }


@pytest.mark.slow
def test_a_run_goes_on_from_the_newest_checkpoint_that_is_not_damaged(finished, tmp_path, capsys):
    out = shutil.copytree(finished[0], tmp_path / "run")
    for step, name in ((40, "d"), (36, "ocdbt.process_0/d")):
        file = next((out / "checkpoints" / str(step) / "state" / name).iterdir())
        file.write_bytes(file.read_bytes()[:-1])
    assert main(["--out", str(out), "--resume"]) == 0
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert f"checkpoint 40 is damaged, {out / 'checkpoints' / '40' / 'state' / 'd'}/" in said.err
    assert said.err.endswith("; --resume takes checkpoint 30 instead\n")
    assert "training from step 30 to step 40" in said.out
    assert numbers(out) == numbers(finished[0])
    before = metrics(out)
    assert main(["--out", str(out), "--resume"]) == 0  # it is done, and reported again
    again = capsys.readouterr()
    assert again.err == ""
    assert again.out.splitlines()[-1] == said.out.splitlines()[-1] == finished[1].splitlines()[-1]
    assert metrics(out) == before


@pytest.mark.slow
def test_a_second_run_in_a_folder_is_refused(finished, capsys):
    out = finished[0]
    with only_run_in(out):
        assert main(["--out", str(out), "--resume"]) == 2
    told = f"{out} has a run at work, process {os.getpid()} on {os.uname().nodename}: wait for it, or choose another"
    assert capsys.readouterr().err == f"train_example: {told} --out\n"


@pytest.mark.slow
def test_damaged_checkpoint(finished, tmp_path, capsys):
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
        (tmp_path / "checkpoints" / "5" / name).write_bytes((finished[0] / "checkpoints" / "40" / name).read_bytes())
    assert main(["--out", str(tmp_path), "--resume"]) == 2
    error = capsys.readouterr().err
    assert "checkpoint 5 in" in error
    assert error.count("\n") == 1


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
