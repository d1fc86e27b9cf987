"""The metrics file."""

import pytest

from train_example.config import UserError
from train_example.program.metrics import MetricsLog, read_metrics


def written(path, steps):
    with MetricsLog(path, 0) as log:
        for step in range(1, steps + 1):
            log.write({"step": step, "loss": 1 / step})
    return log.records


def test_a_record_is_in_the_file_bit_for_bit_when_write_returns(tmp_path):
    with MetricsLog(tmp_path / "metrics.jsonl", 0) as log:
        for step in range(1, 10):
            log.write({"step": step, "loss": 1 / step})
            assert read_metrics(tmp_path / "metrics.jsonl") == log.records


def test_resuming_forgets_what_came_after_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    records = written(path, 5)
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    with MetricsLog(path, 3) as log:
        assert log.records == records[:3]
        log.write({"step": 4})
    assert read_metrics(path) == [*records[:3], {"step": 4}]


def test_a_fresh_run_starts_afresh(tmp_path):
    written(tmp_path / "metrics.jsonl", 5)
    assert written(tmp_path / "metrics.jsonl", 0) == []
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_metrics_that_are_missing_or_broken(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(UserError, match="lacks steps before 3"):
        MetricsLog(path, 3)
    path.write_text("not JSON\n")
    with pytest.raises(UserError, match="has a line that is no JSON"):
        MetricsLog(path, 3)


def test_file_that_cannot_be_written(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        MetricsLog(tmp_path / "missing" / "metrics.jsonl", 0)


def test_no_number_is_no_json(tmp_path):
    with MetricsLog(tmp_path / "metrics.jsonl", 0) as log, pytest.raises(ValueError, match="JSON"):
        log.write({"step": 1, "loss": float("nan")})
