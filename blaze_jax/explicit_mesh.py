"""Meshes with explicit axes, where an array's sharding is part of its type: the layer runs on each device's tokens.

There, loops and kernels would need a sharding for everything they make. Inside `jax.shard_map` they need none.
"""

import math
from collections.abc import Callable

import jax
from jax import P
from jax.sharding import AbstractMesh, NamedSharding
from jaxtyping import Array, Float

from blaze_jax.exchange import Axes, names_of
from pallas_kernels.compat import axes_of_vmap


def explicit_mesh(*arrays) -> AbstractMesh | None:
    """The mesh with explicit axes that one of `arrays` is on, or that `jax.set_mesh` has set; None without one.

    Raises:
      NotImplementedError: an enclosing `vmap` takes its examples from devices along one of these axes.
    """
    for mesh in meshes_of(*arrays):
        if mesh.explicit_axes:
            if split := ", ".join(sorted(axes_of_vmap().intersection(mesh.explicit_axes))):
                raise NotImplementedError(
                    f"vmap over examples that are split over the explicit mesh axis {split}: call the layer without "
                    "vmap, since tokens may have any leading dimensions, or put the vmap inside jax.shard_map"
                )
            return mesh
    return None


def meshes_of(*arrays) -> list[AbstractMesh]:
    """The meshes in the types of `arrays`, and that of `jax.set_mesh`; none is empty."""
    meshes = [jax.typeof(array).sharding.mesh for array in jax.tree.leaves(arrays)]
    return [mesh for mesh in (*meshes, jax.sharding.get_abstract_mesh()) if mesh.axis_names]


def token_axes(*arrays: Array) -> tuple[str, ...]:
    """The explicit mesh axes that split any dimension but the last, of the first of `arrays` that is split there."""
    for array in arrays:
        if axes := tuple(axis for names in _leading(array) for axis in names_of(names)):
            return axes
    return ()


def _leading(x: Array) -> tuple[Axes | None, ...]:
    """The mesh axes that split each dimension but the last."""
    return tuple(jax.typeof(x).sharding.spec)[:-1]


def placed(tree, spec: P, mesh: AbstractMesh | None):
    """Arrays split as `spec` says: along explicit axes, where it has to be said; along others it must not be."""
    if mesh is None:
        return tree
    said = P(*(tuple(name for name in names_of(axes) if name in mesh.explicit_axes) or None for axes in spec))
    return jax.tree.map(lambda array: jax.sharding.reshard(array, NamedSharding(mesh, said)), tree)


def per_device(
    function: Callable, mesh, in_specs: tuple, out_specs, *args, explicit: AbstractMesh | None = None, axes=None
):
    """`function(*args)` on each device, on its own parts of the arguments.

    Args:
      function: what a device does.
      mesh: of these devices.
      in_specs: how each argument is split, or each array of one. Gradients of those that are not are summed.
      out_specs: how the results are.
      *args: trees of arrays.
      explicit: the mesh with explicit axes on which the arrays are; None without one.
      axes: the mesh axes that `function` may use in collectives; None for the explicit ones.
    """
    axes = set(mesh.explicit_axes) if axes is None else axes
    # With check_vma jax 0.12 cannot differentiate the error function of a GELU.
    options = {"in_specs": in_specs, "out_specs": out_specs, "axis_names": axes, "check_vma": False}
    args = jax.tree.map(lambda spec, part: placed(part, spec, explicit), in_specs, args)
    return jax.jit(jax.shard_map(function, mesh=mesh, **options))(*args)  # call by call it would take minutes


def flatten_tokens(x: Float[Array, "... d"], mesh: AbstractMesh | None, in_order: bool) -> Float[Array, "T d"]:
    """The tokens in two dimensions, of which the first is split over all axes that split tokens in `x`.

    Without `in_order`, each device keeps its own: where `x` is split past its first dimension, their order is another.
    """
    shape = (math.prod(x.shape[:-1]), x.shape[-1])
    if mesh is None:
        return x.reshape(shape)
    flat, split = P(token_axes(x) or None, None), P(*_leading(x), None)
    x = jax.sharding.reshard(x, NamedSharding(mesh, split))
    if _is_in_order(x, in_order):
        return jax.lax.reshape(x, shape, out_sharding=NamedSharding(mesh, flat))
    return _here(lambda part: part.reshape(-1, part.shape[-1]), mesh, split, flat)(x)


def restore_shape(
    y: Float[Array, "T d"], x: Float[Array, "... d"], mesh: AbstractMesh | None, in_order: bool
) -> Float[Array, "... d"]:
    """The tokens of `flatten_tokens(x, ...)` in the shape of `x`, and split as it is."""
    y = unflattened(y, x, mesh, in_order)
    return y if mesh is None else jax.sharding.reshard(y, NamedSharding(mesh, jax.typeof(x).sharding.spec))


def in_sequences(by_token, x: Float[Array, "... d"], mesh: AbstractMesh | None):
    """Arrays with the leading dimensions of `x`, split as they are, but not along the last, that of a sequence."""
    return placed(by_token, P(*_leading(x)[:-1]), mesh)


def tokens_in_order(by_token, x: Float[Array, "... d"], mesh: AbstractMesh | None, in_order: bool):
    """Arrays `(T, n)` of what there is of each token of `flatten_tokens(x, ...)`, in the order of the tokens in `x`."""
    if mesh is None or _is_in_order(x, in_order):
        return by_token
    return jax.tree.map(lambda a: flatten_tokens(unflattened(a, x, mesh, False), mesh, True), by_token)


def unflattened(y: Float[Array, "T n"], x: Float[Array, "... d"], mesh: AbstractMesh | None, in_order: bool):
    """`(..., n)`, with the leading dimensions of `x` and split as they are."""
    shape, flat, split = (*x.shape[:-1], y.shape[-1]), P(token_axes(x) or None, None), P(*_leading(x), None)
    if mesh is None:
        return y.reshape(shape)
    y = jax.sharding.reshard(y, NamedSharding(mesh, flat))
    if _is_in_order(x, in_order):
        return jax.lax.reshape(y, shape, out_sharding=NamedSharding(mesh, split))
    part = NamedSharding(mesh, split).shard_shape(shape)
    return _here(lambda y: y.reshape(part), mesh, flat, split)(y)


def _is_in_order(x: Array, in_order: bool) -> bool:
    return in_order or not any(_leading(x)[1:])


def _here(function: Callable, mesh: AbstractMesh, spec: P, out_spec: P) -> Callable:
    """`function` of each device's own part of an array: nothing travels."""
    axes = {axis for names in spec for axis in names_of(names)}
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=out_spec, axis_names=axes))
