"""What a run leaves in its folder: metrics, checkpoints on a disk that has no room, and the figure."""

import gc
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.image import imread

from train_example.config import UserError
from train_example.program import checkpoints
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


def test_a_full_disk_is_told_in_one_line_and_the_newest_whole_checkpoint_stays(tmp_path, capfd):
    manager = checkpoints.open_folder(tmp_path / "checkpoints")
    params = {f"w_{i}": jax.random.normal(jax.random.key(i), (40_000,)) for i in range(20)}
    checkpoints.save(manager, 1, TrainState(jnp.int32(1), {"w": jnp.ones(3)}, {}, {}), {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))  # of a file: the system says the same of a disk
    try:
        with pytest.raises(
            UserError, match=r"checkpoint 2 in .* cannot be written: File too large; make room, and"
        ) as e:
            checkpoints.save(manager, 2, TrainState(jnp.int32(2), params, {}, {}), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(e.value)
    gc.collect()
    manager.close()
    assert capfd.readouterr().err == ""
    assert checkpoints.open_folder(tmp_path / "checkpoints").latest_step() == 1


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
