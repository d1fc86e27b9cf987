"""Which axes of a mesh split what: tokens, experts, their width, and the parameters at rest."""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, get_args

import jax
from jax import P
from jax.sharding import AbstractMesh, Mesh

from blaze_jax.checks import check_booleans, check_fields, check_integers, check_numbers
from blaze_jax.config import MoEConfig, Parameter
from blaze_jax.exchange import Axes, Exchange, names_of

ROLES = ("data", "fsdp", "expert", "tensor")
"""The roles that a mesh axis may have."""


@dataclass(frozen=True)
class Parallelism:
    """A layer over the devices of a mesh. Each role has an axis, several, or none; every axis splits the tokens, too.

    An axis of the mesh without a role counts as `data`, if it is automatic or splits the tokens already.

    Attributes:
      mesh: has these axes; None for that of `jax.set_mesh`, of the arrays' types, or of an enclosing `jax.shard_map`.
      data: splits nothing but tokens: every device along it has all that it computes with.
      fsdp: splits the parameters at rest. A layer gathers its own in the dtype of the tokens, and scatters the sums of
        their gradients.
      expert: splits the experts. A device sends its tokens to the experts and gets their outputs back.
      tensor: splits each expert's width n in the same way.
      exchange: how tokens travel along `expert` and `tensor`. "permute": to every device, by collective-permutes; the
        Hopper kernels compute them as they arrive, a device's own first. "all_gather": the same, all at once.
        "all_to_all": each token once to each device that has an expert of its. None for "permute" to K devices, and
        "all_to_all" to more, which moves fewer bytes.
      chunks: a device's tokens travel in so many parts, each while the experts compute another.
      row_budget: rows of a device's buffers, as a multiple of its even share of the pairs (of as many as `mean_experts`
        makes, where a configuration says that). Rows beyond it are computed in further
        turns, and again in the backward pass: no routing drops a pair or needs more memory. None for buffers that hold
        whatever may come.
      keep_gathered: whether the backward pass keeps gathered tokens and parameters, or gathers them again.

    Raises:
      ValueError: an axis has two roles, none has any, or a field does not fit.
    """

    mesh: Mesh | AbstractMesh | None = None
    _: KW_ONLY
    data: Axes = ()
    fsdp: Axes = ()
    expert: Axes = ()
    tensor: Axes = ()
    exchange: Exchange | None = None
    chunks: int = 1
    row_budget: float | None = 1.25
    keep_gathered: bool = False

    def __post_init__(self):
        for role in ROLES:
            axes = getattr(self, role)
            if not isinstance(axes, str | tuple) or not all(isinstance(axis, str) for axis in axes):
                raise ValueError(f"{role}={axes!r} must be the name of a mesh axis, or a tuple of names")
        if not self.axes or len(set(self.axes)) < len(self.axes):
            roles = ", ".join(f"{role}={getattr(self, role)}" for role in ROLES)
            raise ValueError(f"{roles}: at least one mesh axis must have a role, and none two")
        check_integers(chunks=self.chunks)
        if self.row_budget is not None:
            check_numbers(row_budget=self.row_budget)
        check_booleans(keep_gathered=self.keep_gathered)
        exchanges, budget = get_args(Exchange), self.row_budget
        rules = {
            "exchange": (self.exchange in (None, *exchanges), f"None or one of {', '.join(exchanges)}"),
            "chunks": (self.chunks >= 1, "at least 1"),
            "row_budget": (budget is None or 0 < budget < math.inf, "above 0 and finite, or None"),
        }
        check_fields(self, rules)

    def exchange_for(self, experts_per_token: int, devices: int) -> Exchange:
        """How tokens travel in a group of so many devices."""
        return self.exchange or ("permute" if devices <= experts_per_token else "all_to_all")

    def axes_of(self, role: str) -> tuple[str, ...]:
        """The axes with that role."""
        return names_of(getattr(self, role))

    @property
    def axes(self) -> tuple[str, ...]:
        """All of them, in the order in which they split the tokens."""
        return tuple(axis for role in ROLES for axis in self.axes_of(role))

    @property
    def group(self) -> tuple[str, ...]:
        """The axes along which tokens travel."""
        return (*self.axes_of("expert"), *self.axes_of("tensor"))

    def specs(
        self, config: MoEConfig, model_width: int, *, use_bias: bool = False, sizes: Mapping[str, int] | None = None
    ) -> dict[str, P]:
        """How each parameter of `config.parameters(model_width)` is split, by name.

        Experts are split over `expert` and, where that divides them, over `fsdp`, which else splits their embedding,
        or latent space; n over `tensor`. What every token passes through, the router, the shared experts and the
        projections of a latent space, is split at rest over all of these.

        Args:
          config: the layer.
          model_width: d.
          use_bias: biases on all projections of the experts.
          sizes: devices along each axis; None to look at the mesh.

        Raises:
          ValueError: the mesh lacks an axis, or the devices along one do not divide what it splits.
        """
        sizes = self.sizes() if sizes is None else sizes
        fsdp, expert, tensor = map(self.axes_of, ("fsdp", "expert", "tensor"))

        def check(role: str, name: str, size: int) -> None:
            axes = self.axes_of(role)
            if size % _devices(axes, sizes):
                along = f"{_devices(axes, sizes)} devices along {' and '.join(map(repr, axes))}, the {role} axis"
                raise ValueError(f"{name}={size} must be a multiple of the {along}")

        check("expert", "num_experts", config.num_experts)
        check("tensor", "expert_width", config.expert_width)
        parts: dict[Any, tuple[str, ...]] = {"lora_rank": (), "expert": expert, "expert_mlp": tensor}
        parts |= {"embed": fsdp, "latent": fsdp}
        if config.num_experts % _devices((*expert, *fsdp), sizes) == 0:
            parts |= {"expert": (*expert, *fsdp), "embed": (), "latent": ()}
        elif config.latent_width:
            check("fsdp", "latent_width", config.latent_width)
        else:
            check("fsdp", "model_width", model_width)
        specs = {}
        for name, parameter in config.parameters(model_width, use_bias=use_bias).items():
            if parameter.axes[0] == "expert" and len(parameter.axes) > 1:  # each expert has its own
                specs[name] = P(*(parts[axis] or None for axis in parameter.axes))
            else:
                specs[name] = self.dense_spec(parameter.shape, sizes)
        return specs

    def shards(self, config: MoEConfig, model_width: int, *, use_bias: bool = False) -> dict[str, Parameter]:
        """`config.parameters`, with the shapes that one device has."""
        sizes = self.sizes()
        specs = self.specs(config, model_width, use_bias=use_bias, sizes=sizes)
        parameters = config.parameters(model_width, use_bias=use_bias)
        for name, parameter in parameters.items():
            parts = zip(parameter.shape, specs[name], strict=True)
            shape = tuple(size // _devices(names_of(axes), sizes) for size, axes in parts)
            parameters[name] = parameter._replace(shape=shape)
        return parameters

    def dense_spec(self, shape: tuple[int, ...], sizes: Mapping[str, int] | None = None) -> P:
        """How an array of which every token needs all is split at rest: over as many devices as divide a dimension."""
        sizes = self.sizes() if sizes is None else sizes
        for axes in ((*self.axes_of("fsdp"), *self.group), self.axes_of("fsdp")):
            devices = _devices(axes, sizes)
            for dimension, size in enumerate(shape):
                if devices > 1 and size % devices == 0:
                    return P(*[None] * dimension, axes, *[None] * (len(shape) - dimension - 1))
        return P(*[None] * len(shape))

    def sizes(self, mesh: Mesh | AbstractMesh | None = None) -> dict[str, int]:
        """Devices along each axis of the mesh; None for its own, or that of `jax.set_mesh`.

        Raises:
          ValueError: there is no mesh, or it lacks an axis.
        """
        mesh = mesh or mesh_of(self) or jax.sharding.get_abstract_mesh()
        if missing := [axis for axis in self.axes if axis not in mesh.axis_names]:
            has = f"the mesh has {', '.join(map(repr, mesh.axis_names))}" if mesh.axis_names else "there is no mesh"
            raise ValueError(
                f"{has}, but axis {missing[0]!r} has a role: make the mesh with it and give it to jax.set_mesh or "
                "Parallelism(mesh, ...)"
            )
        return {axis: mesh.shape[axis] for axis in self.axes}


def mesh_of(parallel: Parallelism) -> Mesh | AbstractMesh | None:
    """The mesh that it was given, or that of `jax.set_mesh`; None without one."""
    mesh = parallel.mesh or jax.sharding.get_abstract_mesh()
    return mesh if mesh.axis_names else None


def is_inside_shard_map(parallel: Parallelism) -> bool:
    """Whether an enclosing `jax.shard_map` is over all these axes; ValueError if it is over some."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    inside = [axis for axis in parallel.axes if axis in manual]
    if inside and len(inside) < len(parallel.axes):
        missing = ", ".join(axis for axis in parallel.axes if axis not in manual)
        raise ValueError(
            f"jax.shard_map is over {', '.join(inside)} but not over {missing}: it must be over all or none"
        )
    return bool(inside)


def transport_options() -> dict[str, str]:
    """Options of XLA for programs over several devices: `jax.jit(step, compiler_options=transport_options())`.

    Devices of one process then get each other's tokens and parameters by copy engines, faster than by NCCL's kernels,
    which take multiprocessors from the experts. Across processes there are no such options.
    """
    return {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"} if jax.process_count() == 1 else {}


def _devices(axes: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)
