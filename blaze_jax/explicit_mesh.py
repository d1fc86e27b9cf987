"""Meshes with explicit axes, where an array's sharding is part of its type: the layer runs on each device's tokens.

There, loops and kernels would need a sharding for everything they make. Inside `jax.shard_map` they need none.
"""

import math
from collections.abc import Callable

import jax
from jax import P
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jaxtyping import Array, Float

from pallas_kernels.compat import axes_of_vmap


def explicit_mesh(*arrays) -> AbstractMesh | None:
    """The mesh with explicit axes that one of `arrays` is on, or that `jax.set_mesh` has set; None without one.

    Raises:
      NotImplementedError: an enclosing `vmap` takes its examples from devices along one of these axes.
    """
    for mesh in meshes_of(*arrays):
        if axes := explicit_axes(mesh):
            if split := ", ".join(sorted(axes & axes_of_vmap())):
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
    """The explicit mesh axes that split the first dimension of the first of `arrays` that is split there."""
    for array in arrays:
        spec = jax.typeof(array).sharding.spec
        if len(spec) and spec[0] is not None:
            return spec[0] if isinstance(spec[0], tuple) else (spec[0],)
    return ()


def reshard(tree, mesh: AbstractMesh, axes: tuple[str, ...] = ()):
    """Every array with its first dimension split over `axes`, and no other."""

    def one(array):
        rest = [None] * (array.ndim - 1)
        return jax.sharding.reshard(array, NamedSharding(mesh, P(axes or None, *rest) if array.ndim else P()))

    return jax.tree.map(one, tree)


def per_device(function: Callable, mesh: AbstractMesh, axes: tuple[str, ...], by_token, shared, out_specs: Callable):
    """`function(by_token, shared)` on each device, on its own part of `by_token` and all of `shared`.

    Args:
      function: what a device does; its collectives may use `axes`.
      mesh: with explicit axes.
      axes: those that split the tokens.
      by_token: tree of arrays whose first dimension counts tokens.
      shared: tree of arrays, the same on every device. Their gradients are summed over the devices.
      out_specs: specs of the results, from the spec of what is split by tokens.
    """
    spec = P(axes or None)
    run = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(spec, P()),
        out_specs=out_specs(spec),
        axis_names=explicit_axes(mesh),
        check_vma=False,  # with it jax 0.12 cannot differentiate the error function of a GELU
    )
    return jax.jit(run)(reshard(by_token, mesh, axes), reshard(shared, mesh))  # call by call it would take minutes


def flatten_tokens(x: Float[Array, "... d"], mesh: AbstractMesh | None) -> Float[Array, "T d"]:
    """The tokens in two dimensions, of which the first is split as that of `x` is; other splits are undone."""
    shape = (math.prod(x.shape[:-1]), x.shape[-1])
    if mesh is None:
        return x.reshape(shape)
    axes = token_axes(x) if x.ndim > 1 else ()
    return jax.lax.reshape(reshard(x, mesh, axes), shape, out_sharding=NamedSharding(mesh, P(axes or None, None)))


def restore_shape(y: Float[Array, "T d"], x: Float[Array, "... d"], mesh: AbstractMesh | None) -> Float[Array, "... d"]:
    """The tokens in the shape of `x`, and split as it is."""
    if mesh is None:
        return y.reshape(x.shape)
    axes = token_axes(x) if x.ndim > 1 else ()
    flat = NamedSharding(mesh, P(axes or None, *[None] * (x.ndim - 1)) if x.ndim > 1 else P(None))
    y = jax.lax.reshape(y, x.shape, out_sharding=flat)
    return jax.sharding.reshard(y, NamedSharding(mesh, P(*jax.typeof(x).sharding.spec)))


def explicit_axes(mesh) -> set[str]:
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in kinds if kind == AxisType.Explicit}
