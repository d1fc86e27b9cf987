"""The layers as flax.linen modules."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax import struct
from jax import P
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from blaze_jax.atomic_experts import AtomicConfig, draws
from blaze_jax.checks import check_dtypes
from blaze_jax.config import MoEConfig
from blaze_jax.exchange import Axes
from blaze_jax.experts import expert_ffn
from blaze_jax.layer import NewParameter, as_tokens, new_parameters, statistics
from blaze_jax.modules import (
    call_atomic_layer,
    call_layer,
    check_train,
    warn_of_atomic_evaluation,
    warn_of_frozen_bias,
    warn_of_frozen_statistics,
    warn_of_lost_losses,
    warn_of_missing_train,
)
from blaze_jax.parallelism import Parallelism
from blaze_jax.routing import AxisName


class Partitioned(nn.LogicallyPartitioned):
    """A parameter with a logical name for each axis, which knows over which axes of a mesh `Parallelism` splits these.

    To Flax's rules of logical names it is what `nn.LogicallyPartitioned` is. `nn.get_sharding` needs no rules for it.
    """

    mesh_axes: tuple[tuple[str, Axes | None], ...] = struct.field(default=(), pytree_node=False)

    __eq__ = nn.LogicallyPartitioned.__eq__

    def get_sharding(self, mesh: Mesh) -> NamedSharding:
        """How the parameter is split over `mesh`; an axis that `nn.scan` added is not."""
        split: dict[str | None, Axes | None] = dict(self.mesh_axes)
        return NamedSharding(mesh, P(*(split.get(name) for name in self.names)))


class MoE(nn.Module):
    """Mixture-of-Experts layer: router, routed experts, shared experts.

    Parameters are those of `config.parameters(d)`, boxed in a `nn.LogicallyPartitioned` with logical axis names, as
    `nn.with_logical_partitioning` does: `flax.linen.unbox(variables)` gives the plain arrays, and `apply` takes either.
    With `parallel`, `nn.get_sharding` of the boxes, or of an optimizer's, says how they are split over the mesh.

    What the layer tells the training loop goes into collections, and is lost, with a warning, where training does not
    make them mutable:

    - "losses": the weighted auxiliary losses, to be added to the training loss. Apply with `mutable=["losses"]`; in
      `nn.scan`, give `variable_axes={"losses": 0}`.
    - "router_state": with a selection bias, the variable "selection_bias", which a training step updates by
      `config.bias_update_rate`. Keep what `apply` returns of it; in `nn.scan`, `variable_axes={"router_state": 0}`.
    - "intermediates": load statistics.

    The collection "routing" records and replays the choice of experts, `(..., slots)` int32. Where it is mutable, the
    last call of an `apply` leaves its choice there; where it is given and not mutable, that choice is taken again, and
    only weighed anew: `y, recorded = apply(variables, x, mutable=["routing"])`, and then
    `apply({**variables, **recorded}, x)`. In `nn.scan`, `variable_axes={"routing": 0}`.

    A router with jitter takes a key of the stream "jitter" in training, `apply(..., rngs={"jitter": key})`; in
    `nn.scan`, `split_rngs={"jitter": True}`. Without jitter, the dropout of adapters takes one of the stream "dropout".

    Attributes:
      config: the layer.
      dtype: in which it computes, and of the output; None for the common dtype of the input and the experts'
        parameters. Say `jnp.bfloat16` for the fastest kernels: float32 parameters make the common dtype float32.
      param_dtype: the dtype of parameters that it initialises.
      use_bias: biases on all projections of the experts.
      kernel_init: initialiser of each expert's matrices.
      bias_init: initialiser of the biases.
      router_init: initialiser of the router's matrix.
      experts: what computes the experts, see `blaze_jax.moe`.
      train: whether it is training, unless the call says so. Under `nn.remat` say it here:
        `nn.remat(MoE)(config, train=True)(x)`.
      axis_name: mesh axes of an enclosing `jax.shard_map` that split the tokens, see `blaze_jax.moe`. Losses, demand
        and the selection bias are then the same on all devices.
      parallel: which axes of a mesh split tokens, experts and parameters, see `blaze_jax.moe`.
    """

    config: MoEConfig
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    use_bias: bool = False
    kernel_init: Callable = nn.initializers.lecun_normal()
    bias_init: Callable = nn.initializers.zeros_init()
    router_init: Callable = nn.initializers.lecun_normal()
    experts: Callable[..., Array] = expert_ffn
    train: bool | None = None
    axis_name: AxisName = None
    parallel: Parallelism | None = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "... d"],
        train: bool | None = None,
        *,
        skip: bool = False,
        mask: Bool[Array, "..."] | None = None,
        expert_ids: Int[Array, "... slots"] | None = None,
        segment_ids: Int[Array, "..."] | None = None,
    ) -> Float[Array, "... d"]:
        """Output for tokens of any leading shape.

        `train` turns on token rounding, the router's jitter and the selection bias's update; None takes the attribute,
        and without that counts as False. It must be a bool, not traced. Several calls in one `apply` each report their
        losses, and together move the selection bias once. A call that `nn.scan` repeats, or that has a `nn.remat` to
        itself, moves it alone.

        `skip` computes nothing: output, losses and statistics are zeros, and the selection bias stays. In `nn.cond` and
        `nn.switch` it stands in the branches without the layer, since all must report the same.

        `mask` is True for real tokens, `segment_ids` tell texts apart, and `expert_ids` are experts chosen earlier, see
        `blaze_jax.moe`. Without them, those of the collection "routing" are taken.
        """
        check_dtypes(dtype=self.dtype, param_dtype=self.param_dtype)
        x = as_tokens(x)
        train = check_train(self.train if train is None else train)
        initializers = {"router": self.router_init, "kernel": self.kernel_init, "bias": self.bias_init}
        options = {"use_bias": self.use_bias, "dtype": self.param_dtype, "initializers": initializers}
        new = new_parameters(self.config, x.shape[-1], self.parallel, **options)
        params = {}
        for name, parameter in new.items():

            def init(key, parameter: NewParameter = parameter):
                mesh_axes: Any = tuple(zip(parameter.axes, parameter.spec or (), strict=False))  # None for a name, too
                return Partitioned(parameter.draw(key), parameter.axes, mesh_axes=mesh_axes)

            params[name] = _parameter(self, name, init)

        state = bias = None
        if self.config.has_selection_bias:
            state = self.variable("router_state", "selection_bias", jnp.zeros, (self.config.num_experts,), jnp.float32)
            bias = state.value
        records = self.is_mutable_collection("routing") and not self.is_initializing()
        if expert_ids is None and not records and self.has_variable("routing", "experts"):
            expert_ids = self.get_variable("routing", "experts")
        stream = self.config.random_stream
        key = self.make_rng(stream) if train and stream and not skip else None
        given = {"mask": mask, "expert_ids": expert_ids, "segment_ids": segment_ids, "key": key}
        options = {"train": train, "skip": skip, **given}
        y, routing, moved = call_layer(self, params, x, bias, lasts=self, **options)

        if self.is_initializing():  # or the first losses would stay in the variables that init returns
            return y
        warn_of_missing_train(train, self.config)
        if records:
            self.put_variable("routing", "experts", routing.experts.reshape(*x.shape[:-1], routing.experts.shape[1]))
        sown = [self.sow("losses", name, loss) for name, loss in routing.weighted_losses.items()]
        if not all(sown):
            remedy = "apply with mutable=['losses'] (in nn.scan also variable_axes={'losses': 0})"
            warn_of_lost_losses(train, routing, remedy)
        for name, value in statistics(routing).items():
            self.sow("intermediates", name, value)
        if state is not None and moved is not None:
            if self.is_mutable_collection("router_state"):
                state.value = moved
            else:
                warn_of_frozen_bias("apply with mutable=['router_state'] (in nn.scan also variable_axes)")
        return y


class AtomicMoE(nn.Module):
    """A layer of experts of one neuron each, which a token finds by row and column; see `blaze_jax.atomic_moe`.

    Parameters are those of `config.parameters(d)`, boxed as those of `MoE` are. The collection "batch_stats" has the
    running statistics "mean" and "var", `(2, √E)` each, which a training step moves: apply with
    `mutable=["batch_stats"]`, and keep what it returns; in `nn.scan`, give `variable_axes={"batch_stats": 0}`. Training
    warns where they are not mutable. "intermediates" has the entropy.

    Attributes:
      config: the layer.
      dtype: in which it computes, and of the output; None for the common dtype of the input and the experts'
        parameters.
      param_dtype: the dtype of parameters that it initialises.
      kernel_init: initialiser of each expert's matrices, u `(d, 1)` and v `(1, d)`, and those of the dense FFN.
      router_init: initialiser of W_x and of W_y.
      train: whether it is training, unless the call says so. Under `nn.remat` say it here.
      axis_name: mesh axes of an enclosing `jax.shard_map` that split the tokens, see `blaze_jax.atomic_moe`.
      parallel: which axes of a mesh split the tokens, see `blaze_jax.atomic_moe`.
    """

    config: AtomicConfig
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: Callable = nn.initializers.lecun_normal()
    router_init: Callable = nn.initializers.lecun_normal()
    train: bool | None = None
    axis_name: AxisName = None
    parallel: Parallelism | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "... d"], train: bool | None = None, *, mask: Bool[Array, "..."] | None = None
    ) -> Float[Array, "... d"]:
        """Output for tokens of any leading shape.

        `train` normalises scores by these tokens, and moves the running statistics; None takes the attribute, and
        without that counts as False. It must be a bool, not traced. `mask` is True for real tokens.
        """
        check_dtypes(dtype=self.dtype, param_dtype=self.param_dtype)
        x = as_tokens(x)
        train = check_train(self.train if train is None else train)
        initializers = {"kernel_init": self.kernel_init, "router_init": self.router_init}
        params = {}
        for name, (parameter, draw) in draws(self.config, x.shape[-1], dtype=self.param_dtype, **initializers).items():

            def init(key, parameter=parameter, draw=draw):
                return Partitioned(draw(key), parameter.axes)

            params[name] = _parameter(self, name, init)

        start = self.config.batch_statistics()
        state = {name: self.variable("batch_stats", name, lambda value=value: value) for name, value in start.items()}
        statistics = {name: variable.value for name, variable in state.items()}
        y, routing = call_atomic_layer(self, params, x, statistics, train=train, mask=mask)
        if self.is_initializing():
            return y
        warn_of_atomic_evaluation(train)
        self.sow("intermediates", "entropy", routing.entropy)
        if train and not self.is_mutable_collection("batch_stats"):
            warn_of_frozen_statistics()
        elif train:
            for name, variable in state.items():
                variable.value = routing.batch_statistics[name]
        return y


def _parameter(module: nn.Module, name: str, init: Callable[[Array], Any]) -> Array:
    """The parameter of that name, drawn where it is not there.

    What is there need not be drawn: flax would trace a draw to compare shapes, which the layer does itself.
    """
    if module.has_variable("params", name):
        return nn.unbox(module.get_variable("params", name))
    return module.param(name, init)
