"""What a compiled program sends between devices: the kinds of collectives, and as many bytes as the formula says."""

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
from blaze_jax.benchmark.mesh import traffic
from blaze_jax.benchmark.sizes import Sizes
from tests.over_devices import make_mesh, roles

SIZES = Sizes(num_tokens=40, model_width=16, expert_width=24, num_experts=8, experts_per_token=2)
CONFIG = MoEConfig(num_experts=8, experts_per_token=2, expert_width=24)
COLLECTIVE = re.compile(r" = (.*?) (all-gather|reduce-scatter|all-reduce|collective-permute|all-to-all)\(")
FLOATS = re.compile(r"f32\[([\d,]+)\]")  # of several, if XLA combined collectives


def program(axes, options, backward):
    """The text of the compiled program, and its parallelism."""
    mesh, parallel = make_mesh(axes), Parallelism(**roles(axes), **options)
    shapes = {name: p.shape for name, p in CONFIG.parameters(16).items()}
    tokens = SIZES.num_tokens * mesh.size

    def run(params, x, dy):
        if not backward:
            return moe(x, params, CONFIG, parallel=parallel)[0]
        y, vjp = jax.vjp(lambda params, x: moe(x, params, CONFIG, parallel=parallel)[0], params, x)
        return vjp(dy), y

    with jax.set_mesh(mesh):
        specs = parallel.specs(CONFIG, 16)
        x = jax.ShapeDtypeStruct((tokens, 16), jnp.float32, sharding=jax.NamedSharding(mesh, P(parallel.axes)))
        params = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, specs[name]))
            for name, shape in shapes.items()
        }
        out = ((params, x), x) if backward else x
        placed = jax.tree.map(lambda a: a.sharding, out)
        return jax.jit(run, out_shardings=placed).lower(params, x, x).compile().as_text(), parallel


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

    def shaped(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))

    params = {name: shaped(p.shape, P()) for name, p in CONFIG.parameters(16).items()}
    with jax.set_mesh(mesh):
        layer = jax.jit(lambda params, x: moe(x, params, CONFIG, parallel=parallel)[0])
        text = layer.lower(params, shaped((4, 8, 16), P("data", "seq"))).compile().as_text()
    assert not COLLECTIVE.findall(str(text))


@pytest.mark.slow
def test_ragged_exchange_lowers_for_gpus():
    mesh, parallel = make_mesh({"expert": 4}), Parallelism(expert="expert", exchange="all_to_all")
    with jax.set_mesh(mesh):
        params = {name: jax.ShapeDtypeStruct(p.shape, jnp.float32) for name, p in CONFIG.parameters(16).items()}
        layer = partial(moe, config=CONFIG, parallel=parallel)
        traced = jax.jit(lambda params, x: layer(x, params)[0]).trace(
            params, jax.ShapeDtypeStruct((64, 16), jnp.float32)
        )
        assert "ragged_all_to_all" in traced.lower(lowering_platforms=("cuda",)).as_text()
