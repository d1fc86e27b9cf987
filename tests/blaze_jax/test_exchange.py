"""What a device knows of the pairs of its group, where tokens travel, and how it counts its experts."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from blaze_jax import MoEConfig, Parallelism
from blaze_jax.activations import get_activation
from blaze_jax.exchange import HERE, Transport
from blaze_jax.plan import Plan, Tokens
from pallas_kernels import xla
from tests.over_devices import make_mesh
from tests.pallas_kernels.rows import portable_dispatch
from tests.routings import ROUTINGS

ORDERS = [dict.fromkeys(axes, 2) for axes in itertools.permutations(("expert", "more", "tensor"))]


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


def test_parts_leave_for_where_they_came_from():
    transport = Transport(expert=("expert",), exchange="permute", own_first=True)

    @partial(jax.shard_map, mesh=make_mesh({"expert": 4}), in_specs=P("expert"), out_specs=P(None, "expert"))
    def there_and_back(token):
        parts = transport.arrivals(None, token)
        leave = transport.departures(None, len(parts))
        home = [part if bring is None else bring(part) for part, bring in zip(parts, leave, strict=True)]
        return jnp.stack([*parts, *home])

    there, home = jnp.split(jax.jit(there_and_back)(jnp.arange(4)), 2)
    assert there.tolist() == [[0, 1, 2, 3], [3, 0, 1, 2], [2, 3, 0, 1], [1, 2, 3, 0]]
    assert home.tolist() == [[0, 1, 2, 3]] * 4


@pytest.mark.parametrize("mesh", ORDERS, ids=str)
@pytest.mark.default_cases("*")
def test_parts_arrive_in_the_order_of_the_group_on_any_mesh(mesh):
    """Each device's number among those of the group, with axes that the mesh declares in any order."""
    transport = Transport(expert=("expert", "more"), tensor=("tensor",), exchange="permute", own_first=True)

    def arriving():
        own = jax.lax.axis_index(transport.group)[None]
        return jnp.stack(transport.arrivals(None, own))

    over = jax.shard_map(arriving, mesh=make_mesh(mesh), in_specs=(), out_specs=P(None, transport.group))
    parts = jax.jit(over)()
    assert parts.tolist() == [[(device - shift) % 8 for device in range(8)] for shift in range(8)]


def test_a_device_counts_its_own_experts_first():
    experts = jnp.arange(-1, 9, dtype=jnp.int32)
    transport = Transport(fsdp=("fsdp",), own_experts_first=True)

    @partial(jax.shard_map, mesh=make_mesh({"fsdp": 4}), in_specs=P(), out_specs=P("fsdp"))
    def counted(experts):
        return transport.by_block(experts[:, None], 8).T

    expected = [[-1, *((expert - first) % 8 for expert in range(8)), 8] for first in (0, 2, 4, 6)]
    assert jax.jit(counted)(experts).tolist() == expected


@pytest.mark.parametrize(("devices", "split"), [(4, True), (5, False)])
@pytest.mark.default_cases("*")
def test_experts_come_in_blocks_only_where_a_device_has_whole_ones(devices, split):
    config = MoEConfig(num_experts=8, experts_per_token=2, expert_width=8)
    specs = Parallelism(fsdp="fsdp").specs(config, 10, sizes={"fsdp": devices})
    of_experts = tuple(specs[name] for name in ("w_gate", "w_up", "w_down"))
    assert Transport(fsdp=("fsdp",), specs=of_experts).splits_experts == split


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.default_cases("*")
def test_turns_take_all_rows_with_the_gaps_between_groups(known):
    experts, num_experts = ROUTINGS["random"]
    dispatch = portable_dispatch(experts, num_experts, row_alignment=8)
    plan = Plan(get_activation("swiglu"), "inputs", xla, HERE, row_budget=16)
    part = Tokens(jnp.zeros((37, 8)), jnp.ones((37, 2)), jnp.asarray(experts), dispatch)
    _, turns = plan.turns(part._replace(most_pairs=jnp.int32(experts.size)) if known else part)
    assert turns is not None
    further = np.asarray(dispatch.expert_token_offsets)[-1] - 16
    assert experts.size - 16 < further <= turns * plan.turn(part, 0).all.num_rows
