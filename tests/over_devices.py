"""The layer over the devices of a mesh, in the ways that users may call it, against the layer on one device."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding

from blaze_jax import MoEConfig, Parallelism, Routing
from blaze_jax.layer_observer import observed_layers
from blaze_jax.parallelism import ROLES
from tests.layers import WIDTH, loss, random_parameters, random_tokens
from tests.numerics import assert_close, assert_same_bits

INSIDE = ("shard_map", "check_vma")


class Way(NamedTuple):
    """A mesh, and how the layer is told of it.

    Attributes:
      axes: how many devices there are along each axis; those named like a role of `Parallelism` have it.
      kind: "auto" or "explicit" axes, "mixed" if the first one alone is explicit; "unset" for automatic ones of which
        the arrays alone tell; "check_vma", or without such a check "shard_map", if the call is inside of one over all.
      options: for `Parallelism`, beside the roles; None if there is none: `axis_name` then says inside of what.
      x: how the tokens are split; None leaves them where they are.
      params: how the parameters are, by name or all of them.
    """

    axes: dict[str, int]
    kind: str = "auto"
    options: dict | None = None
    x: P | None = None
    params: P | Mapping[str, P] | None = None


def make_mesh(axes: dict[str, int], kind: AxisType = AxisType.Auto, others: AxisType | None = None) -> Mesh:
    """A mesh of CPUs whose first axis is of this kind, and so are the others unless theirs is given."""
    kinds = (kind, *[others or kind] * (len(axes) - 1))
    devices = jax.devices("cpu")[: math.prod(axes.values())]  # a GPU may be the only one
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=devices)


def roles(axes: dict[str, int]) -> dict[str, str]:
    return {role: role for role in axes if role in ROLES}


def put(tree, spec, mesh: Mesh):
    """The arrays on the mesh, or where they were."""
    if isinstance(spec, Mapping):
        return {name: put(array, spec.get(name, P()), mesh) for name, array in tree.items()}
    return tree if spec is None else jax.device_put(tree, NamedSharding(mesh, spec))


def spec_of(array) -> P:
    return jax.typeof(array).sharding.spec


def axes_of(entry) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def gradients_of(run):
    """A function of parameters and tokens: loss with output and routing beside it, and the gradients to both.

    The entropy counts, too, and each token's routing weights otherwise: gradients notice in which order they come.
    """

    def total(params, x):
        value, (y, routing) = run(params, x)
        in_order = routing.weights.T @ jnp.linspace(0, 1, len(routing.weights))
        return value + routing.entropy + in_order.sum(), (y, routing)

    return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)


@partial(jax.jit, static_argnums=2)
def on_one_device(params, x, config: MoEConfig):
    return gradients_of(partial(loss, config=config))(params, x)


def over_devices(way: Way, params, x, config: MoEConfig):
    """What `on_one_device` returns."""
    kinds = {"explicit": (AxisType.Explicit,), "mixed": (AxisType.Explicit, AxisType.Auto)}
    mesh = make_mesh(way.axes, *kinds.get(way.kind, ()))
    parallel = None if way.options is None else Parallelism(**roles(way.axes) | way.options)
    run = partial(loss, config=config, parallel=parallel)
    with nullcontext() if way.kind == "unset" else jax.set_mesh(mesh):
        if way.kind in INSIDE:
            axes, specs = tuple(way.axes), P()
            if parallel:
                axes, specs = parallel.axes, parallel.specs(config, WIDTH, use_bias="b_down" in params)
            else:
                run = partial(run, axis_name=axes)
            fields = dict.fromkeys(Routing._fields, P()) | {"experts": P(axes), "weights": P(axes)}
            outs = (P(), (P(axes), Routing(**fields)))
            run = jax.shard_map(run, in_specs=(specs, P(axes)), out_specs=outs, check_vma=way.kind == "check_vma")
        return jax.jit(gradients_of(run))(put(params, way.params, mesh), put(x, way.x, mesh))


def assert_as_one_device(
    way: Way, config: MoEConfig, *leading: int, per_device: int | None = None, tolerance: float | None = None
) -> None:
    """The same numbers, to that tolerance; of so many tokens on each device; split as explicit arguments are."""
    params, x = random_parameters(config, use_bias=True), random_tokens(*leading)
    with observed_layers() as layers:
        out = over_devices(way, params, x, config)
    expected = on_one_device(params, x, config)
    assert_close(out, expected, tolerance)
    (_, (y, routing)), (d_params, dx) = out
    of_one = expected[0][1][1]
    assert_same_bits(*((np.asarray(r.experts), np.asarray(r.demand)) for r in (routing, of_one)))
    assert per_device is None or {layer.num_tokens for layer in layers} == {per_device}
    if way.kind in ("explicit", "mixed") and (way.options is None or way.x):
        spec = way.x or P()
        assert spec_of(y) == spec_of(dx) == P(*spec, *[None] * (x.ndim - len(spec)))
        by_token = {axis for entry in spec[: x.ndim - 1] for axis in axes_of(entry)}
        for array in (routing.experts, routing.weights) if way.options is None else ():
            assert set(axes_of(spec_of(array)[0])) == by_token
        for name, wanted in way.params.items() if isinstance(way.params, Mapping) else ():
            assert spec_of(d_params[name]) == P(*wanted, *[None] * (params[name].ndim - len(wanted)))
