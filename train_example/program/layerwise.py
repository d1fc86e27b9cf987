"""Training that goes through the model part by part, for models that fill a GPU without all of their gradients.

A part is the embedding, a block, or the final norm with the head. A step keeps the input of each block. From the last
part to the first it computes that part again with its gradients, and updates its parameters with them in the same
program, in place: there are the gradients of one part at a time. Blocks of a kind share their programs.

Parameters are in the dtype of the computation, those of routers and norms in float32. `small_adam` has their optimizer.
No step knows the norm of all gradients before the first of them are used up, so each part clips its own: to such a
share of the bound that the ordinary step has for all that all of them together keep to it, too.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from blaze_jax.benchmark.compiling import compile_together
from blaze_jax.benchmark.memory import MemoryPlan
from train_example.compile_step import lower, xla_options
from train_example.config import TrainConfig
from train_example.generate.streaming import logits_of
from train_example.layers import RMSNorm
from train_example.model import Block, Decoder, Tree
from train_example.program.small_adam import by_chance, scale_by_small_adam, update_by_chance
from train_example.step import (
    BETAS,
    CLIP_NORM,
    OPTIMIZERS,
    Batch,
    StepMetrics,
    TrainState,
    cross_entropy,
    learning_rate_schedule,
    matrices,
    working_copy,
)

_EMBEDDING, _TAIL = "embedding", "tail"
_COLLECTIONS = ["losses", "intermediates", "router_state"]


class Program(NamedTuple):
    """What is compiled.

    Attributes:
      function: a function of arrays.
      arguments: their shapes.
      donated: which of them give their memory to results.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()


class Report(NamedTuple):
    """What training a part tells.

    Attributes:
      gradient_norm: norm of its gradients, before clipping.
      loss: cross entropy of the tail, the sum of a block's weighted auxiliary losses.
      tokens_per_expert: the load of a block's experts; None of a part that has none.
    """

    gradient_norm: Float[Array, ""]
    loss: Float[Array, ""]
    tokens_per_expert: Int[Array, " E"] | None = None


class Layerwise:
    """The functions of arrays that a step and an evaluation consist of.

    Args:
      config: how to train.
      model: the decoder, on one device.
      optimizer: of each part by itself; None for `part_optimizer`.
    """

    def __init__(self, config: TrainConfig, model: Decoder, optimizer: optax.GradientTransformation | None = None):
        self.config, self.model = config, model
        self.blocks = [(name, at) for name, layers in model.config.stacks().items() for at in range(len(layers))]
        self.optimizer = optax.with_extra_args_support(optimizer or part_optimizer(config, len(self.blocks) + 2))

    def init(self, jit: Callable[[Callable], Callable] = lambda function: function) -> TrainState:
        """The state before the first step, made part by part; `jit` makes programs of functions.

        Parameters are drawn as the ordinary step's are, but are other numbers.
        """
        keys = iter(jax.random.split(jax.random.key(self.config.seed), len(self.blocks) + 1))
        params, router_state = dict(jit(self.new_ends)(next(keys))), {}
        new_block = {kind: jit(partial(self.new_block, kind)) for kind in {_kind(name) for name, _ in self.blocks}}
        for name, layers in self.model.config.stacks().items():
            params[name], states = zip(*(new_block[_kind(name)](next(keys)) for _ in layers), strict=True)
            router_state |= {name: states} if states[0] else {}
        return self.begin(params, router_state, jit)

    def begin(
        self, params: Tree, router_state: Tree, jit: Callable[[Callable], Callable] = lambda function: function
    ) -> TrainState:
        """The state before the first step from these parameters and routers, as `layers_apart` has them."""
        new_moments = jit(self.optimizer.init)
        moments = {name: tuple(map(new_moments, params[name])) for name in self.model.config.stacks()}
        moments[_EMBEDDING] = new_moments({_EMBEDDING: params[_EMBEDDING]})
        moments[_TAIL] = new_moments(_tail(params))
        return TrainState(jnp.zeros((), jnp.int32), params, router_state, moments)

    def new_ends(self, key: Array) -> Tree:
        """Parameters of the embedding and the tail: those of a decoder without blocks."""
        sizes = replace(self.model.config, num_layers=0, num_dense_layers=0, dense_layers=())
        without = Decoder(sizes, self.model.moe, self.model.dtype)
        variables = nn.unbox(without.init(key, jnp.zeros((1, 1), jnp.int32)))
        return working_copy(variables["params"], self.model.dtype)

    def new_block(self, kind: str, key: Array) -> tuple[Tree, Tree]:
        """Parameters and router state of a block."""
        x = jnp.zeros((1, 1, self.model.config.width), self.model.dtype)
        variables = nn.unbox(self._block(kind).init(key, x, self.model.angles(1)))
        return working_copy(variables["params"], self.model.dtype), variables.get("router_state", {})

    def embed(self, embedding: Float[Array, "V d"], windows: Int[Array, "M S+1"]) -> Float[Array, "M S d"]:
        """The input of the first block. As in `Decoder`, its gradient adds up in one order."""
        one_hot = jax.nn.one_hot(windows[:, :-1], embedding.shape[0], dtype=self.model.dtype)
        return one_hot @ embedding.astype(self.model.dtype)

    def forward(self, kind: str, params: Tree, router_state: Tree, x: Float[Array, "M S d"]) -> Float[Array, "M S d"]:
        """The output of a block in training."""
        return self._apply(kind, params, router_state, x)[0]

    def score(self, ends: Tree, x: Float[Array, "M S d"], windows: Int[Array, "M S+1"]) -> Float[Array, ""]:
        """Cross entropy of what the last block puts out."""
        with jax.named_scope("head"):
            return cross_entropy(logits_of(self.model, ends, x), windows)

    def train_tail(
        self, params: Tree, moments: Tree, tied: Tree, x: Float[Array, "M S d"], windows: Array, step: Array
    ) -> tuple[Tree, Tree, Array, Tree, Report]:
        """Parameters and moments after the update; gradients of `x` and of `tied`, the embedding or None."""

        def loss(params: Tree, tied: Tree, x: Array) -> Array:
            return self.score(params | ({} if tied is None else {_EMBEDDING: tied}), x, windows)

        value, (gradients, of_tied, of_x) = jax.value_and_grad(loss, argnums=(0, 1, 2))(params, tied, x)
        params, moments, norm = self._updated(params, moments, gradients, step, len(self.blocks) + 1)
        return params, moments, of_x, of_tied, Report(norm, value)

    def train_block(
        self,
        kind: str,
        params: Tree,
        moments: Tree,
        router_state: Tree,
        x: Float[Array, "M S d"],
        of_y: Float[Array, "M S d"],
        step: Array,
        part: Array,
    ) -> tuple[Tree, Tree, Tree, Array, Report]:
        """Parameters, moments and router state after the update, and the gradient of `x`; `of_y` is the output's."""

        def run(params: Tree, x: Array) -> tuple[tuple[Array, Array], tuple[Tree, Any]]:
            y, auxiliary_loss, *others = self._apply(kind, params, router_state, x)
            return (y, auxiliary_loss), tuple(others)

        (_, auxiliary_loss), backward, (router_state, load) = jax.vjp(run, params, x, has_aux=True)
        gradients, of_x = backward((of_y, jnp.ones_like(auxiliary_loss)))
        params, moments, norm = self._updated(params, moments, gradients, step, part)
        return params, moments, router_state, of_x, Report(norm, auxiliary_loss, load)

    def train_embedding(
        self, params: Tree, moments: Tree, windows: Array, of_x: Float[Array, "M S d"], of_tied: Tree, step: Array
    ) -> tuple[Tree, Tree, Report]:
        """Parameters and moments after the update; `of_tied` is the gradient of the embedding as the head, or None."""
        gradient = jax.vjp(lambda embedding: self.embed(embedding, windows), params[_EMBEDDING])[1](of_x)[0]
        gradient = gradient if of_tied is None else gradient + of_tied
        params, moments, norm = self._updated(params, moments, {_EMBEDDING: gradient}, step, 0)
        return params, moments, Report(norm, jnp.zeros(()))

    def metrics(self, step: Array, tail: Report, others: list[Report]) -> tuple[Array, StepMetrics]:
        """The next step's number, and what this one reports; `others` is in the order of the blocks."""
        loads = [report.tokens_per_expert for report in others if report.tokens_per_expert is not None]
        found = StepMetrics(
            loss=tail.loss,
            auxiliary_loss=sum((report.loss for report in others), jnp.zeros(())),
            gradient_norm=optax.tree.norm([report.gradient_norm for report in (tail, *others)]),
            learning_rate=jnp.asarray(learning_rate_schedule(self.config)(step)),
            tokens_per_expert=jnp.stack(loads),
        )
        return step + 1, found

    def programs(self, state: TrainState, batch: Batch) -> dict[str, Program]:
        """All programs by name; of blocks there are those of each kind."""
        shape = jax.eval_shape
        windows, step = jax.ShapeDtypeStruct(batch.shape[1:], batch.dtype), state.step
        params, moments, tail = state.params, state.optimizer_state, _tail(state.params)
        embedding = params[_EMBEDDING]
        x = shape(self.embed, embedding, windows)
        part = jax.ShapeDtypeStruct((), jnp.int32)
        found = {
            "embed": Program(self.embed, (embedding, windows)),
            "score": Program(self.score, (self._ends(params), x, windows)),
            "train tail": Program(
                self.train_tail, (tail, moments[_TAIL], self._tied(params), x, windows, step), donated=(0, 1, 3)
            ),
        }
        *_, of_tied, of_tail = shape(*_traced(found["train tail"]))
        arguments = {_EMBEDDING: embedding}, moments[_EMBEDDING], windows, x, of_tied, step
        found["train embedding"] = Program(self.train_embedding, arguments, donated=(0, 1))
        reports = [shape(*_traced(found["train embedding"]))[-1]]
        for name, at in self.blocks:
            kind, own = _kind(name), _router_state(state, name, at)
            found[kind] = Program(partial(self.forward, kind), (params[name][at], own, x))
            arguments = params[name][at], moments[name][at], own, x, x, step, part
            found[f"train {kind}"] = Program(partial(self.train_block, kind), arguments, donated=(0, 1, 4))
            reports.append(shape(*_traced(found[f"train {kind}"]))[-1])
        found["metrics"] = Program(self.metrics, (step, of_tail, reports))
        return found

    def plan(self, batch: Any, planned: Callable[..., MemoryPlan | None]) -> MemoryPlan | None:
        """The memory of a step: the state, the inputs of all blocks, and the most that a program takes beside them.

        `planned(function, *arguments, donated=)` says what a program takes; None where nobody knows.
        """
        state = jax.eval_shape(self.init)
        programs = {name: one for name, one in self.programs(state, batch).items() if name.startswith("train")}
        plans = [planned(*_traced(program), donated=program.donated) for program in programs.values()]
        x = jax.eval_shape(*_traced(self.programs(state, batch)["embed"]))
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        kept = (len(self.blocks) + 2) * x.size * x.dtype.itemsize
        if None in plans:
            return None
        return MemoryPlan(held, 0, kept + max(plan.peak for plan in plans if plan is not None))

    def _block(self, kind: str) -> Block:
        norm = partial(RMSNorm, self.model.dtype, self.model.config.norm_epsilon)
        return Block(norm, *self.model.parts(kind, train=True))

    def _apply(self, kind: str, params: Tree, router_state: Tree, x: Array) -> tuple[Array, Array, Tree, Any]:
        """Output, auxiliary loss, new router state, and load of the experts, None of a dense block."""
        variables = {"params": params, "router_state": router_state}
        with jax.named_scope(f"{kind}_blocks"):
            (y, _), sown = self._block(kind).apply(variables, x, self.model.angles(x.shape[1]), mutable=_COLLECTIONS)
        auxiliary_loss = sum((leaf.sum() for leaf in jax.tree.leaves(sown.get("losses", {}))), jnp.float32(0))
        load = sown["intermediates"]["moe"]["tokens_per_expert"][0] if kind == "moe" else None
        return y, auxiliary_loss, sown.get("router_state", {}), load

    def _updated(
        self, params: Tree, moments: Tree, gradients: Tree, step: Array, part: Array | int
    ) -> tuple[Tree, Tree, Array]:
        with jax.named_scope("optimizer"):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.config.seed), step), part)
            gradients = jax.tree.map(lambda array: array.astype(jnp.float32), gradients)
            params, moments = update_by_chance(self.optimizer, gradients, moments, params, key)
            return params, moments, optax.tree.norm(gradients)

    def _tied(self, params: Tree) -> Array | None:
        return params[_EMBEDDING] if self.model.config.tied_head else None

    def _ends(self, params: Tree) -> Tree:
        return _tail(params) | ({_EMBEDDING: params[_EMBEDDING]} if self.model.config.tied_head else {})


def part_optimizer(config: TrainConfig, parts: int) -> optax.GradientTransformationExtraArgs:
    """AdamW with moments in 8 bits, behind clipped gradients, for each of that many parts of a model."""
    return optax.chain(
        optax.clip_by_global_norm(CLIP_NORM / parts**0.5),
        scale_by_small_adam(**BETAS, coded=_products),
        optax.add_decayed_weights(config.weight_decay, matrices),
        optax.scale_by_learning_rate(learning_rate_schedule(config)),
    )


def trains_by_blocks(config: TrainConfig) -> bool:
    """Whether each block is updated by itself, as soon as it has its gradients."""
    return config.optimizer == "adam8" and config.adapter is None


OPTIMIZERS["adam8"] = lambda config: by_chance(part_optimizer(config, 1), config.seed)  # of adapters, all at once


def block_by_block(
    config: TrainConfig,
    model: Decoder,
    state: TrainState,
    batch: Batch,
    *unused: Any,
    optimizer: optax.GradientTransformation | None = None,
) -> tuple[Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]], Callable[[TrainState, Batch], Array]]:
    """The training step and the evaluation, compiled as `loop.train` asks for them.

    A step takes the memory of the state that it is given. The evaluation is of microbatches of the batch's shape.
    """
    layerwise = Layerwise(config, model, optimizer)
    lowered = {
        name: lower(config, one.function, *one.arguments, donate_argnums=one.donated)
        for name, one in layerwise.programs(state, batch).items()
    }
    programs = compile_together(lowered, xla_options(config))
    blocks, parts = layerwise.blocks, jax.device_put([np.int32(part) for part in range(len(layerwise.blocks) + 2)])

    def through(state: TrainState, windows: Array) -> tuple[list[Array], Array]:
        """The inputs of all blocks, and the output of the last."""
        inputs, x = [], programs["embed"](state.params[_EMBEDDING], windows)
        for name, at in blocks:
            inputs.append(x)
            x = programs[_kind(name)](state.params[name][at], _router_state(state, name, at), x)
        return inputs, x

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        windows = jax.device_put(batch[0])
        inputs, x = through(state, windows)
        moments, tied = state.optimizer_state, layerwise._tied(state.params)
        new_params, new_moments, new_states, reports = {}, {}, {}, []
        tail, new_moments[_TAIL], of_x, of_tied, of_tail = programs["train tail"](
            _tail(state.params), moments[_TAIL], tied, x, windows, state.step
        )
        del x
        for part, (name, at) in reversed(list(enumerate(blocks, 1))):
            block, moment, router_state, of_x, report = programs[f"train {_kind(name)}"](
                state.params[name][at],
                moments[name][at],
                _router_state(state, name, at),
                inputs.pop(),
                of_x,
                state.step,
                parts[part],
            )
            new_params[name] = (block, *new_params.get(name, ()))
            new_moments[name] = (moment, *new_moments.get(name, ()))
            if router_state:
                new_states[name] = (router_state, *new_states.get(name, ()))
            reports.insert(0, report)
        embedding, new_moments[_EMBEDDING], report = programs["train embedding"](
            {_EMBEDDING: state.params[_EMBEDDING]}, moments[_EMBEDDING], windows, of_x, of_tied, state.step
        )
        step, metrics = programs["metrics"](state.step, of_tail, [report, *reports])
        return TrainState(step, new_params | tail | embedding, new_states, new_moments), metrics

    def evaluate(state: TrainState, batches: Batch) -> Array:
        ends = layerwise._ends(state.params)
        return jnp.stack([programs["score"](ends, through(state, w)[1], w) for w in batches]).mean()

    return train_step, evaluate


def _kind(name: str) -> str:
    """What the blocks of a stack are: "dense" or "moe"."""
    return name.split("_", 1)[0]


def _tail(params: Tree) -> Tree:
    return {name: params[name] for name in ("final_norm", "head") if name in params}


def _router_state(state: TrainState, name: str, at: int) -> Tree:
    return state.router_state[name][at] if name in state.router_state else {}


def _products(params: Tree) -> Tree:
    """Marks the matrices that products take in 16 bits."""
    copy = jax.eval_shape(partial(working_copy, dtype=jnp.bfloat16), params)
    return jax.tree.map(lambda leaf: leaf.dtype == jnp.bfloat16, copy)


def _traced(program: Program) -> tuple[Any, ...]:
    return program.function, *program.arguments
