"""Checkpoints on a disk that has no room."""

import gc
import resource

import jax
import jax.numpy as jnp
import pytest

from train_example.config import UserError
from train_example.program.checkpoints import Checkpoints
from train_example.step import TrainState


def test_a_full_disk_is_told_in_one_line_and_the_newest_whole_checkpoint_stays(tmp_path, capfd):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    params = {f"w_{i}": jax.random.normal(jax.random.key(i), (40_000,)) for i in range(20)}
    checkpoints.save(1, TrainState(jnp.int32(1), {"w": jnp.ones(3)}, {}, {}), {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))  # of a file: the system says the same of a disk
    try:
        with pytest.raises(
            UserError, match=r"checkpoint 2 in .* cannot be written: File too large; make room, and"
        ) as e:
            checkpoints.save(2, TrainState(jnp.int32(2), params, {}, {}), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(e.value)
    gc.collect()
    checkpoints.close()
    assert capfd.readouterr().err == ""
    assert Checkpoints(tmp_path / "checkpoints").latest_step == 1
