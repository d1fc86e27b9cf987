"""The layer over the devices of a mesh, as users may call it, against the layer on one device."""

from functools import partial

import jax
import numpy as np
from jax import P
from jax.sharding import AxisType, Mesh

from blaze_jax import MoEConfig, Parallelism, Routing
from blaze_jax.parallelism import ROLES
from tests.layers import WIDTH, loss, random_parameters, random_tokens, step
from tests.numerics import assert_close, assert_same_bits


def make_mesh(axes: dict[str, int], kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def roles(axes: dict[str, int]) -> dict[str, str]:
    return {role: role for role in axes if role in ROLES}


def over_devices(axes, kind, options, params, x, config: MoEConfig):
    """What `tests.layers.step` returns; `kind` is that of the mesh, or "shard_map" or "check_vma" for inside of one."""
    mesh = make_mesh(axes, AxisType.Explicit if kind == "explicit" else AxisType.Auto)
    parallel = Parallelism(**roles(axes) | options)
    run = partial(loss, config=config, parallel=parallel)
    with jax.set_mesh(mesh):
        if kind in ("check_vma", "shard_map"):
            by_token, specs = P(parallel.axes), parallel.specs(config, WIDTH, use_bias="b_down" in params)
            fields = dict.fromkeys(Routing._fields, P()) | {"experts": by_token, "weights": by_token}
            outs = (P(), (by_token, Routing(**fields)))
            run = jax.shard_map(run, in_specs=(specs, by_token), out_specs=outs, check_vma=kind == "check_vma")
        return jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))(params, x)


def assert_as_one_device(way, tokens, config: MoEConfig):
    params, x = random_parameters(config, use_bias=True), random_tokens(tokens)
    out, ref = over_devices(*way, params, x, config), step(params, x, config)
    assert_close(out, ref)
    routing, expected = out[0][1][1], ref[0][1][1]
    assert_same_bits(*((np.asarray(r.experts), np.asarray(r.demand)) for r in (routing, expected)))
