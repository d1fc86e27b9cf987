"""The optimizer, the training step and the evaluation, as functions of arrays."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt8

from blaze_jax import cast_experts, expert_ffn, with_casts
from train_example.config import TrainConfig
from train_example.model import Decoder, Tree, adapters_of, layers_apart, stacked, together

type Report = dict[str, Array]
type Batch = UInt8[Array, "A M S+1"] | UInt8[np.ndarray, "A M S+1"]

_WARMUP_SHARE = 0.05
_FINAL_SHARE = 0.1
CLIP_NORM = 1.0
BETAS: dict[str, Any] = {"b1": 0.9, "b2": 0.95}
_EXPERT_MATRICES = ("w_gate", "w_up", "w_down")
_FLOAT32_PARAMETERS = ("scale", "w_router", "b_router", "sinks")
"""How the names of parameters begin that are not computed with in 16 bits."""

OPTIMIZERS: dict[str, Callable[[TrainConfig], optax.GradientTransformation]] = {}
"""What makes the optimizers that are not optax's, by their names in a configuration; `program` adds its own."""

_LOGITS = 2**26
"""Logits that are in memory at a time beside a frozen head: 256 MiB."""


class TrainState(NamedTuple):
    """All that training carries from step to step; what a checkpoint holds.

    Attributes:
      step: int32, optimizer steps done.
      params: parameters, float32 but with adam8; those of unrolled blocks as `layers_apart` has them.
      router_state: the routers' selection biases, empty where there are none.
      optimizer_state: moments of the optimizer.
      frozen: what is not trained beside adapters, which alone `params` are then; a checkpoint does not hold it.
    """

    step: Int[Array, ""]
    params: Tree
    router_state: Tree
    optimizer_state: Tree
    frozen: Tree = {}  # noqa: RUF012  (nobody writes into it)


class StepMetrics(NamedTuple):
    """The numbers that a step reports.

    Attributes:
      loss: cross entropy in nats per byte, the mean over the batch.
      auxiliary_loss: sum of the layers' weighted auxiliary losses.
      gradient_norm: norm of all gradients together, before clipping.
      learning_rate: the rate that this step took.
      tokens_per_expert: int32, the load of every expert of every Mixture-of-Experts layer, first to last; a dense twin
        of such a layer is one expert, which every token takes.
    """

    loss: Float[Array, ""]
    auxiliary_loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    learning_rate: Float[Array, ""]
    tokens_per_expert: Int[Array, "layers E"]


def learning_rate_schedule(config: TrainConfig) -> optax.Schedule:
    """Linear warm-up over the first 5 % of the schedule's steps, then a cosine down to a tenth of the peak."""
    steps = config.schedule_steps or config.steps
    warmup = max(1, round(_WARMUP_SHARE * steps))
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / warmup,  # the first step already learns
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(steps, warmup + 1),
        end_value=_FINAL_SHARE * config.learning_rate,
    )


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW behind a clipped gradient; of the experts alone, where nothing else is trained."""
    if config.optimizer in OPTIMIZERS:
        return OPTIMIZERS[config.optimizer](config)
    options = BETAS | {"mu_dtype": config.momentum_dtype, "weight_decay": config.weight_decay, "mask": matrices}
    adam = optax.adamw(learning_rate_schedule(config), **options)
    if config.trained == "experts":  # moments of the others would be most of the memory that this saves
        adam = optax.masked(adam, experts_only)
    return optax.chain(optax.clip_by_global_norm(CLIP_NORM), adam)


def experts_only(params: optax.Params) -> optax.Params:
    """Marks the experts' matrices."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in _EXPERT_MATRICES, params)


def matrices(params: optax.Params) -> optax.Params:
    """Marks what weight decay applies to. Told by name: a stack of norm scales has two axes like a matrix."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "scale", params)


def init_state(config: TrainConfig, model: Decoder, seed: Int[Array, ""] | None = None) -> TrainState:
    """The state before the first step, from the configuration's seed or another; of adapters, without their base."""
    looped = model.clone(unroll=False)  # the same numbers, from a program that compiles in a tenth of the time
    variables = nn.unbox(
        looped.init(jax.random.key(config.seed if seed is None else seed), jnp.zeros((1, 1), jnp.int32))
    )
    params = layers_apart(model.config, variables["params"]) if model.unroll else variables["params"]
    params = params if model.moe.adapter is None else adapters_of(params)
    return TrainState(jnp.int32(0), params, variables.get("router_state", {}), make_optimizer(config).init(params))


def make_train_step(
    config: TrainConfig, model: Decoder
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """A step over A microbatches of M sequences, whose gradients are averaged before the one update."""
    optimizer, schedule = make_optimizer(config), learning_rate_schedule(config)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        grads, (router_state, report) = _gradients(model, state, batch)
        with jax.named_scope("optimizer"):
            # Where the optimizer reads them, for no float32 gradients in memory.
            grads = jax.tree.map(lambda gradient: gradient.astype(jnp.float32), grads)
            if config.trained == "experts":  # the compiler then leaves out what only the others' gradients need
                grads = jax.tree.map(lambda g, kept: g if kept else jnp.zeros_like(g), grads, experts_only(grads))
            updates, optimizer_state = optimizer.update(grads, state.optimizer_state, state.params)
            params = optax.apply_updates(state.params, updates)
            gradient_norm = optax.tree.norm(grads)
        metrics = StepMetrics(gradient_norm=gradient_norm, learning_rate=jnp.asarray(schedule(state.step)), **report)
        return TrainState(state.step + 1, params, router_state, optimizer_state, state.frozen), metrics

    return train_step


def make_evaluation(model: Decoder) -> Callable[[TrainState, Batch], Float[Array, ""]]:
    """Cross entropy in nats per byte, the mean over all windows, a microbatch at a time.

    Its blocks are a loop also where the step's are not: it runs seldom, and compiles in a fraction of the time.
    """
    apart, model = model.unroll, model.clone(unroll=False)

    def evaluate(state: TrainState, batches: Batch) -> Float[Array, ""]:
        params = stacked(working_copy(state.params, model.dtype)) if apart else state.params  # no float32 stacks
        variables = {"params": together(params, state.frozen), "router_state": state.router_state}
        return lax.map(lambda w: _apply_for_loss(model, variables, w)[0], batches).mean()

    return evaluate


def cross_entropy(logits: Float[Array, "M S V"], windows: UInt8[Array, "M S+1"]) -> Float[Array, ""]:
    """Mean of the nats that every byte but a window's first costs."""
    with jax.named_scope("loss"):
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:].astype(jnp.int32)).mean()


def _apply_for_loss(model: Decoder, variables: Tree, windows: UInt8[Array, "M S+1"], **options) -> tuple[Array, Tree]:
    """The cross entropy, and the collections that `options` has mutable.

    Beside a frozen head the logits, which would be most of the memory, exist for some of the tokens at a time.
    """
    frozen = model.moe.adapter is not None
    applied = model.apply(variables, windows[:, :-1], hidden=frozen, **options)
    outputs, sown = applied if "mutable" in options else (applied, {})
    if not frozen:
        return cross_entropy(jnp.asarray(outputs), windows), sown
    head = variables["params"]["embedding"].T if model.config.tied_head else variables["params"]["head"]["kernel"]
    return cross_entropy_in_parts(jnp.asarray(outputs), head.astype(model.dtype), windows), sown


def cross_entropy_in_parts(
    hidden: Float[Array, "M S d"], head: Float[Array, "d V"], windows: UInt8[Array, "M S+1"]
) -> Float[Array, ""]:
    """`cross_entropy` of the logits `hidden · head`, of which `_LOGITS` exist at a time, backward computed again."""
    tokens = windows[:, 1:].size
    parts = next(n for n in range(-(-tokens * head.shape[1] // _LOGITS), tokens + 1) if tokens % n == 0)

    @jax.checkpoint
    def of_part(part: tuple[Float[Array, "t d"], Int[Array, " t"]]) -> Float[Array, ""]:
        own, targets = part
        logits = (own @ head).astype(jnp.float32)
        # With labels as integers the gradient is a scatter, in whose place XLA sorts where bits have to be equal.
        return optax.softmax_cross_entropy(logits, jax.nn.one_hot(targets, logits.shape[1])).sum()

    with jax.named_scope("loss"):
        own, targets = hidden.reshape(parts, -1, hidden.shape[-1]), windows[:, 1:].reshape(parts, -1)
        return lax.map(of_part, (own, targets.astype(jnp.int32))).sum() / tokens


def _gradients(model: Decoder, state: TrainState, batch: Batch) -> tuple[Tree, tuple[Tree, Report]]:
    """Mean gradients, the router state after the last microbatch and what all of them report.

    One microbatch's gradients have the dtype of the working copy; the mean of several is summed in float32. Those of
    the experts' matrices are added to their sums where they are computed, on one device.
    """
    params, frozen = working_copy(state.params, model.dtype), state.frozen
    casts = cast_experts(params, model.moe, model.dtype) if _trains_own_experts(model) else params
    if batch.shape[0] == 1:  # needs no second copy of the gradients to add to

        def of_all(params: Tree) -> tuple[Array, tuple[Tree, Report]]:
            params = with_casts(params, casts)
            (loss, _), others = _loss_and_sums(model, params, frozen, state.router_state, batch[0], {})
            return loss, others

        return jax.grad(of_all, has_aux=True)(params)

    def add(carry: tuple[Tree, Tree, Tree], windows: UInt8[Array, "M S+1"]) -> tuple[tuple[Tree, Tree, Tree], Report]:
        total, sums, router_state = carry

        def loss(others: Tree, unread: Tree) -> tuple[tuple[Array, Tree], tuple[Tree, Report]]:
            params = with_casts(_filled(others, of_experts), casts)
            return _loss_and_sums(model, params, frozen, router_state, windows, unread)

        unread = jax.tree.map(lambda array: lax.empty(array.shape, array.dtype), sums)
        (value, _), gradients, (router_state, report) = jax.vjp(loss, others, unread, has_aux=True)
        grads, sums = gradients((jnp.ones_like(value), sums))  # the sums come in as gradients, and go out as such
        return (jax.tree.map(jnp.add, total, grads), sums, router_state), report

    sums = _no_sums(model, state.params)
    others, of_experts = _apart(params) if sums else (params, [])
    zeros = jax.tree.map(lambda param: jnp.zeros_like(param, jnp.float32), others)
    (total, sums, router_state), reports = lax.scan(add, (zeros, sums, state.router_state), jnp.asarray(batch))
    sums = layers_apart(model.config, sums) if model.unroll else sums
    grads = jax.tree.map(lambda gradient: gradient / batch.shape[0], _filled(total, jax.tree.leaves(sums)))
    loads = reports.pop("tokens_per_expert").sum(0)
    return grads, (router_state, jax.tree.map(jnp.mean, reports) | {"tokens_per_expert": loads})


def _trains_own_experts(model: Decoder) -> bool:
    """Whether the model's experts are those of `blaze_jax`, trained on one device."""
    elsewhere = model.parallel is not None or model.dense_twin is not None or model.experts is not expert_ffn
    return not elsewhere and model.moe.adapter is None


def _no_sums(model: Decoder, params: Tree) -> Tree:
    """Zeros for the collection "gradient_sums" of `blaze_jax.MoE`; nothing where gradients are added up outside of it.

    That is over a mesh, where other devices' gradients have to be added first, for other experts, and for adapters,
    which are small.
    """
    stacks = jax.eval_shape(stacked, params)
    names = [name for name in model.config.stacks() if name.startswith("moe") and _trains_own_experts(model)]
    experts = {name: {"moe": {n: stacks[name]["moe"][n] for n in _EXPERT_MATRICES}} for name in names}
    return jax.tree.map(lambda stack: jnp.zeros(stack.shape, stack.dtype), experts)


def _apart(params: Tree) -> tuple[Tree, list[Array]]:
    """The parameters with None in the places of the experts' matrices, and these one after the other."""
    own, leaves = experts_only(params), jax.tree.leaves(params)
    of_experts = [param for param, is_expert in zip(leaves, jax.tree.leaves(own), strict=True) if is_expert]
    return jax.tree.map(lambda param, is_expert: None if is_expert else param, params, own), of_experts


def _filled(tree: Tree, values: Iterable[Array]) -> Tree:
    """The tree with the values, one after the other, in the places of None."""
    following = iter(values)
    return jax.tree.map(lambda leaf: next(following) if leaf is None else leaf, tree, is_leaf=lambda leaf: leaf is None)


def working_copy(params: Tree, dtype: DTypeLike) -> Tree:
    """The parameters with all matrices of experts, attention and vocabulary in `dtype`, in which products use them.

    Cast once a step, instead of in the forward pass, in the backward pass and for every microbatch; the gradients come
    in `dtype`, too. Routers and norms compute in float32.
    """

    def copy(path: tuple, param: Array) -> Array:
        return param if path[-1].key.startswith(_FLOAT32_PARAMETERS) else param.astype(dtype)

    with jax.named_scope("working_copy"):
        return jax.tree_util.tree_map_with_path(copy, params)


def _loss_and_sums(
    model: Decoder, params: Tree, frozen: Tree, router_state: Tree, windows: UInt8[Array, "M S+1"], sums: Tree
) -> tuple[tuple[Float[Array, ""], Tree], tuple[Tree, Report]]:
    """The training loss, cross entropy plus auxiliary losses, the sums, the new router state, and what to report.

    The sums are the collection "gradient_sums", whose gradients flow through the layers.
    """
    variables = {"params": together(stacked(params), frozen), "router_state": router_state}
    collections = ["losses", "intermediates", "router_state"]
    if sums:
        variables["gradient_sums"] = {n: {"moe": stack["moe"] | {"layer": jnp.int32(0)}} for n, stack in sums.items()}
        collections.append("gradient_sums")
    loss, sown = _apply_for_loss(model, variables, windows, train=True, mutable=collections)
    auxiliary_loss = sum((leaf.sum() for leaf in jax.tree.leaves(sown.get("losses", {}))), jnp.float32(0))
    stacks = {name: layers for name, layers in model.config.stacks().items() if name.startswith("moe")}
    if model.dense_twin is None:
        counts = [stack for name in stacks for stack in sown["intermediates"][name]["moe"]["tokens_per_expert"]]
        load = jnp.concatenate([jnp.asarray(stack) for stack in counts])
    else:
        load = jnp.full((sum(map(len, stacks.values())), 1), windows[:, 1:].size, jnp.int32)
    report = {"loss": loss, "auxiliary_loss": auxiliary_loss, "tokens_per_expert": load}
    flown = {name: {"moe": {n: sown["gradient_sums"][name]["moe"][n] for n in _EXPERT_MATRICES}} for name in sums}
    return (loss + auxiliary_loss, flown), (sown.get("router_state", {}), report)
