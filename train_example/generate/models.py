"""The model of a run of this program, or a public one, ready to generate, and what makes tokens of its text."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from blaze_jax.quantized import WEIGHTS, Form, is_quantized, quantize
from train_example.config import TrainConfig, UserError
from train_example.data import Stream
from train_example.generate.offload import ExpertsOf, Offload
from train_example.generate.streaming import without_experts
from train_example.model import Decoder, Tree, layers_apart, together
from train_example.program.adapters import load_adapters
from train_example.program.arguments import check_base, new_config, resumed_config
from train_example.program.checkpoints import Checkpoints
from train_example.program.jit_once import jit_once
from train_example.program.model import form_of, frozen_base, generating_model, state_shapes
from train_example.public_models.tokens import end_tokens, open_tokenizer
from train_example.public_models.weights import drawn, load_experts, load_params
from train_example.step import working_copy


@dataclass(frozen=True)
class Text:
    """How text is tokens.

    Attributes:
      unit: what a token is.
      encode: the tokens of a text.
      decode: the text of tokens, with what is no text replaced.
      ends: tokens that end a text.
    """

    unit: str
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    ends: tuple[int, ...] = ()

    def token(self, text: str) -> int:
        """The one token that a text is; UserError where it is none, or several."""
        tokens = self.encode(text)
        if len(tokens) != 1:
            raise UserError(f"--stop {text!r} must be one of the model's {self.unit}, it is {len(tokens)} of them")
        return tokens[0]


def printable(text: str) -> str:
    """The text without what could steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


BYTES = Text("bytes", lambda text: list(text.encode(errors="surrogateescape")), Stream.decode)


@dataclass(frozen=True)
class Source:
    """A model that generates.

    Attributes:
      name: where it is.
      model: the decoder.
      variables: parameters and router state, each layer's by itself.
      text: what its tokens are.
      positions: the length of sequence that it was trained with.
      limit: the longest that it may have; None for any.
      base: the form of the experts' weights; None for plain numbers.
      experts: reads the variables of each layer of experts, which `variables` then have not; None where they have.
    """

    name: str
    model: Decoder
    variables: Tree
    text: Text
    positions: int
    limit: int | None
    base: Form | None
    experts: ExpertsOf | None = None


def open_model(
    run: Path | None, checkpoint: Path | None, options: dict[str, Any], offload: Offload | None = None
) -> Source:
    """The newest whole checkpoint of a run, or a public model; `options` are fields of `TrainConfig`.

    With `offload`, the experts are left to be read into the host's memory.

    Raises:
      UserError: there is none, or it has no tokenizer.
    """
    if checkpoint is not None:
        config = generating_config({"checkpoint": str(checkpoint), **options})
        if offload is not None:
            offload.allow_host_memory(config)
        model, text = generating_model(config), public_text(checkpoint, config.model.vocabulary)
        form: dict[str, Any] = {"dtype": model.dtype, "base": form_of(config.base)}
        params = load_params(checkpoint, model.clone(unroll=True), experts=offload is None, **form)
        if config.adapter_from:
            adapters = working_copy(load_adapters(config.adapter_from, model), model.dtype)
            params = together(layers_apart(model.config, adapters), params)
        experts = partial(load_experts, checkpoint, model, **form) if offload else None
        limit = config.model.max_positions
        positions = limit or config.sequence_length
        return Source(str(checkpoint), model, {"params": params}, text, positions, limit, form["base"], experts)
    assert run is not None
    if not (run / "checkpoints").is_dir():
        raise UserError(f"--run {run} has no checkpoints, must be the folder of a run")
    with closing(Checkpoints(run / "checkpoints", reading=True)) as saved:
        step = saved.newest_whole()
        config = replace(resumed_config({}, saved.description(step)["config"], run), **options)
        if config.adapter is None and config.base != "bf16":
            raise UserError(f"--base {config.base} is for --checkpoint, or for a run of adapters: {run} trained all")
        check_base(config)
        model = generating_model(config)
        text = public_text(Path(config.checkpoint), config.model.vocabulary) if config.checkpoint else BYTES
        variables = saved.restore_variables(step, state_shapes(config, model))
    variables["params"] = jit_once(partial(working_copy, dtype=model.dtype))(variables["params"])
    variables = {kind: layers_apart(model.config, of_kind) for kind, of_kind in variables.items()}
    if config.adapter is not None:
        variables["params"] = together(variables["params"], frozen_base(config, model.clone(unroll=True)))
    experts = None
    if offload is not None:
        variables, layers = without_experts(variables)
        experts = partial(iter, layers)
    limit = config.model.max_positions
    positions = limit or config.sequence_length
    return Source(f"{run}, step {step}", model, variables, text, positions, limit, form_of(config.base), experts)


def generating_config(options: dict[str, Any]) -> TrainConfig:
    """As `new_config`; but nothing is trained, so that experts may be compressed without adapters."""
    config = new_config({name: value for name, value in options.items() if name != "base"})
    config = replace(config, base=options.get("base", config.base))
    check_base(config)
    return config


def random_variables(config: TrainConfig, model: Decoder, *, experts: bool = True) -> tuple[Tree, list[Tree]]:
    """Parameters of a model that has not been read, each layer's by itself: for timing.

    Returns:
      The variables; and, without `experts`, the shapes of those of each layer of experts, which they have not.
    """
    variables = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    params = jax.eval_shape(partial(working_copy, dtype=model.dtype), variables["params"])
    apart = partial(jax.eval_shape, partial(layers_apart, model.config))
    like = {kind: apart(of_kind) for kind, of_kind in {**variables, "params": params}.items()}
    if (form := form_of(config.base)) is not None:

        def in_form(path: tuple, leaf: Any) -> Any:
            of_experts = path[-1].key in WEIGHTS
            return jax.eval_shape(partial(quantize, form=form), leaf) if of_experts else leaf

        like["params"] = jax.tree_util.tree_map_with_path(in_form, like["params"])
    like, layers = (like, []) if experts else without_experts(like)
    leaves, structure = jax.tree.flatten(like, is_leaf=is_quantized)
    draw = jax.jit(drawn, static_argnums=1)
    keys = jax.random.split(jax.random.key(config.seed), len(leaves))
    return structure.unflatten([draw(key, leaf) for key, leaf in zip(keys, leaves, strict=True)]), layers


def public_text(folder: Path, vocabulary: int) -> Text:
    """The text of a public model; UserError where it has no tokenizer."""
    tokenizer = open_tokenizer(folder)

    def encode(text: str) -> list[int]:
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        if max(tokens, default=0) >= vocabulary:
            raise UserError(f"{folder}: the tokenizer has the token {max(tokens)}, but the model only {vocabulary}")
        return tokens

    decode = partial(tokenizer.decode, skip_special_tokens=False)
    return Text("tokens", encode, decode, end_tokens(folder, tokenizer))
