"""Own tokens and own experts first, in several blocks of columns: in pieces as at once."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from blaze_jax import MoEConfig
from pallas_kernels import xla
from pallas_kernels.xla.loops import zeros
from tests.layers import WIDTH
from tests.over_devices import Way, assert_as_one_device

CONFIG = MoEConfig(num_experts=8, experts_per_token=3, expert_width=8)
WAYS = {
    "own tokens of two": ({"expert": 2}, {}),
    "own tokens of four, further turns": ({"expert": 4}, {"exchange": "permute", "row_budget": 0.3}),
    "all tokens at once, further turns": ({"expert": 4}, {"exchange": "all_gather", "row_budget": 0.3}),
    "each token once, further turns": ({"expert": 4}, {"exchange": "all_to_all", "row_budget": 0.3}),
    "own experts of four": ({"fsdp": 4}, {}),
    "own experts, one each": ({"fsdp": 8}, {}),
    "own experts, further turns": ({"fsdp": 4}, {"row_budget": 0.3}),
    "both": ({"fsdp": 2, "expert": 2}, {"row_budget": 0.3}),
    "both, and the width": ({"fsdp": 2, "expert": 2, "tensor": 2}, {}),
}


IN_8_BITS = ("own tokens of four, further turns", "own experts, further turns", "both, and the width")
CASES = [(way, "pre_activations") for way in WAYS] + [(way, "int8") for way in IN_8_BITS]


def poisoned(shape, dtype, *like):
    """What buffers may hold before they are written."""
    return zeros(shape, dtype, *like) + jnp.asarray(jnp.nan if jnp.issubdtype(dtype, jnp.floating) else 99, dtype)


@pytest.mark.parametrize(("way", "save"), CASES)
@pytest.mark.default_cases("own experts of four-pre_activations")
@pytest.mark.ci_cases("own tokens of four, further turns-int8")
def test_as_one_device(way, save, monkeypatch, traced_anew):
    pieces = []

    def computed(*arguments, **options):
        pieces.append(arguments)
        return portable(*arguments, **options)

    portable = xla.up_projection
    monkeypatch.setattr(xla, "up_projection", computed)
    monkeypatch.setattr(xla, "overlaps", True)
    monkeypatch.setattr(xla, "column_block", lambda *_: WIDTH // 2 + 1)  # the second block is narrower
    monkeypatch.setattr("pallas_kernels.xla.experts.empty", poisoned)
    axes, options = WAYS[way]
    # Where devices share an expert's width, its blocks of 128 columns with one scale are others.
    tolerance = 0.01 if save == "int8" and axes.get("tensor", 1) > 1 else None
    assert_as_one_device(Way(axes, "shard_map", options), replace(CONFIG, save=save), 40, tolerance=tolerance)
    assert len(pieces) > 1
