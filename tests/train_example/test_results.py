"""The figure, for runs of any size."""

import numpy as np
import pytest
from matplotlib.image import imread

from train_example.program.results import plot


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
