"""What a device knows of the pairs of its group, and how it counts its experts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from blaze_jax import MoEConfig, Parallelism
from blaze_jax.activations import get_activation
from blaze_jax.exchange import HERE, Transport
from blaze_jax.expert_rows import Settings, Tokens
from pallas_kernels import xla
from tests.blaze_jax.test_parallelism import make_mesh
from tests.pallas_kernels.rows import portable_dispatch
from tests.routings import ROUTINGS


def test_ids_and_most_pairs_of_the_group():
    """Of 3 experts a device; the second one has most pairs, and 6 is the id of no expert."""
    experts = jnp.array([[0, 4], [-1, 3], [5, 6], [3, 5]], jnp.int32)
    transport = Transport(expert=("expert",))

    @partial(jax.shard_map, mesh=make_mesh({"expert": 2}), in_specs=P("expert"), out_specs=P("expert"))
    def here(experts):
        ids, most_pairs = transport.experts_here(None, experts, 3)
        return ids[None], most_pairs[None]

    ids, most_pairs = jax.jit(here)(experts)
    assert ids.tolist() == [
        [[0, -1], [-1, -1], [-1, 3], [-1, -1]],
        [[-1, 1], [-1, 0], [2, 3], [0, 2]],
    ]
    assert most_pairs.tolist() == [5, 5]


def test_a_device_counts_its_own_experts_first():
    experts = jnp.arange(-1, 9, dtype=jnp.int32)
    transport = Transport(fsdp=("fsdp",), own_experts_first=True)

    @partial(jax.shard_map, mesh=make_mesh({"fsdp": 4}), in_specs=P(), out_specs=P("fsdp"))
    def counted(experts):
        return transport.by_block(experts[:, None], 8).T

    expected = [[-1, *((expert - first) % 8 for expert in range(8)), 8] for first in (0, 2, 4, 6)]
    assert jax.jit(counted)(experts).tolist() == expected


@pytest.mark.parametrize(("devices", "split"), [(4, True), (5, False)])
@pytest.mark.default_sets(2)
def test_experts_come_in_blocks_only_where_a_device_has_whole_ones(devices, split):
    config = MoEConfig(num_experts=8, experts_per_token=2, expert_width=8)
    specs = Parallelism(fsdp="fsdp").specs(config, 10, sizes={"fsdp": devices})
    of_experts = tuple(specs[name] for name in ("w_gate", "w_up", "w_down"))
    assert Transport(fsdp=("fsdp",), specs=of_experts).splits_experts == split


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.default_sets(2)
def test_turns_take_all_rows_with_the_gaps_between_groups(known):
    experts, num_experts = ROUTINGS["random"]
    dispatch = portable_dispatch(experts, num_experts, row_alignment=8)
    settings = Settings(get_activation("swiglu"), "inputs", xla, HERE, row_budget=16)
    part = Tokens(jnp.zeros((37, 8)), jnp.ones((37, 2)), jnp.asarray(experts), dispatch)
    _, turns = settings.turns(part._replace(most_pairs=jnp.int32(experts.size)) if known else part)
    assert turns is not None
    further = np.asarray(dispatch.expert_token_offsets)[-1] - 16
    assert experts.size - 16 < further <= turns * settings.turn_rows
