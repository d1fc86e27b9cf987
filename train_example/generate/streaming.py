"""Generation with experts in host memory: `Generator`, a layer at a time.

A pass takes as many tokens as the plan gives it, so that the copy of a layer hides under the experts' work on all of
them; the attention, which needs memory for scores, takes them in micro-batches (module-based batching, arXiv
2503.09716). Programs are compiled for one layer, whatever their number, and layers that stay on the device use the
same ones: where the experts are has no influence on a bit. In how many chunks a layer comes has one on the last bits,
since what the experts of each make of a token is rounded.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from blaze_jax import MoE
from blaze_jax.offload.chunks import plus_chunk, split_layer, with_experts
from blaze_jax.offload.compression import decompressed
from blaze_jax.offload.store import ExpertStore
from train_example.generate.decoding import Generator, State, Tokens, as_chunk, log_likelihood, next_tokens
from train_example.layers import Context, RMSNorm
from train_example.model import Decoder, Tree

MICRO_TOKENS, MICRO_LENGTH = 8192, 512
"""Tokens that the attention takes at a time, and those of them of one sequence."""


class StreamingGenerator(Generator):
    """Generates as `Generator` does, with the experts of a store.

    Args:
      model: the decoder.
      variables: its other parameters, as `layers_apart` has them.
      store: the variables of each `blaze_jax.MoE`, in order; or those of the chunks of its experts.
      batch, slots: see `Generator`.
      rests: what each layer has beside the chunks of its experts, see `in_chunks`; none where layers come whole.
      pass_tokens: the most tokens of a pass over prompts.
      **options: of `Generator`.
    """

    def __init__(
        self,
        model: Decoder,
        variables: Tree,
        store: ExpertStore,
        batch: int,
        slots: int,
        *,
        rests: Sequence[Tree] = (),
        pass_tokens: int = MICRO_TOKENS,
        **options: Any,
    ):
        if options.get("record"):
            raise NotImplementedError("experts are recorded with all of them on the device")
        super().__init__(model, variables, batch, slots, **options)
        self.store, self.pass_tokens = store, pass_tokens
        self.rests = [jax.device_put(rest, store.sharding) for rest in rests]
        stacks = model.config.stacks()
        self._blocks = [(name, at) for name, layers in stacks.items() for at in range(len(layers))]
        self._layers = [name for name, _ in self._blocks if name.startswith("moe")]
        layers = len(rests) or len(store)
        if len(self._layers) != layers or len(store) % layers:
            raise ValueError(f"the store has {layers} layers, must have the model's {len(self._layers)}")

    def _fresh(self, most: int, sequences: Sequence[Tokens], numbers: Sequence[int] | None) -> State:
        """The state before anything, on the store's device like all that comes of it: or it would have own programs."""
        return jax.device_put(super()._fresh(most, sequences, numbers), self.store.sharding)

    def _chunk(self, tokens: int) -> int:
        return min(self.slots, max(1, self.pass_tokens // self.batch))

    def _after(self, state: State, tokens: Any, count: Any) -> State:
        x, state = self._through(state, tokens, count)
        return state._replace(logits=_last_logits(self.model, self._ends, state.logits, x, count))

    def _next(self, state: State) -> tuple[State, Int[Array, " B"]]:
        token, left, found, count = _chosen(self.sampling, state, self.stops)
        return self._after(state, as_chunk(token), count)._replace(left=left), found

    def _scores(
        self, state: State, tokens: Any, count: Any, targets: Any, experts: Any = None
    ) -> tuple[State, Float[Array, "B S"]]:
        if experts is not None:
            raise NotImplementedError("recorded experts are replayed with all experts on the device")
        x, state = self._through(state, tokens, count)
        return state, _scored(self.model, self._ends, x, targets)

    @property
    def _ends(self) -> Tree:
        return {name: of for name, of in self.variables["params"].items() if not isinstance(of, tuple)}

    def _through(self, state: State, tokens: Any, count: Any) -> tuple[Float[Array, "B S d"], State]:
        """What comes out of the last block, and the state behind the tokens but for its logits."""
        context, params = Context(state.filled, jnp.asarray(count)), self.variables["params"]
        cache = {name: list(layers) for name, layers in state.cache.items()}
        blocks = iter(self._blocks)
        windows = {
            name: self.model.angles(0, None, layers).window for name, layers in self.model.config.stacks().items()
        }

        def attended(name: str, at: int, x: Array) -> tuple[Array, Array]:
            of_block = params[name][at]
            of_stack = windows[name]
            window = None if of_stack is None else of_stack[at]
            x, normed, cache[name][at] = _attend(self.model, name, of_block, x, cache[name][at], context, window)
            return x, normed

        def dense(name: str, at: int, x: Array) -> Array:
            of_block = {"params": params[name][at]["feed_forward"]}
            return _feed_forward(self.model, name, of_block, *attended(name, at, x), context)

        def up_to_experts(x: Array) -> tuple[Array, Array]:
            for name, at in blocks:
                if name.startswith("moe"):
                    return attended(name, at, x)
                x = dense(name, at, x)
            raise AssertionError("a layer of the store for each block of experts")

        def step(layer: int, variables: Tree, x: Array) -> Array:
            return _feed_forward(self.model, self._layers[layer], variables, *up_to_experts(x), context)

        def step_of_chunk(number: int, variables: Tree, carry: Any) -> Any:
            layer, number = divmod(number, chunks)
            of_layer = self.model, self._layers[layer], self.rests[layer]
            total, *xs = (None, *up_to_experts(carry)) if number == 0 else carry
            total = _plus_chunk(*of_layer, variables, number, xs[1], context, total)
            return (total, *xs) if number < chunks - 1 else _with_experts(*of_layer, *xs, context, total)

        chunks = len(self.store) // len(self.rests) if self.rests else 0
        x = self.store.fold(step_of_chunk if chunks else step, _embedded(self.model, params["embedding"], tokens))
        for name, at in blocks:
            x = dense(name, at, x)
        after = {name: tuple(layers) for name, layers in cache.items()}
        return x, state._replace(cache=after, filled=context.first + context.added)


@partial(jax.jit, static_argnums=0)
def _chosen(sampling, state: State, stops: Array) -> tuple[Array, Array, Array, Array]:
    token, left, found = next_tokens(sampling, state, stops)
    return token, left, found, (left > 0).astype(jnp.int32)


@partial(jax.jit, static_argnums=0)
def _embedded(model: Decoder, embedding: Array, tokens: Array) -> Float[Array, "B S d"]:
    return embedding[tokens].astype(model.dtype)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 4))
def _attend(
    model: Decoder,
    name: str,
    params: Tree,
    x: Float[Array, "B S d"],
    cache: Tree,
    context: Context,
    window: Int[Array, ""] | None,
) -> tuple[Float[Array, "B S d"], Float[Array, "B S d"], Tree]:
    """The residual stream behind the attention, what the feed-forward layer takes of it, and the layer's cache."""
    config, (batch, length, _) = model.config, x.shape
    attention = model.parts(name)[0]()
    norm = RMSNorm(model.dtype, config.norm_epsilon)
    width = min(length, MICRO_LENGTH)
    rows = min(batch, max(1, MICRO_TOKENS // width))

    def micro_batch(x: Array, cache: Tree, context: Context) -> tuple[Array, Tree]:
        angles = model.angles(x.shape[1], context.first)._replace(window=window)
        normed = norm.apply({"params": params["attention_norm"]}, x)
        given = {"params": params["attention"], "cache": cache["attention"]}
        y, updated = attention.apply(given, normed, angles, context, mutable=["cache"])
        return x + y, {"attention": updated["cache"]}

    def turn(row: Any, column: Any, rows: int, width: int, carry: tuple[Array, Tree]) -> tuple[Array, Tree]:
        x, cache = carry

        def of_rows(array: Array) -> Array:
            return lax.dynamic_slice_in_dim(array, row, rows)

        part = lax.dynamic_slice(x, (row, column, 0), (rows, width, x.shape[2]))
        added = jnp.clip(of_rows(context.added) - column, 0, width)
        here = Context(of_rows(context.first) + column, added)
        part, of_part = micro_batch(part, jax.tree.map(of_rows, cache), here)
        x = lax.dynamic_update_slice(x, part, (row, column, 0))
        return x, jax.tree.map(lambda whole, new: lax.dynamic_update_slice_in_dim(whole, new, row, 0), cache, of_part)

    carry = x, cache
    for column in range(0, length, width):  # a token sees those before it
        columns = min(width, length - column)
        if rows == batch:
            carry = turn(0, column, batch, columns, carry)
            continue
        whole, rest = divmod(batch, rows)

        def one(at: Array, carry: tuple[Array, Tree], column: int = column, columns: int = columns):
            return turn(at * rows, column, rows, columns, carry)

        carry = lax.fori_loop(0, whole, one, carry)
        if rest:
            carry = turn(batch - rest, column, rest, columns, carry)
    x, cache = carry
    return x, jnp.asarray(norm.apply({"params": params["feed_forward_norm"]}, x)), cache


@partial(jax.jit, static_argnums=(0, 1))
def _feed_forward(
    model: Decoder, name: str, variables: Tree, x: Array, normed: Array, context: Context
) -> Float[Array, "B S d"]:
    """The residual stream behind the feed-forward layer, all tokens at once."""
    layer = model.parts(name)[1]()
    mask: Any = {"mask": context.real(x.shape[1])} if isinstance(layer, MoE) else {}
    return x + jnp.asarray(layer.apply(decompressed(variables), normed, **mask))


@partial(jax.jit, static_argnums=(0, 1))
def _plus_chunk(
    model: Decoder,
    name: str,
    rest: Tree,
    chunk: Tree,
    number: Any,
    normed: Array,
    context: Context,
    total: Array | None,
) -> Float[Array, "T d"]:
    """What the experts of the chunks so far make of all tokens."""
    mask = context.real(normed.shape[1])
    return plus_chunk(model.parts(name)[1](), rest, decompressed(chunk), number, normed, total, mask)


@partial(jax.jit, static_argnums=(0, 1))
def _with_experts(
    model: Decoder, name: str, rest: Tree, x: Array, normed: Array, context: Context, total: Array
) -> Float[Array, "B S d"]:
    """The residual stream behind a layer of experts, all chunks of which have been added up."""
    return x + with_experts(model.parts(name)[1](), rest, normed, total, context.real(x.shape[1]))


@partial(jax.jit, static_argnums=0)
def _last_logits(model: Decoder, ends: Tree, logits: Array, x: Array, count: Array) -> Float[Array, "B V"]:
    """Logits behind the last real token of each sequence; those that were where none is new."""
    last = jnp.take_along_axis(x, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
    return jnp.where(count[:, None] > 0, logits_of(model, ends, last)[:, 0], logits)


@partial(jax.jit, static_argnums=0)
def _scored(model: Decoder, ends: Tree, x: Array, targets: Array) -> Float[Array, "B S"]:
    return log_likelihood(logits_of(model, ends, x), targets)


def logits_of(model: Decoder, ends: Tree, x: Float[Array, "B S d"]) -> Float[Array, "B S V"]:
    """What the decoder makes of its last block's output; `ends` are its parameters outside of blocks."""
    x = jnp.asarray(RMSNorm(model.dtype, model.config.norm_epsilon).apply({"params": ends["final_norm"]}, x))
    if model.config.tied_head:
        return (x @ ends["embedding"].astype(model.dtype).T).astype(jnp.float32)
    head = nn.Dense(model.config.vocabulary, use_bias=False, dtype=model.dtype)
    return jnp.asarray(head.apply({"params": ends["head"]}, x), jnp.float32)


def without_experts(variables: Tree) -> tuple[Tree, list[Tree]]:
    """Variables as `layers_apart` has them, apart from those of the experts' layers; and these, one by one.

    Args:
      variables: those of a decoder, by kind.
    """
    rest = {kind: {} for kind in variables}
    layers: dict[tuple[str, int], Tree] = {}
    for kind, of_kind in variables.items():
        for name, of_name in of_kind.items():
            if not name.startswith("moe"):
                rest[kind][name] = of_name
                continue
            rest[kind][name] = tuple({n: v for n, v in of_layer.items() if n != "moe"} for of_layer in of_name)
            for at, of_layer in enumerate(of_name):
                layers.setdefault((name, at), {})[kind] = of_layer["moe"]
    return rest, list(layers.values())


def in_chunks(model: Decoder, layers: Iterable[Tree], chunks: int, rests: list[Tree]) -> Iterator[Tree]:
    """The variables of the chunks of each layer's experts, one by one; what else a layer has is added to `rests`."""
    for layer in layers:
        rest, of_layer = split_layer(layer, model.moe, chunks)
        rests.append(rest)
        yield from of_layer
