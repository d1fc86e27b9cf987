"""What travels between devices: what a device then knows, in which order, and how many bytes a program sends."""

import itertools
import re
from collections import defaultdict
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType

from blaze_jax import MoEConfig, Parallelism, moe
from blaze_jax.activations import get_activation
from blaze_jax.benchmark.mesh import traffic
from blaze_jax.benchmark.sizes import Sizes
from blaze_jax.exchange import HERE, Transport
from blaze_jax.plan import Plan, Tokens
from pallas_kernels import xla
from tests.over_devices import make_mesh, roles
from tests.pallas_kernels.rows import portable_dispatch
from tests.routings import ROUTINGS

ORDERS = [dict.fromkeys(axes, 2) for axes in itertools.permutations(("expert", "more", "tensor"))]
SIZES = Sizes(num_tokens=40, model_width=16, expert_width=24, num_experts=8, experts_per_token=2)
CONFIG = MoEConfig(num_experts=8, experts_per_token=2, expert_width=24)
COLLECTIVE = re.compile(r" = (.*?) (all-gather|reduce-scatter|all-reduce|collective-permute|all-to-all)\(")
FLOATS = re.compile(r"f32\[([\d,]+)\]")  # of several, if XLA combined collectives


def over(axes, out_specs=P("expert"), in_specs=P("expert")):
    """Decorates what runs compiled on each device of the mesh."""
    return lambda run: jax.jit(jax.shard_map(run, mesh=make_mesh(axes), in_specs=in_specs, out_specs=out_specs))


def test_ids_and_most_pairs_of_the_group():
    """Of 3 experts a device; the second one has most pairs, and 6 is the id of no expert."""
    experts = jnp.array([[0, 4], [-1, 3], [5, 6], [3, 5]], jnp.int32)

    @over({"expert": 2})
    def here(experts):
        ids, most_pairs = Transport(expert=("expert",)).experts_here(None, experts, 3)
        return ids[None], most_pairs[None]

    ids, most_pairs = here(experts)
    assert ids.tolist() == [
        [[0, -1], [-1, -1], [-1, 3], [-1, -1]],
        [[-1, 1], [-1, 0], [2, 3], [0, 2]],
    ]
    assert most_pairs.tolist() == [5, 5]


def test_parts_leave_for_where_they_came_from():
    transport = Transport(expert=("expert",), exchange="permute", own_first=True)

    @over({"expert": 4}, P(None, "expert"))
    def there_and_back(token):
        parts = transport.arrivals(None, token)
        leave = transport.departures(None, len(parts))
        home = [part if bring is None else bring(part) for part, bring in zip(parts, leave, strict=True)]
        return jnp.stack([*parts, *home])

    there, home = jnp.split(there_and_back(jnp.arange(4)), 2)
    assert there.tolist() == [[0, 1, 2, 3], [3, 0, 1, 2], [2, 3, 0, 1], [1, 2, 3, 0]]
    assert home.tolist() == [[0, 1, 2, 3]] * 4


@pytest.mark.parametrize("mesh", ORDERS, ids=str)
@pytest.mark.default_cases("*")
def test_parts_arrive_in_the_order_of_the_group_on_any_mesh(mesh):
    """Each device's number among those of the group, with axes that the mesh declares in any order."""
    transport = Transport(expert=("expert", "more"), tensor=("tensor",), exchange="permute", own_first=True)

    @over(mesh, P(None, transport.group), in_specs=())
    def arriving():
        return jnp.stack(transport.arrivals(None, jax.lax.axis_index(transport.group)[None]))

    assert arriving().tolist() == [[(device - shift) % 8 for device in range(8)] for shift in range(8)]


def test_a_device_counts_its_own_experts_first():
    experts = jnp.arange(-1, 9, dtype=jnp.int32)

    @over({"fsdp": 4}, P("fsdp"), in_specs=P())
    def counted(experts):
        return Transport(fsdp=("fsdp",), own_experts_first=True).by_block(experts[:, None], 8).T

    expected = [[-1, *((expert - first) % 8 for expert in range(8)), 8] for first in (0, 2, 4, 6)]
    assert counted(experts).tolist() == expected


def test_experts_come_in_blocks_only_where_a_device_has_whole_ones():
    for devices, split in ((4, True), (5, False)):
        specs = Parallelism(fsdp="fsdp").specs(CONFIG, 10, sizes={"fsdp": devices})
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


def arguments(mesh, leading, of_tokens=P(), of_params=None):
    """Shapes of the parameters by name, and of the tokens, as they are placed on the mesh."""

    def shaped(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))

    params = {name: shaped(p.shape, (of_params or {}).get(name, P())) for name, p in CONFIG.parameters(16).items()}
    return params, shaped((*leading, 16), of_tokens)


def layer(params, x, parallel):
    return moe(x, params, CONFIG, parallel=parallel)[0]


def program(axes, options, backward):
    """The text of the compiled program, and its parallelism."""
    mesh, parallel = make_mesh(axes), Parallelism(**roles(axes), **options)
    run = partial(layer, parallel=parallel)

    def gradients(params, x, dy):
        y, vjp = jax.vjp(run, params, x)
        return vjp(dy), y

    with jax.set_mesh(mesh):
        tokens = SIZES.num_tokens * mesh.size
        params, x = arguments(mesh, (tokens,), P(parallel.axes), parallel.specs(CONFIG, 16))
        placed = jax.tree.map(lambda a: a.sharding, ((params, x), x) if backward else x)
        step, given = (gradients, (params, x, x)) if backward else (run, (params, x))
        return jax.jit(step, out_shardings=placed).lower(*given).compile().as_text(), parallel


def received(text, devices):
    """Bytes by kind, of tokens and of experts' parameters; `devices` by kind of array."""
    found = {"tokens": defaultdict(float), "parameters": defaultdict(float)}
    for results, kind in COLLECTIVE.findall(text):
        for sizes in FLOATS.findall(results):
            shape = tuple(map(int, sizes.split(",")))
            if len(shape) == 3 or shape[-1] == SIZES.model_width:
                what = "parameters" if len(shape) == 3 else "tokens"
                others = devices[what] - 1
                share = {"all-gather": others / devices[what], "reduce-scatter": others}.get(kind, 1)
                found[what][kind] += 4 * np.prod(shape) * share
    return found


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("axes", "options", "kinds"),
    [
        ({"expert": 4}, {"exchange": "all_gather"}, ("all-gather", "reduce-scatter")),
        ({"expert": 2}, {"keep_gathered": True}, ("collective-permute",)),
        ({"tensor": 2}, {"exchange": "permute", "chunks": 2}, ("collective-permute",)),
        ({"fsdp": 2, "expert": 2}, {}, ("collective-permute",)),
    ],
    ids=str,
)
def test_collectives_and_their_bytes(axes, options, kinds, backward):
    text, parallel = program(axes, {"row_budget": None, **options}, backward)
    group = int(np.prod([axes[a] for a in parallel.group]))
    found = received(text, {"tokens": group, "parameters": axes.get("fsdp", 1)})
    expected = traffic(SIZES, parallel, axes, 4, backward=backward)
    assert set(found["tokens"]) == set(kinds)
    assert sum(found["tokens"].values()) == expected.tokens
    assert sum(found["parameters"].values()) == expected.parameters
    if expected.parameters:
        assert set(found["parameters"]) == {"all-gather", "reduce-scatter"} if backward else {"all-gather"}


@pytest.mark.parametrize("parallel", [None, Parallelism(data=("seq", "data"))], ids=["", "roles"])
@pytest.mark.default_cases("*")
def test_tokens_split_by_batch_and_sequence_stay_where_they_are(parallel):
    mesh = make_mesh({"data": 2, "seq": 4}, AxisType.Explicit)
    with jax.set_mesh(mesh):
        run = jax.jit(partial(layer, parallel=parallel))
        text = run.lower(*arguments(mesh, (4, 8), P("data", "seq"))).compile().as_text()
    assert not COLLECTIVE.findall(str(text))


@pytest.mark.slow
def test_ragged_exchange_lowers_for_gpus():
    mesh, parallel = make_mesh({"expert": 4}), Parallelism(expert="expert", exchange="all_to_all")
    with jax.set_mesh(mesh):
        traced = jax.jit(partial(layer, parallel=parallel)).trace(*arguments(mesh, (64,)))
        assert "ragged_all_to_all" in traced.lower(lowering_platforms=("cuda",)).as_text()
