"""The command line, and the configuration that it makes of a preset, a public model or a saved run."""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, get_args

from blaze_jax.benchmark.mesh import parse_mesh
from train_example.config import (
    AttentionKernel,
    DType,
    ExpertsLayer,
    Implementation,
    Remat,
    Save,
    TrainConfig,
    Trained,
    UserError,
)
from train_example.program.devices import Cluster
from train_example.program.presets import FINE_TUNING, PRESETS
from train_example.public_models.config import public_config

_MAY_CHANGE = ("data", "checkpoint", "checkpoint_every", "steps", "schedule_steps")
"""Options that a resumed run may change. The text itself is compared, not its path, and so are the model's sizes."""
_MAX_WHOLE = 2**31 - 1
_REMAT_HELP = (
    "what the backward pass computes again, for less memory: nothing; all but what the experts keep by --save; or "
    "everything"
)


@dataclass(frozen=True)
class Arguments:
    """A command line, read.

    Attributes:
      out: the run's folder.
      resume: whether to go on with the run that is there.
      compile_only: the GPU for which only the memory is to be planned; None to train.
      mesh: devices by role; None for one device.
      cluster: the processes of the run; None for one.
      options: fields of `TrainConfig` that were given.
    """

    out: Path
    resume: bool
    compile_only: str | None
    mesh: dict[str, int] | None
    cluster: Cluster | None
    options: dict[str, Any]


def parse_arguments(argv: list[str] | None) -> Arguments:
    """Reads the command line, `sys.argv` for None.

    Raises:
      UserError: it cannot be read.
    """
    options = vars(_parser().parse_args(argv))
    out, resume, compile_only = (options.pop(name) for name in ("out", "resume", "compile_only"))
    mesh, cluster = options.pop("mesh", None), _cluster(options)
    if resume and out is None:
        raise UserError("--resume needs --out FOLDER, the folder of the run to go on with")
    for name in ("data", "checkpoint"):
        if options.get(name) is not None:
            options[name] = str(Path(options[name]).absolute())
    if "checkpoint" in options and "preset" in options:
        raise UserError("--checkpoint and --preset exclude each other: both say which model it is")
    if out is None:
        if cluster is not None:
            raise UserError("several processes need --out FOLDER, one that all of them reach")
        name = Path(options["checkpoint"]).name if "checkpoint" in options else options.get("preset", "tiny")
        out = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    return Arguments(out, resume, compile_only, mesh, cluster, options)


def new_config(options: dict[str, Any]) -> TrainConfig:
    """The configuration of a fresh run: its preset and what the user changed.

    Raises:
      UserError: options do not fit each other.
    """
    return _checked(replace(_start(options), **options))


def resumed_config(options: dict[str, Any], saved: dict[str, Any], out: Path) -> TrainConfig:
    """The configuration a checkpoint was saved with; options that were given again must agree with it.

    With other steps the learning rate keeps its schedule, unless that is changed, too.

    Raises:
      UserError: the checkpoint is of another configuration, or of another release's.
    """
    known = saved.get("checkpoint") or saved.get("preset") in PRESETS
    if saved.get("checkpoint") and not Path(options.get("checkpoint", saved["checkpoint"])).exists():
        raise UserError(
            f"{saved['checkpoint']}, which the run in {out} started from, is gone: say where by --checkpoint"
        )
    start = {name: saved[name] for name in ("preset", "checkpoint") if saved.get(name)}
    if saved.get("checkpoint"):
        start |= {name: value for name, value in options.items() if name == "checkpoint"}  # it may have moved
    preset = _start(start) if known else None
    if (
        preset is None
        or saved.keys() != {f.name for f in fields(TrainConfig)}
        or json.dumps(saved["model"]) != json.dumps(asdict(preset.model))
    ):
        raise UserError(f"the checkpoint in {out} is of a model that this version does not have; start a new run")
    for name, value in options.items():
        may_change = name in _MAY_CHANGE and (name != "checkpoint" or saved[name])
        if not may_change and value != saved[name]:
            option = name.replace("_", "-")
            raise UserError(
                f"the run in {out} has --{option} {saved[name]}, cannot be resumed with {value}: leave --{option} out, "
                "or start a new run in another --out"
            )
    if options.get("steps", saved["steps"]) != saved["steps"] and saved["schedule_steps"] is None:
        options = {"schedule_steps": saved["steps"]} | options
    return _checked(replace(preset, **{name: saved[name] for name in saved if name != "model"} | options))


def _start(options: dict[str, Any]) -> TrainConfig:
    """The run that the options change: a preset's, or the one of a public model."""
    if checkpoint := options.get("checkpoint"):
        model = public_config(checkpoint)
        length = min(FINE_TUNING.sequence_length, model.max_positions or FINE_TUNING.sequence_length)
        return replace(FINE_TUNING, model=model, sequence_length=length)
    return PRESETS[options.get("preset", "tiny")]


def _checked(config: TrainConfig) -> TrainConfig:
    model, layer = config.model, config.experts_layer
    if layer != "blaze_jax" and config.implementation is not None:
        what = f"--implementation {config.implementation} is of blaze_jax's kernels"
        raise UserError(f"{what}: leave it out with --experts-layer {layer}")
    if layer != "blaze_jax" and (model.router.token_rounding or model.router.capacity(1, 1, 1)):
        raise UserError(f"--experts-layer {layer} has no token rounding and no expert capacity")
    if layer != "blaze_jax" and model.activation != "swiglu":
        raise UserError(f"--experts-layer {layer} has no {model.activation}, only swiglu")
    if config.sequence_length > (model.max_positions or config.sequence_length):
        raise UserError(
            f"--sequence-length {config.sequence_length} must be at most {model.max_positions}, the "
            f"max_position_embeddings of the model in {config.checkpoint}"
        )
    if config.batch_size % config.accumulate:
        raise UserError(f"--accumulate {config.accumulate} must divide --batch-size {config.batch_size}")
    return config


class _Parser(argparse.ArgumentParser):
    """A parser that leaves it to the program to report an error, in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see python -m train_example --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m train_example",
        description="Trains a Mixture-of-Experts language model: a small one on bytes, or a public one.",
        epilog="Options left out are the preset's, or with --resume those of the run.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="the model and its defaults (tiny, which takes minutes on two CPU cores)")
    add("--checkpoint", metavar="FOLDER", help="fine-tune the public model in it, OLMoE or Qwen3-MoE, and save it")
    add("--trained", choices=get_args(Trained), help="all of the model, or the experts' matrices alone")
    add("--data", metavar="PATH", help="a file or folder of text, of any size (half a megabyte that comes with Python)")
    add("--out", type=Path, default=None, metavar="FOLDER", help="the run's folder (runs/PRESET-TIME)")
    add("--resume", action="store_true", default=False, help="go on with the run in --out")
    add("--compile-only", choices=("h200",), default=None, help="print the memory that it needs there, and stop")
    add("--steps", type=_whole(1), metavar="N", help="optimizer steps of the whole run; --resume may change it")
    add("--schedule-steps", type=_whole(1), metavar="N", help="over which the learning rate rises and falls (--steps)")
    add("--batch-size", type=_whole(1), metavar="N", help="sequences per step")
    add("--sequence-length", type=_whole(1), metavar="N", help="bytes, or a public model's tokens, per sequence")
    add("--accumulate", type=_whole(1), metavar="N", help="compute each batch in N parts, for less memory")
    add("--learning-rate", type=_number, metavar="RATE", help="at the peak, after the warm-up")
    add("--weight-decay", type=_number, metavar="RATE", help="decay of the matrices")
    add("--seed", type=_whole(0), metavar="N", help="seeds parameters, batches and sample")
    add("--dtype", choices=get_args(DType), help="type of the computation; parameters are float32")
    add("--momentum-dtype", choices=get_args(DType), help="type of the gradients' running mean in the optimizer")
    add("--remat", choices=get_args(Remat), help=_REMAT_HELP)
    add("--save", choices=get_args(Save), help="what the experts keep for the backward pass")
    add("--implementation", choices=get_args(Implementation), help="the experts' kernels (the best that can run)")
    add("--experts-layer", choices=get_args(ExpertsLayer), help="blaze_jax's, or a conventional one to compare with")
    add("--attention", choices=get_args(AttentionKernel), help="what computes the attention (the best that can run)")
    add("--unroll", action=argparse.BooleanOptionalAction, help="compile every block, not a loop over one")
    add("--mesh", type=parse_mesh, metavar="ROLE=N,...", help="devices by role, such as fsdp=2,expert=4 (one device)")
    add(
        "--cluster",
        action="store_true",
        help="one of several processes, as Slurm or another cluster's environment says",
    )
    add("--coordinator", metavar="HOST:PORT", help="address of process 0, where there is no such environment")
    add("--processes", type=_whole(2), metavar="N", help="in all")
    add("--process", type=_whole(0), metavar="I", help="which this one is")
    add("--evaluate-every", type=_whole(1), metavar="STEPS", help="steps between evaluations on held-out text")
    add("--checkpoint-every", type=_whole(1), metavar="STEPS", help="steps between checkpoints")
    return parser


def _cluster(options: dict[str, Any]) -> Cluster | None:
    """Takes the options of several processes out."""
    given = {name: options.pop(name) for name in ("coordinator", "processes", "process") if name in options}
    by_environment = options.pop("cluster", False)
    if by_environment and given:
        raise UserError("--cluster leaves it to the environment: leave --coordinator, --processes and --process out")
    if not given:
        return Cluster() if by_environment else None
    if len(given) < 3 or given["process"] >= given["processes"]:
        raise UserError("several processes need --coordinator HOST:PORT, --processes N and --process I, from 0 to N-1")
    return Cluster(**given)


def _whole(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or not least <= int(text) <= _MAX_WHOLE:
            raise argparse.ArgumentTypeError(f"{text} must be a whole number from {least} to {_MAX_WHOLE}")
        return int(text)

    return convert


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number of at least 0")
    return value
