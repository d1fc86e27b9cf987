"""What a run leaves in its folder: metrics, checkpoints on a disk that has no room, and the figure."""

import gc
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.image import imread

from train_example.config import UserError
from train_example.program.checkpoints import Checkpoints
from train_example.program.metrics import MetricsLog, read_metrics
from train_example.program.results import plot
from train_example.step import TrainState


def test_metrics_outlive_the_process_and_those_after_the_checkpoint_are_forgotten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, 0) as log:
        for step in range(1, 6):
            log.write({"step": step, "loss": 1 / step})
            assert read_metrics(path) == log.records == [{"step": i, "loss": 1 / i} for i in range(1, step + 1)]
        with pytest.raises(ValueError, match="JSON"):
            log.write({"step": 6, "loss": float("nan")})
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    with MetricsLog(path, 3) as resumed:
        assert resumed.records == log.records[:3]
        resumed.write({"step": 4})
    assert read_metrics(path) == [*log.records[:3], {"step": 4}]
    with MetricsLog(path, 0) as fresh:
        assert fresh.records == read_metrics(path) == []


def test_metrics_that_are_missing_or_broken_or_cannot_be_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(UserError, match="lacks steps before 3"):
        MetricsLog(path, 3)
    path.write_text("not JSON\n")
    with pytest.raises(UserError, match="has a line that is no JSON"):
        MetricsLog(path, 3)
    with pytest.raises(UserError, match="cannot be written"):
        MetricsLog(tmp_path / "missing" / "metrics.jsonl", 0)


@pytest.mark.slow
def test_a_full_disk_is_told_in_one_line_and_the_newest_whole_checkpoint_stays(tmp_path, capfd):
    saved = Checkpoints(tmp_path / "checkpoints")
    params = {f"w_{i}": jax.random.normal(jax.random.key(i), (40_000,)) for i in range(20)}
    saved.save(1, TrainState(jnp.int32(1), {"w": jnp.ones(3)}, {}, {}), {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))  # of a file: the system says the same of a disk
    try:
        with pytest.raises(
            UserError, match=r"checkpoint 2 in .* cannot be written: File too large; make room, and"
        ) as e:
            saved.save(2, TrainState(jnp.int32(2), params, {}, {}), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(e.value)
    gc.collect()
    saved.close()
    assert capfd.readouterr().err == ""
    assert Checkpoints(tmp_path / "checkpoints").steps() == [1]


def test_damage_to_any_file_of_a_checkpoint_is_noticed_and_the_next_older_one_is_taken(tmp_path, capsys):
    saved = Checkpoints(tmp_path)
    for step in (1, 2):
        saved.save(step, TrainState(jnp.int32(step), {"w": jnp.ones(3000)}, {}, {}), {"text": "one"})
    saved.close()
    saved, newest = Checkpoints(tmp_path), tmp_path / "2"
    files = {path: path.read_bytes() for path in newest.rglob("*") if path.is_file() and path.name != "sha256.json"}
    assert len(files) > 8
    for path, content in files.items():
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :] if content else b"1"
        for damaged in (flipped, content[:-1], None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            assert saved.newest_whole() == (1 if damaged != content else 2)
            told = capsys.readouterr().err
            assert damaged == content or f"checkpoint 2 is damaged, {path}: " in told
            assert damaged == content or told.endswith("; --resume takes checkpoint 1 instead\n")
        path.write_bytes(content)
    assert saved.newest_whole() == 2
    for step in (1, 2):
        (tmp_path / str(step) / "sha256.json").write_text("[")
    with pytest.raises(
        UserError, match=r"checkpoint 2 is damaged, .*2/sha256.json: is not JSON.*; there is no older one"
    ):
        saved.newest_whole()


@pytest.mark.parametrize(
    ("steps", "layers", "experts", "unigram_bits"), [(1, 1, 2, 0.0), (300, 4, 16, 4.7), (2000, 17, 64, 4.7)]
)
def test_figure_of_a_run(tmp_path, steps, layers, experts, unigram_bits):
    rng = np.random.default_rng(0)
    records = [{"step": step, "loss": 2 + 6 / step + 0.1 * rng.normal()} for step in range(1, steps + 1)]
    for record in records[:: max(1, steps // 50)]:
        record["load"] = rng.multinomial(4096, rng.dirichlet([5] * experts), layers).tolist()
    records[-1]["held_out"] = 2.2
    plot(records, unigram_bits, f"{layers} layers", tmp_path / "figure.png")
    image = imread(tmp_path / "figure.png")
    assert image.shape[1] == 1650
    assert 0.5 < image[..., :3].mean() < 0.99
