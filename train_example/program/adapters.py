"""Adapters of a run: how the command line names them, and their files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array

from blaze_jax import LoRA, checkpoints
from blaze_jax.adapters import TARGETS
from blaze_jax.checkpoints.peft import adapted_layers
from train_example.config import TrainConfig, UserError
from train_example.model import Decoder, Tree, adapters_of
from train_example.public_models.adapted import ADAPTED, KERNEL_A, KERNEL_B
from train_example.public_models.gpt_oss import GptOss

type Shapes = dict[tuple[str, ...], tuple[int, ...]]

_FIELDS: dict[str, Callable[[str], Any]] = {
    "rank": int,
    "alpha": float,
    "targets": lambda text: tuple(text.split("+")),
    "shared": {"": True}.__getitem__,
}


def parse_adapter(text: str) -> tuple[LoRA, tuple[str, ...]]:
    """The adapters that `--adapter` asks for: "rank=16,alpha=32,targets=gate+up+down+router+q+k+v+o,shared".

    Returns:
      Those of experts and router, and the projections of attention, see `ADAPTED`, that have such adapters, too.

    Raises:
      UserError: it cannot be read, or names what there is not.
    """
    given = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            given[name] = _FIELDS[name](value)
        except (KeyError, ValueError):
            allowed = "rank=N, alpha=NUMBER, targets=gate+up+down+router+q+k+v+o, or some of them, and shared"
            raise UserError(f"--adapter {text}: {part!r} must be one of {allowed}, with commas") from None
    targets = given.pop("targets", None)
    if targets and (len(set(targets)) < len(targets) or not set(targets) <= {*TARGETS, *ADAPTED}):
        allowed = f"different ones of {', '.join((*TARGETS, *ADAPTED))}"
        raise UserError(f"--adapter {text}: targets={'+'.join(targets)} must be {allowed}")
    of_experts = None if targets is None else tuple(name for name in targets if name not in ADAPTED)
    try:
        return LoRA(**given, targets=of_experts), tuple(
            whole for name, whole in ADAPTED.items() if name in (targets or ())
        )
    except ValueError as error:
        raise UserError(f"--adapter {text}: {error}") from error


def adapter_of(folder: str) -> str:
    """The adapters that PEFT's files in a folder have, as `--adapter` names them: each expert has an A of its own.

    Raises:
      UserError: the files are broken, or have what no LoRA has.
    """
    try:
        adapter, modules = checkpoints.read_adapter(folder), checkpoints.load_module_adapters(folder)
    except checkpoints.CheckpointError as error:
        raise UserError(f"--adapter-from {folder}: {error}") from error
    of_attention = (name for name in ADAPTED if any(module.endswith(f".{name}_proj") for module in modules))
    targets = (*(adapter.targets or ()), *of_attention)
    if not targets:
        raise UserError(
            f"--adapter-from {folder}: has {min(modules)}, must have some of {', '.join((*TARGETS, *ADAPTED))}"
        )
    return f"rank={adapter.rank},alpha={adapter.alpha},targets={'+'.join(targets)}"


def load_adapters(folder: str | Path, model: Decoder) -> Tree:
    """The model's adapters, from PEFT's files, which have all of them and nothing else.

    Raises:
      UserError: a file is broken, or its adapters are others; the message names one.
    """
    adapter, params = model.moe.adapter, {}
    assert adapter is not None
    variables = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    like = adapters_of(variables["params"])
    try:
        theirs, modules = checkpoints.read_adapter(folder), checkpoints.load_module_adapters(folder)
        if (theirs.rank, theirs.alpha) != (adapter.rank, adapter.alpha):
            has = f"rank={theirs.rank} and alpha={theirs.alpha}"
            raise checkpoints.CheckpointError(f"{has} must be --adapter's {adapter.rank} and {adapter.alpha}")
        stacks = model.config.stacks()
        places = {_module(number, name) for numbers in stacks.values() for number in numbers for name in ADAPTED}
        places |= {_experts(number) for stack in stacks if stack.startswith("moe") for number in stacks[stack]}
        if others := {*modules, *map(_experts, adapted_layers(folder))} - places:
            raise checkpoints.CheckpointError(f"{min(others)} has an adapter, which has no place in the model")
        for stack, numbers in stacks.items():
            of_stack: Any = flatten_dict(like.get(stack, {}))
            wanted = {path: leaf.shape[1:] for path, leaf in of_stack.items()}
            layers = [_layer(folder, model, number, modules, experts=_experts(number) in places) for number in numbers]
            for number, layer in zip(numbers, layers, strict=True):
                _check_shapes(number, {path: array.shape for path, array in layer.items()}, wanted)
            if wanted:
                arrays = {path: jnp.stack([layer[path] for layer in layers]) for path in wanted}
                params[stack] = unflatten_dict({path: array.astype(adapter.dtype) for path, array in arrays.items()})
    except checkpoints.CheckpointError as error:
        raise UserError(f"--adapter-from {folder}: {error}") from error
    return params


def _layer(
    folder: str | Path, model: Decoder, number: int, modules: Mapping[str, tuple[Array, Array]], *, experts: bool
) -> dict[tuple[str, ...], Array]:
    """The adapters of a layer by their names from the outside to the inside."""
    layer = {}
    if experts:
        own = checkpoints.load_adapters(folder, number, model.moe, layout=_layout(model), modules=modules)
        layer = {("moe", name): array for name, array in own.items()}
    for name, whole in ADAPTED.items():
        if pair := modules.get(_module(number, name)):
            layer |= {("attention", whole, KERNEL_A): pair[0], ("attention", whole, KERNEL_B): pair[1]}
    return layer


def _check_shapes(number: int, given: Shapes, wanted: Shapes) -> None:
    """Raises CheckpointError for an adapter of a layer that is of another shape, missing, or not wanted."""
    for path in sorted(given.keys() | wanted.keys()):
        if given.get(path) != wanted.get(path):
            has, must = (f"of shape {of[path]}" if path in of else "missing" for of in (given, wanted))
            raise checkpoints.CheckpointError(f"layer {number}: {'.'.join(path)} is {has}, must be {must}")


def _layout(model: Decoder) -> str:
    return "gpt_oss" if isinstance(model, GptOss) else "by_expert"


def _experts(layer: int) -> str:
    return f"model.layers.{layer}.mlp"


def _module(layer: int, name: str) -> str:
    return f"model.layers.{layer}.self_attn.{name}_proj"


def save_adapters(folder: Path, config: TrainConfig, model: Decoder, params: Tree) -> None:
    """Writes the adapters of all layers as PEFT does, for transformers and `blaze_jax.checkpoints.load_adapters`.

    Raises:
      UserError: they cannot be written.
    """
    layers, modules = {}, {}
    for stack, numbers in model.config.stacks().items():
        for at, number in enumerate(numbers if stack in params else ()):
            layer = jax.tree.map(lambda array, at=at: array[at], params[stack])
            if "moe" in layer:
                layers[number] = layer["moe"]
            for name, whole in ADAPTED.items():
                own = layer.get("attention", {}).get(whole)
                if own is not None:
                    modules[_module(number, name)] = own[KERNEL_A], own[KERNEL_B]
    try:
        options = {"layout": _layout(model), "base_model": config.checkpoint, "modules": modules}
        checkpoints.save_adapters(folder, layers, model.moe, **options)
    except OSError as error:
        raise UserError(f"the adapters cannot be saved: {error}") from error
