"""The layers as flax.nnx modules: same parameter names, shapes and numbers as the linen ones."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from blaze_jax.adapters import is_adapter
from blaze_jax.atomic_experts import STATISTICS, AtomicConfig, draws
from blaze_jax.checks import check_dtypes
from blaze_jax.config import MoEConfig, check_config
from blaze_jax.experts import expert_ffn
from blaze_jax.layer import NewParameter, as_tokens, new_parameters, statistics
from blaze_jax.modules import (
    call_atomic_layer,
    call_layer,
    check_train,
    warn_of_atomic_evaluation,
    warn_of_lost_losses,
    warn_of_missing_train,
)
from blaze_jax.parallelism import Parallelism, mesh_of
from blaze_jax.routing import AxisName
from pallas_kernels.compat import is_traced


class AuxiliaryLoss(nnx.Variable):
    """A weighted loss the layer asks to be added to the training loss; collect it with `nnx.capture`."""


class ChosenExperts(nnx.Variable):
    """The experts of each token of a call, `(..., slots)` int32; collect them with `nnx.capture` to replay them."""


class RouterState(nnx.Variable):
    """The selection bias of loss-free balancing: state that training updates without a gradient."""


class MoE(nnx.Module):
    """Mixture-of-Experts layer: router, routed experts, shared experts.

    Parameters are those of `config.parameters(model_width)` as `nnx.Param`, with logical axis names in the metadata
    `out_sharding`. With `parallel` and a mesh, its own or that of `jax.set_mesh`, these are the mesh axes that split
    them, and Flax places them when they are made, and the moments of an `nnx.Optimizer`.

    Adapters are `nnx.LoRAParam`: give that to `nnx.Optimizer` as `wrt`, and to `nnx.grad` as `nnx.DiffState(0, wrt)`.

    Under `nnx.capture(..., AuxiliaryLoss, nnx.Intermediate)` the weighted auxiliary losses and the load statistics are
    sown; outside it they are lost, and training warns of lost losses. A selection bias is the variable `selection_bias`
    of type `RouterState`, which a training step updates by `config.bias_update_rate`.

    Args:
      model_width: d.
      config: the layer.
      dtype: in which it computes, and of the output; None for the common dtype of the input and the experts'
        parameters. Say `jnp.bfloat16` for the fastest kernels: float32 parameters make the common dtype float32.
      param_dtype: the dtype of parameters that it initialises.
      use_bias: biases on all projections of the experts.
      kernel_init: initialiser of each expert's matrices.
      bias_init: initialiser of the biases.
      router_init: initialiser of the router's matrix.
      experts: what computes the experts, see `blaze_jax.moe`.
      train: whether it is training, unless the call says so; `module.train()` and `module.eval()` set it, too.
      axis_name: mesh axes of an enclosing `jax.shard_map` that split the tokens, see `blaze_jax.moe`. Losses, demand
        and the selection bias are then the same on all devices.
      parallel: which axes of a mesh split tokens, experts and parameters, see `blaze_jax.moe`.
      rngs: its stream `params` initialises the parameters. Of a router with jitter, the module keeps a fork of its
        stream `jitter`, of which a call in training takes a key; without jitter, and for adapters' dropout, of
        `dropout`.
    """

    def __init__(
        self,
        model_width: int,
        config: MoEConfig,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        use_bias: bool = False,
        kernel_init: Callable = nnx.initializers.lecun_normal(),
        bias_init: Callable = nnx.initializers.zeros_init(),
        router_init: Callable = nnx.initializers.lecun_normal(),
        experts: Callable[..., Array] = expert_ffn,
        train: bool | None = None,
        axis_name: AxisName = None,
        parallel: Parallelism | None = None,
        rngs: nnx.Rngs,
    ):
        check_dtypes(dtype=dtype, param_dtype=param_dtype)
        train = check_train(train)
        self.config = check_config(config)
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.experts = experts
        self.deterministic = None if train is None else not train  # the name that `train()` and `eval()` look for
        self.axis_name = axis_name
        self.parallel = parallel
        initializers = {"router": router_init, "kernel": kernel_init, "bias": bias_init}
        options = {"use_bias": use_bias, "dtype": param_dtype, "initializers": initializers}
        parameters = new_parameters(config, model_width, parallel, **options)
        self.parameter_names = tuple(parameters)
        for name, parameter in parameters.items():
            kind = nnx.LoRAParam if is_adapter(name) else nnx.Param
            setattr(self, name, kind(parameter.draw(rngs.params()), **_sharding(parameter, parallel)))
        if config.random_stream:
            self.rngs = rngs[config.random_stream].fork()
        if config.has_selection_bias:
            self.selection_bias = RouterState(jnp.zeros(config.num_experts, jnp.float32))

    def set_view(self, deterministic: bool | None = None) -> None:
        """Class method used by `nnx.view`.

        Args:
          deterministic: if True, it evaluates; if False, it trains.
        """
        if deterministic is not None:
            self.deterministic = deterministic

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

        `train` turns on token rounding, the router's jitter and the selection bias's update; None takes what the module
        was told, and without that counts as False. It must be a bool, not traced. Several calls in one `nnx.grad` or
        `nnx.jit` each report their losses, and together move the selection bias once. A call that `nnx.scan` repeats,
        or that has a `nnx.remat` to itself, moves it alone.

        `skip` computes nothing: output, losses and statistics are zeros, and the selection bias stays. In `nnx.cond`
        and `nnx.switch` it stands in the branches without the layer, since all must report the same.

        `mask` is True for real tokens, `segment_ids` tell texts apart, and `expert_ids` are experts chosen earlier, see
        `blaze_jax.moe`.
        `nnx.capture(model, blaze_jax.nnx.ChosenExperts)` records those of a call.
        """
        train = _phase(self, train)
        warn_of_missing_train(train, self.config)
        params = {name: getattr(self, name).get_value() for name in self.parameter_names}
        bias = self.selection_bias[...] if self.config.has_selection_bias else None
        lasts = self if is_traced() else None  # what jax does not trace outlives the step
        key = self.rngs() if train and self.config.random_stream and not skip else None
        given = {"mask": mask, "expert_ids": expert_ids, "segment_ids": segment_ids, "key": key}
        x, options = as_tokens(x), {"train": train, "skip": skip, **given}
        y, routing, moved = call_layer(self, params, x, bias, lasts=lasts, **options)

        losses = routing.weighted_losses.items()
        sown = [self.sow(AuxiliaryLoss, name, loss, capture_noop=True) for name, loss in losses]
        if any(was is False for was in sown):  # to `nnx.tabulate` it is a traced value
            remedy = (
                "call the model through nnx.capture(..., blaze_jax.nnx.AuxiliaryLoss), inside the module where "
                "nnx.bridge.to_linen wraps one,"
            )
            warn_of_lost_losses(train, routing, remedy)
        chosen = routing.experts.reshape(*x.shape[:-1], routing.experts.shape[1])
        self.sow(ChosenExperts, "chosen_experts", chosen, capture_noop=True)
        for name, value in statistics(routing).items():
            self.sow(nnx.Intermediate, name, value, capture_noop=True)
        if moved is not None:
            self.selection_bias[...] = moved
        return y


class AtomicMoE(nnx.Module):
    """A layer of experts of one neuron each, which a token finds by row and column; see `blaze_jax.atomic_moe`.

    Parameters are those of `config.parameters(model_width)` as `nnx.Param`, with logical axis names in the metadata
    `out_sharding`. The running statistics `mean` and `var`, `(2, √E)` each, are `nnx.BatchStat`, and move in training.
    Under `nnx.capture(..., nnx.Intermediate)` the entropy is sown.

    Args:
      model_width: d.
      config: the layer.
      dtype: in which it computes, and of the output; None for the common dtype of the input and the experts'
        parameters.
      param_dtype: the dtype of parameters that it initialises.
      kernel_init: initialiser of each expert's matrices, u `(d, 1)` and v `(1, d)`, and those of the dense FFN.
      router_init: initialiser of W_x and of W_y.
      train: whether it is training, unless the call says so; `module.train()` and `module.eval()` set it, too.
      axis_name: mesh axes of an enclosing `jax.shard_map` that split the tokens, see `blaze_jax.atomic_moe`.
      parallel: which axes of a mesh split the tokens, see `blaze_jax.atomic_moe`.
      rngs: its stream `params` initialises the parameters.
    """

    def __init__(
        self,
        model_width: int,
        config: AtomicConfig,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable = nnx.initializers.lecun_normal(),
        router_init: Callable = nnx.initializers.lecun_normal(),
        train: bool | None = None,
        axis_name: AxisName = None,
        parallel: Parallelism | None = None,
        rngs: nnx.Rngs,
    ):
        check_dtypes(dtype=dtype, param_dtype=param_dtype)
        train = check_train(train)
        initializers = {"kernel_init": kernel_init, "router_init": router_init}
        parameters = draws(config, model_width, dtype=param_dtype, **initializers)
        self.config = config
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.deterministic = None if train is None else not train  # the name that `train()` and `eval()` look for
        self.axis_name = axis_name
        self.parallel = parallel
        self.parameter_names = tuple(parameters)
        for name, (parameter, draw) in parameters.items():
            setattr(self, name, nnx.Param(draw(rngs.params()), out_sharding=parameter.axes, eager_sharding=False))
        for name, value in config.batch_statistics().items():
            setattr(self, name, nnx.BatchStat(value))

    set_view = MoE.set_view

    def __call__(
        self, x: Float[Array, "... d"], train: bool | None = None, *, mask: Bool[Array, "..."] | None = None
    ) -> Float[Array, "... d"]:
        """Output for tokens of any leading shape.

        `train` normalises scores by these tokens, and moves the running statistics; None takes what the module was
        told, and without that counts as False. It must be a bool, not traced. `mask` is True for real tokens.
        """
        train = _phase(self, train)
        warn_of_atomic_evaluation(train)
        params = {name: getattr(self, name)[...] for name in self.parameter_names}
        statistics = {name: getattr(self, name)[...] for name in STATISTICS}
        y, routing = call_atomic_layer(self, params, as_tokens(x), statistics, train=train, mask=mask)
        self.sow(nnx.Intermediate, "entropy", routing.entropy, capture_noop=True)
        if train:
            for name, value in routing.batch_statistics.items():
                getattr(self, name)[...] = value
        return y


def _phase(module: MoE | AtomicMoE, train: bool | None) -> bool | None:
    """Whether a call is training: as it says, or else as the module was told."""
    if train is None and module.deterministic is not None:
        train = not module.deterministic
    return check_train(train)


def _sharding(parameter: NewParameter, parallel: Parallelism | None) -> dict[str, Any]:
    """The metadata that tells Flax where the parameter is placed, and an optimizer's moments of it."""
    if parallel is None or parameter.spec is None:  # which mesh axes the logical names mean is the user's to say
        return {"out_sharding": parameter.axes, "eager_sharding": False}
    mesh = mesh_of(parallel)
    of_one_kind = mesh is not None and len(set(mesh.axis_types)) == 1  # Flax places nothing on a mesh of mixed axes
    own = {} if parallel.mesh is None else {"mesh": parallel.mesh}
    return {"out_sharding": tuple(parameter.spec), "eager_sharding": of_one_kind, **own}
