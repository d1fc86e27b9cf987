"""The command line, made of the fields of `TrainConfig`, and the configuration it makes of a preset or a saved run."""

import argparse
import inspect
import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from datetime import datetime
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, get_args, get_type_hints

from blaze_jax.benchmark.mesh import parse_mesh
from blaze_jax.quantized import inputs_multiple
from train_example.config import Base, TrainConfig, UserError
from train_example.layers import GATES
from train_example.program.adapters import adapter_of, parse_adapter
from train_example.program.devices import Cluster
from train_example.program.model import GPU_BYTES, form_of
from train_example.program.presets import FINE_TUNING, OF_ADAPTERS, PRESETS
from train_example.public_models.config import public_config
from train_example.public_models.gpt_oss import GptOssConfig

_OPTIONS = tuple(field.name for field in fields(TrainConfig) if field.name not in ("preset", "model"))
_CLUSTER = ("cluster", "coordinator", "processes", "process")
_HELP = dict(re.findall(r"^  (\w+): (.*(?:\n    .*)*?)\.$", inspect.getdoc(TrainConfig) or "", re.MULTILINE))
_MAY_CHANGE = {"data", "checkpoint", "checkpoint_every", "steps", "schedule_steps", "merge"}
"""Options that a resumed run may change. The text itself is compared, not its path, and so are the model's sizes."""
_MAX_WHOLE = 2**31 - 1


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line, `sys.argv` for None.

    Returns:
      `out`, the run's folder; `resume`, whether to go on with the run that is there; `compile_only`, the GPU for which
      only the memory is to be planned, None to train; `mesh`, devices by role, None for one device; `cluster`, the
      processes of the run, None for one; and `options`, the fields of `TrainConfig` that were given.

    Raises:
      UserError: it cannot be read.
    """
    arguments = _parser().parse_args(argv)
    given = vars(arguments)
    options = arguments.options = {name: given.pop(name) for name in ("preset", *_OPTIONS) if name in given}
    arguments.cluster = _cluster(**{name: given.pop(name) for name in _CLUSTER})
    if arguments.compile_only and (arguments.mesh or arguments.cluster):
        raise UserError("--compile-only plans a run on one GPU: leave --mesh and --cluster out")
    if arguments.resume and arguments.out is None:
        raise UserError("--resume needs --out FOLDER, the folder of the run to go on with")
    for name in {"data", "checkpoint", "adapter_from"} & options.keys():
        options[name] = str(Path(options[name]).absolute())
    if {"checkpoint", "preset"} <= options.keys():
        raise UserError("--checkpoint and --preset exclude each other: both say which model it is")
    if arguments.out is None:
        if arguments.cluster is not None:
            raise UserError("several processes need --out FOLDER, one that all of them reach")
        name = Path(options["checkpoint"]).name if "checkpoint" in options else options.get("preset", "tiny")
        arguments.out = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    return arguments


def new_config(options: dict[str, Any]) -> TrainConfig:
    """The configuration of a fresh run: its preset and what the user changed.

    Raises:
      UserError: options do not fit each other.
    """
    start = _start(options)
    if options.get("checkpoint") and options.get("adapter_from"):
        options = {"adapter": adapter_of(options["adapter_from"])} | options
    if options.get("adapter") is not None:
        start = replace(start, **OF_ADAPTERS)
    return checked(replace(start, **options))


def resumed_config(options: dict[str, Any], saved: dict[str, Any], out: Path) -> TrainConfig:
    """The configuration a checkpoint was saved with; options that were given again must agree with it.

    With other steps the learning rate keeps its schedule, unless that is changed, too.

    Raises:
      UserError: the checkpoint is of another configuration, or of another release's.
    """
    checkpoint = saved.get("checkpoint") and options.get("checkpoint", saved["checkpoint"])  # it may have moved
    if checkpoint and not Path(checkpoint).exists():
        origin = saved["checkpoint"]
        raise UserError(f"{origin}, which the run in {out} started from, is gone: say where by --checkpoint")
    start = _start({"checkpoint": checkpoint}) if checkpoint else PRESETS.get(saved.get("preset", ""))
    if (
        start is None
        or saved.keys() != {field.name for field in fields(TrainConfig)}
        or json.dumps(saved["model"]) != json.dumps(asdict(start.model))
    ):
        raise UserError(f"the checkpoint in {out} is of a model that this version does not have; start a new run")
    may_change = _MAY_CHANGE if checkpoint else _MAY_CHANGE - {"checkpoint"}
    for name, value in options.items():
        if name not in may_change and value != saved[name]:
            option = name.replace("_", "-")
            raise UserError(
                f"the run in {out} has --{option} {saved[name]}, cannot be resumed with {value}: leave --{option} out, "
                "or start a new run in another --out"
            )
    if options.get("steps", saved["steps"]) != saved["steps"] and saved["schedule_steps"] is None:
        options = {"schedule_steps": saved["steps"]} | options
    return checked(replace(start, **saved | options | {"model": start.model}))


def _start(options: dict[str, Any]) -> TrainConfig:
    """The run that the options change: a preset's, or the one of a public model."""
    if checkpoint := options.get("checkpoint"):
        model = public_config(checkpoint)
        length = min(FINE_TUNING.sequence_length, model.max_positions or FINE_TUNING.sequence_length)
        return replace(FINE_TUNING, model=model, sequence_length=length)
    return PRESETS[options.get("preset", "tiny")]


def checked(config: TrainConfig) -> TrainConfig:
    """The configuration; UserError for options that do not fit each other."""
    model, layer = config.model, config.experts_layer
    if layer != "blaze_jax":
        if config.implementation is not None:
            what = f"--implementation {config.implementation} is of blaze_jax's kernels"
            raise UserError(f"{what}: leave it out with --experts-layer {layer}")
        if layer == "dense-twin":
            if model.activation not in GATES:
                raise UserError(f"--experts-layer dense-twin has no {model.activation}, only {', '.join(GATES)}")
            if config.checkpoint or config.trained == "experts":
                option = "--trained experts" if config.trained == "experts" else "--checkpoint"
                raise UserError(f"--experts-layer dense-twin has no experts: leave {option} out")
        elif model.router.token_rounding or model.router.capacity(1, 1, 1):
            raise UserError(f"--experts-layer {layer} has no token rounding and no expert capacity")
        elif model.activation != "swiglu":
            raise UserError(f"--experts-layer {layer} has no {model.activation}, only swiglu")
    if config.adapter is not None:
        parse_adapter(config.adapter)
        _check_frozen(config)
    elif (config.base, config.base_attention) != ("bf16", "bf16"):
        option = f"--base {config.base}" if config.base != "bf16" else f"--base-attention {config.base_attention}"
        raise UserError(f"{option} is of a frozen base, which is not trained: say --adapter rank=16, too")
    if config.embedding == "host" and (config.adapter is None or model.tied_head):
        what = "is the head, too" if model.tied_head else "is trained: say --adapter rank=16, too"
        raise UserError(f"--embedding host is for a frozen embedding that is no head, but that of this model {what}")
    if config.adapter_from and not config.checkpoint:
        raise UserError("--adapter-from is of a public model's adapters: say --checkpoint, too")
    if config.merge and not (config.adapter and config.checkpoint):
        raise UserError("--merge is of a public model's adapters: say --checkpoint and --adapter, too")
    if config.optimizer == "adam8":
        if config.momentum_dtype != "float32":
            raise UserError("--optimizer adam8 keeps both moments in 8 bits: leave --momentum-dtype out")
        if config.adapter is None:
            _check_blocks(config)
    if config.sequence_length > (model.max_positions or config.sequence_length):
        raise UserError(
            f"--sequence-length {config.sequence_length} must be at most {model.max_positions}, the "
            f"max_position_embeddings of the model in {config.checkpoint}"
        )
    if config.batch_size % config.accumulate:
        raise UserError(f"--accumulate {config.accumulate} must divide --batch-size {config.batch_size}")
    return config


def _check_frozen(config: TrainConfig) -> None:
    """Raises UserError for what does not go with adapters."""
    for option, there in {
        "--trained experts": config.trained == "experts",
        "--unroll": config.unroll,
        f"--precision {config.precision}": config.precision is not None,
        "--save int8": config.save == "int8",
        f"--experts-layer {config.experts_layer}": config.experts_layer != "blaze_jax",
    }.items():
        if there:
            raise UserError(f"--adapter trains adapters of blaze_jax's experts, in a loop: leave {option} out")
    check_base(config)


def check_base(config: TrainConfig) -> None:
    """Raises UserError unless the model's experts and attention can be kept in the forms of its base."""
    model = config.model
    heads = model.num_heads * (model.head_width or model.width // model.num_heads)
    _check_form("base", config.base, model.width, "experts", model.expert_width)
    _check_form("base-attention", config.base_attention, model.width, "heads", heads)


def _check_form(option: str, base: Base, width: int, of: str, size: int) -> None:
    form = form_of(base)
    multiple = 1 if form is None else inputs_multiple(form)
    if width % multiple or size % multiple:
        raise UserError(
            f"--{option} {form} has scales of {multiple} inputs, must divide the model's width {width} and its {of}' "
            f"{size}: choose float8 or bf16"
        )


def _check_blocks(config: TrainConfig) -> None:
    """Raises UserError for what does not go together with updates block by block."""
    if isinstance(config.model, GptOssConfig):
        raise UserError("--optimizer adam8 has blocks that are alike, but those of this model see windows: choose adam")
    for name, only, why in (
        ("accumulate", 1, "has the gradients of one block at a time and cannot add them up over microbatches"),
        ("remat", "none", "computes every block again in any case"),
        ("trained", "all", "trains all parameters"),
        ("experts_layer", "blaze_jax", "trains this library's layers"),
    ):
        if (given := getattr(config, name)) != only:
            raise UserError(f"--optimizer adam8 {why}: --{name.replace('_', '-')} {given} must be {only}")


class Parser(argparse.ArgumentParser):
    """A parser that leaves it to the program to report an error, in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m train_example",
        description="Trains a Mixture-of-Experts language model: a small one on bytes, or a public one.",
        epilog="Options left out are the preset's (tiny, minutes on two CPU cores), with --resume those of the run.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--out", type=Path, metavar="FOLDER", help="the run's folder (runs/PRESET-TIME)")
    add("--resume", action="store_true", help="go on with the run in --out")
    add("--compile-only", choices=tuple(GPU_BYTES), help="print the memory that it needs there, and stop")
    add_options(parser, *_OPTIONS)
    add("--mesh", type=parse_mesh, metavar="ROLE=N,...", help="devices by role, such as fsdp=2,expert=4 (one device)")
    add("--cluster", action="store_true", help="one of several processes, as the environment says: Slurm, Kubernetes")
    add("--coordinator", metavar="HOST:PORT", help="address of process 0, where there is no such environment")
    add("--processes", type=whole(2), metavar="N", help="in all")
    add("--process", type=whole(0), metavar="I", help="which this one is")
    return parser


def add_options(parser: argparse.ArgumentParser, *names: str) -> None:
    """Adds `--preset` and these fields of `TrainConfig`, each with its line of the docstring; none has a default."""
    parser.add_argument("--preset", choices=PRESETS, default=argparse.SUPPRESS, help="the model and its defaults")
    kinds = get_type_hints(TrainConfig)
    for name in names:
        kind, how = kinds[name], {}
        kind = get_args(kind)[0] if NoneType in get_args(kind) else kind
        if kind is bool:
            how["action"] = argparse.BooleanOptionalAction
        elif kind is int:
            how |= {"type": whole(0 if name == "seed" else 1), "metavar": "N"}
        elif kind is float:
            how |= {"type": number, "metavar": "RATE"}
        else:
            how |= {"choices": get_args(kind)} if get_args(kind) else {"metavar": "PATH"}
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, default=argparse.SUPPRESS, help=_HELP.get(name), **how)


def _cluster(*, cluster: bool, coordinator: str | None, processes: int | None, process: int | None) -> Cluster | None:
    missing = [coordinator, processes, process].count(None)
    if cluster and missing < 3:
        raise UserError("--cluster leaves it to the environment: leave --coordinator, --processes and --process out")
    if missing in (1, 2) or (processes is not None and process is not None and process >= processes):
        raise UserError("several processes need --coordinator HOST:PORT, --processes N and --process I, from 0 to N-1")
    return None if missing and not cluster else Cluster(coordinator, processes, process)


def whole(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or not least <= int(text) <= _MAX_WHOLE:
            raise argparse.ArgumentTypeError(f"{text} must be a whole number from {least} to {_MAX_WHOLE}")
        return int(text)

    return convert


def real(fits: Callable[[float], bool], rule: str) -> Callable[[str], float]:
    """Reads a number that fits; no number fits nothing, as NaN compares."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not fits(value):
            raise argparse.ArgumentTypeError(f"{text} must be a number {rule}")
        return value

    return convert


number = real(lambda value: 0 <= value < math.inf, "of at least 0")
