"""Adapters of a run: how the command line names them, and their files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from blaze_jax import LoRA, checkpoints
from blaze_jax.adapters import TARGETS
from train_example.config import TrainConfig, UserError
from train_example.model import Decoder, Tree
from train_example.public_models.adapted import ADAPTED, KERNEL_A, KERNEL_B
from train_example.public_models.gpt_oss import GptOss

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
    targets = given.pop("targets", ())
    of_experts = tuple(name for name in targets if name not in ADAPTED)
    if targets and (not of_experts or len(set(targets)) < len(targets) or not set(targets) <= {*TARGETS, *ADAPTED}):
        allowed = f"different ones of {', '.join((*TARGETS, *ADAPTED))}, of experts or router at least one"
        raise UserError(f"--adapter {text}: targets={'+'.join(targets)} must be {allowed}")
    try:
        adapted = tuple(whole for name, whole in ADAPTED.items() if name in targets)
        return LoRA(**given, targets=of_experts or None), adapted
    except ValueError as error:
        raise UserError(f"--adapter {text}: {error}") from error


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
                    modules[f"model.layers.{number}.self_attn.{name}_proj"] = own[KERNEL_A], own[KERNEL_B]
    try:
        layout = "gpt_oss" if isinstance(model, GptOss) else "by_expert"
        checkpoints.save_adapters(
            folder, layers, model.moe, layout=layout, base_model=config.checkpoint, modules=modules
        )
    except OSError as error:
        raise UserError(f"the adapters cannot be saved: {error}") from error
