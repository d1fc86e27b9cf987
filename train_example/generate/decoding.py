"""Generation and scoring with a cache of keys and values, in programs of fixed shapes.

A sequence's token at position p has slot p of the cache, so that prompts of unequal lengths begin in the same slot and
are padded behind. A later token overwrites the padding before any token sees it.
"""

from collections.abc import Generator as Generating
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from blaze_jax import EMPTY_SLOT
from train_example.generate.replay import (
    Recorded,
    collection_of,
    experts_in,
    padded,
    record_dtype,
    record_shape,
)
from train_example.generate.sampling import Sampling, choose
from train_example.layers import Context
from train_example.model import Decoder, Tree, layers_apart, stacked

type Tokens = Sequence[int]

_CHUNK_TOKENS, _CHUNK = 8192, 512
_SCORED_TOKENS = 2048  # whose logits are in memory together


class State(NamedTuple):
    """Sequences under way.

    Attributes:
      cache: keys and values of each layer by itself, `(B, heads, slots, h)`.
      filled: how many tokens of each sequence are there.
      logits: of the token that comes next, float32.
      left: how many tokens may yet come; 0 for a sequence that has stopped, which goes on without effect.
      keys: the randomness of each sequence.
      experts: of each token in each Mixture-of-Experts layer, where they are recorded.
    """

    cache: Tree
    filled: Int[Array, " B"]
    logits: Float[Array, "B V"]
    left: Int[Array, " B"]
    keys: Key[Array, " B"]
    experts: Int[Array, "layers B slots K"] | None = None


class Generator:
    """Generates for, and scores, so many sequences at a time.

    Args:
      model: the decoder. Its blocks run unrolled, whatever it says of that.
      variables: its parameters and router state; `layers_apart` makes them faster, for nothing is copied from stacks.
      batch: B, sequences at a time.
      slots: the most tokens of a sequence, of which the last generated one needs none.
      sampling: how tokens are chosen.
      stops: tokens that end a sequence.
      seed: seeds the choices. A sequence's depend on this, its number and its tokens, not on what runs beside it.
      record: whether `recorded` may be asked.
    """

    def __init__(
        self,
        model: Decoder,
        variables: Tree,
        batch: int,
        slots: int,
        sampling: Sampling = Sampling(),
        stops: Tokens = (),
        seed: int = 0,
        record: bool = False,
    ):
        # In a loop over blocks each would copy its weights, of all experts, out of the stack, and its cache back.
        self.model = model.clone(unroll=True, remat="none")
        self.variables, self.batch, self.slots = variables, batch, slots
        self.sampling, self.stops, self.seed = sampling, np.array(stops, np.int32), seed
        self.record = (*record_shape(model), record_dtype(model)) if record else None

    def stream(
        self, prompts: Sequence[Tokens], most: int, numbers: Sequence[int] | None = None
    ) -> Generating[Int[np.ndarray, " prompts"], None, State]:
        """The next token of each prompt, time after time, until all have stopped; -1 for those that had before.

        What it returns in the end is the state behind them.

        Args:
          prompts: B at most, none of them empty, each short enough for `most` more in the slots.
          most: how many tokens each may get; a token of `stops` counts, and comes out.
          numbers: the sequences' numbers, by which choices differ; 0, 1, ... if left out.
        """
        longest = max(map(len, prompts))
        if len(prompts) > self.batch or min(map(len, prompts)) < 1 or longest + most - 1 > self.slots:
            raise ValueError(
                f"prompts must be 1 to {self.batch} of 1 to {self.slots + 1 - most} tokens, for {most} more each in "
                f"{self.slots} slots; got {len(prompts)} of {min(map(len, prompts))} to {longest}"
            )
        state, unread = self.prefilled(prompts, most, numbers), None
        going = np.ones(len(prompts), bool)
        for _ in range(most):
            state, token = self._next(state)
            if unread is not None:  # while the device is at the next one
                yield (row := np.asarray(unread)[: len(prompts)])
                going &= (row >= 0) & ~np.isin(row, self.stops)
                if not going.any():
                    return state
            unread = token
        yield np.asarray(unread)[: len(prompts)]
        return state

    def generate(self, prompts: Sequence[Tokens], most: int, numbers: Sequence[int] | None = None) -> list[list[int]]:
        """What `stream` gives each prompt."""
        return _sequences(list(self.stream(prompts, most, numbers)))

    def recorded(self, prompts: Sequence[Tokens], most: int, numbers: Sequence[int] | None = None) -> list[Recorded]:
        """Prompts and what `stream` gives each, with the experts that they went to."""
        rows: list[np.ndarray] = []
        stream = self.stream(prompts, most, numbers)
        while True:
            try:
                rows.append(next(stream))
            except StopIteration as end:
                experts = np.asarray(end.value.experts)
                break
        wholes = [[*prompt, *found] for prompt, found in zip(prompts, _sequences(rows), strict=True)]
        return [
            Recorded(len(prompt), np.array(whole, np.int32), experts[:, at, : len(whole) - 1])
            for at, (prompt, whole) in enumerate(zip(prompts, wholes, strict=True))
        ]

    def beyond(self, prompt: Tokens, length: int) -> list[int]:
        """The prompt and what comes behind it, of any length: each time the slots are full, half of them start anew."""
        tokens, keep, turn = list(prompt), max(self.slots // 2, 1), 0
        while len(tokens) < length:
            seen = tokens[-keep:] if turn or len(tokens) > self.slots else tokens
            tokens += self.generate([seen], min(self.slots + 1 - len(seen), length - len(tokens)), [turn])[0]
            turn += 1
        return tokens

    def prefilled(self, prompts: Sequence[Tokens], most: int, numbers: Sequence[int] | None = None) -> State:
        """The sequences after their prompts, each of which may get `most` tokens."""
        state = self._fresh(most, prompts, numbers)
        for tokens, count in _chunks(prompts, self.batch, self._chunk(_CHUNK_TOKENS)):
            state = self._after(state, tokens, count)
        return state

    def score(
        self, texts: Sequence[Tokens], recorded: Sequence[Recorded] | None = None
    ) -> list[Float[np.ndarray, " tokens-1"]]:
        """The logarithm (in nats, float32) of the probability of each token of each text but its first.

        Args:
          texts: B at most, each of `slots` tokens at most.
          recorded: the same texts with the experts that they go to; left out, the router chooses.
        """
        if len(texts) > self.batch or max(map(len, texts)) > self.slots:
            longest = max(map(len, texts))
            raise ValueError(f"texts must be at most {self.batch} of {self.slots} tokens; got {len(texts)}, {longest}")
        state, found = self._fresh(0, texts, None), []
        chunk = self._chunk(_SCORED_TOKENS)
        following = _chunks([text[1:] for text in texts], self.batch, chunk)
        length = -(-max(map(len, texts)) // chunk) * chunk
        experts = None if recorded is None else padded(recorded, length, self.batch)[1]
        pairs = zip(_chunks(texts, self.batch, chunk), following, strict=False)
        for turn, ((tokens, count), (targets, _)) in enumerate(pairs):
            given = () if experts is None else (experts[:, :, turn * chunk : (turn + 1) * chunk],)
            state, scores = self._scores(state, tokens, count, targets, *given)
            found.append(scores)
        scores = np.concatenate([np.zeros((self.batch, 0), np.float32), *map(np.asarray, found)], axis=1)
        return [row[: max(len(text) - 1, 0)] for row, text in zip(scores, texts, strict=False)]

    def _after(self, state: State, tokens: Any, count: Any) -> State:
        return _prefill(self.model, self.variables, state, tokens, count)

    def _next(self, state: State) -> tuple[State, Int[Array, " B"]]:
        return _decode(self.model, self.sampling, self.variables, state, self.stops)

    def _scores(
        self, state: State, tokens: Any, count: Any, targets: Any, experts: Any = None
    ) -> tuple[State, Float[Array, "B S"]]:
        return _score(self.model, self.variables, state, tokens, count, targets, experts)

    def _chunk(self, tokens: int) -> int:
        return min(self.slots, max(1, tokens // self.batch), _CHUNK)

    def _fresh(self, most: int, sequences: Sequence[Tokens], numbers: Sequence[int] | None) -> State:
        numbers = list(range(len(sequences)) if numbers is None else numbers)
        idle = [0] * (self.batch - len(sequences))
        left = np.array([most] * len(sequences) + idle, np.int32)
        return _fresh(self.model, self.slots, self.record, left, np.array(numbers + idle, np.uint32), self.seed)


def _sequences(rows: list[np.ndarray]) -> list[list[int]]:
    """The tokens of each sequence, of what came of all of them time after time."""
    return [[token for token in row.tolist() if token >= 0] for row in np.stack(rows, axis=1)]


def _chunks(sequences: Sequence[Tokens], batch: int, width: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The sequences in turns of `width` tokens, `(batch, width)`, and how many of each are real, `(batch,)`."""
    lengths = np.array([len(sequence) for sequence in sequences] + [0] * (batch - len(sequences)))
    tokens = np.zeros((batch, -(-lengths.max() // width) * width), np.int32)
    for row, sequence in zip(tokens, sequences, strict=False):
        row[: len(sequence)] = sequence
    for start in range(0, tokens.shape[1], width):
        yield tokens[:, start : start + width], np.clip(lengths - start, 0, width).astype(np.int32)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _fresh(
    model: Decoder, slots: int, record: tuple[int, int, Any] | None, left: Array, numbers: Array, seed: int
) -> State:
    config, batch = model.config, left.shape[0]
    shape = (batch, config.num_kv_heads, slots, config.head_width or config.width // config.num_heads)

    def layer() -> Tree:
        return {"attention": {name: jnp.zeros(shape, model.dtype) for name in ("key", "value")}}

    cache = {name: tuple(layer() for _ in layers) for name, layers in config.stacks().items()}
    keys = jax.vmap(partial(jax.random.fold_in, jax.random.key(seed)))(numbers)
    logits = jnp.zeros((batch, config.vocabulary), jnp.float32)
    experts = None
    if record is not None:
        layers, of_token, dtype = record
        experts = jnp.full((layers, batch, slots, of_token), EMPTY_SLOT, dtype)
    return State(cache, jnp.zeros(batch, jnp.int32), logits, left, keys, experts)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _prefill(model: Decoder, variables: Tree, state: State, tokens: Array, count: Array) -> State:
    return _advance(model, variables, state, tokens, count)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _decode(
    model: Decoder, sampling: Sampling, variables: Tree, state: State, stops: Int[Array, " stops"]
) -> tuple[State, Int[Array, " B"]]:
    """A token of each sequence, -1 for one that has stopped, and the state behind it."""
    token, left, found = next_tokens(sampling, state, stops)
    # The last one of a sequence is not looked at any more.
    following = _advance(model, variables, state, as_chunk(token), (left > 0).astype(jnp.int32))
    return following._replace(left=left), found


def as_chunk(token: Int[Array, " B"]) -> Int[Array, "B S"]:
    """A token of each sequence, to go on from, and behind that of a single one a token of padding.

    XLA would compute a product of one row as sums of products that it writes out in full.
    """
    return jnp.pad(token[:, None], ((0, 0), (0, int(token.shape == (1,)))))


def next_tokens(
    sampling: Sampling, state: State, stops: Int[Array, " stops"]
) -> tuple[Int[Array, " B"], Int[Array, " B"], Int[Array, " B"]]:
    """The token chosen for each sequence, how many may come after it, and the token, or -1 for one that had stopped."""
    token = choose(state.logits, jax.vmap(jax.random.fold_in)(state.keys, state.filled), sampling)
    stopped = jnp.isin(token, stops)
    left = jnp.where(stopped, 0, jnp.maximum(state.left - 1, 0))
    return token, left, jnp.where(state.left > 0, token, -1)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _score(
    model: Decoder, variables: Tree, state: State, tokens: Array, count: Array, targets: Array, experts: Array | None
) -> tuple[State, Float[Array, "B S"]]:
    state, logits = _apply(model, variables, state, tokens, count, last=False, experts=experts)
    return state, log_likelihood(logits, targets)


def log_likelihood(logits: Float[Array, "B S V"], targets: Int[Array, "B S"]) -> Float[Array, "B S"]:
    """The logarithm of the probability of each target."""
    found = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return found - jax.nn.logsumexp(logits, -1)


def _advance(model: Decoder, variables: Tree, state: State, tokens: Array, count: Array) -> State:
    """The state behind these tokens, `(B, S)`, of which each sequence has `count`."""
    following, logits = _apply(model, variables, state, tokens, count, last=True)
    return following._replace(logits=jnp.where(count[:, None] > 0, logits[:, 0], state.logits))


def _apply(
    model: Decoder,
    variables: Tree,
    state: State,
    tokens: Array,
    count: Array,
    *,
    last: bool,
    experts: Int[Array, "layers B S K"] | None = None,
) -> tuple[State, Float[Array, "B S V"]]:
    """The state behind the tokens but for its logits, and these; given `experts`, the tokens go to them."""
    config, context = model.config, Context(state.filled, count)
    given = {kind: stacked(of_kind) for kind, of_kind in {**variables, "cache": state.cache}.items()}
    if experts is not None:
        given["routing"] = collection_of(config, experts)
    logits, updated = model.apply(
        given, tokens, context=context, last=last, mutable=["cache"] if state.experts is None else ["cache", "routing"]
    )
    if state.experts is not None:
        sequence, positions = jnp.arange(tokens.shape[0])[:, None], context.positions(tokens.shape[1])
        chosen = experts_in(config, updated["routing"]).astype(state.experts.dtype)
        chosen = state.experts.at[:, sequence, positions].set(chosen, mode="drop", unique_indices=True)
        state = state._replace(experts=chosen)
    cache = layers_apart(config, updated["cache"])
    return state._replace(cache=cache, filled=state.filled + count), jnp.asarray(logits)
