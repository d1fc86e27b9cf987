"""Adapters in the format of PEFT, for models as transformers 5 holds them: a configuration and a file of tensors.

There the experts' gate and up projections are one parameter, `gate_up_proj`, with one adapter. Two adapters (A, B) of
rank r are one of rank 2r, with both A side by side and both B as blocks on a diagonal. One adapter of rank r, as PEFT
trains it, is two with the same A. Tensors have all experts, A as `(E·R, inputs)` and B as `(outputs, R·E)`, whose
columns go through the experts faster than through the ranks.

Adapters of linear modules elsewhere in the model, such as the attention's, are in the same files, by modules' names.
"""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from blaze_jax.adapters import A, B, LoRA
from blaze_jax.checkpoints.folder import DTYPES, Stored, TensorFile, copied
from blaze_jax.checkpoints.writing import NewTensor, file_content, rename, written
from blaze_jax.checks import check_integers, check_numbers, shown
from blaze_jax.config import MoEConfig, check_config
from blaze_jax.json_file import CheckpointError, read_json

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

ROUTERS = {"mixtral": "gate", "by_expert": "gate", "fused": "gate", "qwen2_moe": "gate", "gpt_oss": "router"}
"""What transformers calls the router of models whose layers have these layouts, and the same parameters of experts."""

UNSUPPORTED = ("use_dora", "use_rslora", "lora_bias", "fan_in_fan_out", "modules_to_save")

_NOT_FUSED = r"(?!.*gate_up_proj).*"
"""All but gate and up. PEFT goes by patterns for parameters, too, but warns of a pattern that no module matches."""

_OF_LAYER = re.compile(
    r"base_model\.model\.model\.layers\.(\d+)\.mlp\.(experts(\.base_layer)?|gate|router)\.lora_[AB]\.weight"
)
_OF_MODULE = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_FLOATS = ("F32", "F16", "BF16")


def save_adapters(
    folder: str | Path,
    layers: Mapping[int, Mapping[str, Array]],
    config: MoEConfig,
    *,
    layout: str = "by_expert",
    base_model: str | None = None,
    modules: Mapping[str, tuple[Array, Array]] | None = None,
) -> list[Path]:
    """Writes adapters as PEFT reads them: `peft.PeftModel.from_pretrained(model, folder)`, with transformers 5.

    Files of these names are replaced. A shared A is written once for each expert, and dropout is not: PEFT has none of
    adapters of experts.

    Args:
      folder: to write into; made where it is missing.
      layers: parameters by the layers' numbers in the model, of which the adapters are written.
      config: the layers' configuration, with an adapter.
      layout: that of `checkpoints.Layer`, of Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3 or gpt-oss: how gate and up lie.
      modules: A (inputs, rank) and B (rank, outputs) of adapters of linear modules elsewhere in the model, by
        their names: `model.layers.0.self_attn.q_proj`. Rank and alpha are the same, and all layers have the adapter.
      base_model: the folder or name of the base model, where PEFT is to find it; None leaves that to the reader.

    Returns:
      The two files.

    Raises:
      ValueError: the configuration has no adapter, a layer lacks one of its, a module's has another rank, or the layout
        has no such names.
    """
    adapter, router = _checked(config, layout)
    check_integers(**{f"layers[{number!r}]": number for number in layers})
    if config.adapter_names and not layers:
        raise ValueError("layers={} must have at least one")
    if not config.adapter_names and not modules:
        raise ValueError(f"{modules=} must have at least one, for {adapter} has no targets in a layer")
    tensors: dict[str, np.ndarray] = {}
    targets: list[str] = []
    for number, params in layers.items():
        if missing := [name for name in config.adapter_names if name not in params]:
            raise ValueError(f"layers[{number}] lacks {missing[0]}, which {adapter} asks for")
        for name, module, target in _places(config, number, router):
            a, b = _joined(name, params, config, layout)
            tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = a, b
            targets.append(target)
    modules = modules or {}
    for name, (a, b) in modules.items():
        if not a.shape[1:] == b.shape[:-1] == (adapter.rank,):
            raise ValueError(f"modules[{name!r}] has shapes {a.shape} and {b.shape}, must have {adapter}'s rank")
        for end, array in (("lora_A", a), ("lora_B", b)):
            tensors[f"base_model.model.{name}.{end}.weight"] = np.ascontiguousarray(np.asarray(array).T)
    both = {"gate", "up"} <= set(_names(config))
    written_alpha = int(adapter.alpha) if float(adapter.alpha).is_integer() else adapter.alpha
    fields: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": 2 * adapter.rank if both else adapter.rank,
        "lora_alpha": 2 * written_alpha if both else written_alpha,
        "rank_pattern": {_NOT_FUSED: adapter.rank} if both else {},
        "alpha_pattern": {_NOT_FUSED: written_alpha} if both else {},
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
        "target_parameters": targets,
    }
    new = [
        NewTensor(
            name, next(n for n, dtype in DTYPES.items() if dtype == value.dtype), value.shape, lambda v=value: [v]
        )
        for name, value in tensors.items()
    ]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = {TENSORS: file_content(new, {"format": "pt"}), CONFIG: [json.dumps(fields, indent=2).encode()]}
    for file, parts in files.items():
        with written(folder / file, parts) as unfinished:
            rename(unfinished, folder / file)
    return [folder / file for file in files]


def read_adapter(folder: str | Path) -> LoRA:
    """What `adapter_config.json` says of such layers, for `MoEConfig(adapter=...)`.

    It has no targets where only modules outside of them have adapters, which `load_module_adapters` reads.

    Raises:
      CheckpointError: the file is broken, of another kind, targets nothing, or asks for what a LoRA lacks.
    """
    path = Path(folder) / CONFIG
    fields = _fields(path)
    ends = {
        "gate_up_proj": ("gate", "up"),
        "down_proj": ("down",),
        "gate.weight": ("router",),
        "router.weight": ("router",),
    }
    names = [target for target in fields["target_parameters"] if isinstance(target, str)]
    targets = {
        part for name in names for end, parts in ends.items() if f".{name}".endswith(f".{end}") for part in parts
    }
    if not targets and not fields["target_modules"]:
        raise CheckpointError(f"{path}: target_parameters={shown(names)} has none of an expert layer")
    ordered = tuple(name for name in ("gate", "up", "down", "router") if name in targets)
    other = next((name for name in names if not name.endswith("gate_up_proj")), "")
    rank, alpha = _of_patterns(fields, other)
    return LoRA(rank=rank, alpha=alpha, targets=ordered)


def adapted_layers(folder: str | Path) -> set[int]:
    """The numbers of the layers whose experts or router have adapters there; CheckpointError for a broken file."""
    return {int(found[1]) for found in map(_OF_LAYER.fullmatch, TensorFile(Path(folder) / TENSORS).tensors) if found}


def load_module_adapters(folder: str | Path, *, dtype: DTypeLike | None = None) -> dict[str, tuple[Array, Array]]:
    """Reads the adapters of linear modules outside of layers of experts, such as the attention's: all that there are.

    Returns:
      A (inputs, rank) and B (rank, outputs) by the modules' names, as `save_adapters` takes them: rank and scale are
      those that `read_adapter` returns.

    Raises:
      CheckpointError: a file is broken, a tensor is of something else than such a module or layer, or a module's rank
        or scale is another; the message names it, and what is allowed.
    """
    adapter, path = read_adapter(folder), Path(folder) / CONFIG
    fields, file = _fields(path), TensorFile(Path(folder) / TENSORS)
    modules: dict[str, tuple[Array, Array]] = {}
    for key in file.tensors:
        of_module = _OF_MODULE.fullmatch(key)
        if _OF_LAYER.fullmatch(key) or (of_module and of_module[1] in modules):
            continue
        if of_module is None:
            raise CheckpointError(f"{file.path}: tensor {key!r} is no adapter of a linear module or a layer of experts")
        name, (rank, alpha) = of_module[1], _of_patterns(fields, of_module[1])
        for what, value, allowed in (("rank", rank, adapter.rank), ("alpha", alpha, adapter.alpha)):
            if value != allowed:
                raise CheckpointError(f"{path}: {name!r} has {what} {value}, must have {allowed}, by {adapter}")
        pair = []
        for end, axis in (("A", 0), ("B", 1)):
            tensor = _tensor(file, f"base_model.model.{name}.lora_{end}.weight", f"{name!r} needs")
            shape = list((*tensor.shape, 0, 0)[:2])
            shape[axis] = adapter.rank
            tensor.require(_FLOATS, shape)
            pair.append(jnp.asarray(tensor.read().T, dtype))
        modules[name] = pair[0], pair[1]
    return modules


def load_adapters(
    folder: str | Path,
    layer: int,
    config: MoEConfig,
    *,
    layout: str = "by_expert",
    dtype: DTypeLike | None = None,
    modules: Collection[str] = (),
) -> dict[str, Array]:
    """Reads one layer's adapters, as `save_adapters` or PEFT wrote them, to stand beside its other parameters.

    A file with adapters that neither such layers nor `modules` have is refused: nothing of it is left out silently.

    Args:
      folder: with `adapter_config.json` and `adapter_model.safetensors`.
      layer: number of the layer in the model.
      config: the layer, with the adapter that the file has: see `read_adapter`.
      layout: as for `save_adapters`.
      dtype: the adapters' type; None for the file's.
      modules: names of the modules elsewhere in the model whose adapters are read by `load_module_adapters`; what that
        returns will do.

    Raises:
      ValueError: the configuration has no adapter, or the layout no such names.
      CheckpointError: a file is broken, or its adapters are others: the message names the tensor or field, and what is
        allowed.
    """
    adapter, router = _checked(config, layout)
    check_integers(layer=layer)
    path = Path(folder) / CONFIG
    fields, file = _fields(path), TensorFile(Path(folder) / TENSORS)
    params: dict[str, np.ndarray] = {}
    taken: set[str] = set()
    for name, module, target in _places(config, layer, router):
        rank, alpha = _of_patterns(fields, target)
        allowed = (adapter.rank, 2 * adapter.rank) if name == "gate_up" else (adapter.rank,)
        if rank not in allowed:
            where = f"{path}: {target} has rank {rank}"
            raise CheckpointError(f"{where}, must have {' or '.join(map(str, allowed))}, by {adapter}")
        if not np.isclose(alpha / rank, adapter.scale):
            raise CheckpointError(f"{path}: {target} has alpha / rank = {alpha}/{rank}, must have that of {adapter}")
        tensors = [_tensor(file, f"{module}.{end}.weight", f"{adapter} asks for") for end in ("lora_A", "lora_B")]
        taken |= {tensor.name for tensor in tensors}
        experts = 1 if name == "router" else config.num_experts
        has_width, axis = (tensors[1], 0) if name == "down" else (tensors[0], 1)
        width = (*has_width.shape, 0, 0)[axis]  # of the model, which only the file says
        n = config.expert_width
        inputs, outputs = {"gate_up": (width, 2 * n), "down": (n, width), "router": (width, config.num_experts)}[name]
        tensors[0].require(_FLOATS, (experts * rank, inputs))
        tensors[1].require(_FLOATS, (outputs, rank * experts))
        a, b = (copied(tensor.mapped()) for tensor in tensors)
        a = a.reshape(experts, rank, inputs).transpose(0, 2, 1)
        b = b.reshape(outputs, rank, experts).transpose(2, 1, 0)
        params |= _apart(name, a, b, config, layout, str(tensors[1]))
    _check_others(file, layer, adapter, taken, modules)
    return {name: jnp.asarray(value, dtype or value.dtype) for name, value in params.items()}


def _checked(config: MoEConfig, layout: str) -> tuple[LoRA, str]:
    adapter = check_config(config).adapter
    if adapter is None:
        raise ValueError("config.adapter=None must be a LoRA: there are no adapters otherwise")
    if layout not in ROUTERS:
        raise ValueError(f"{layout=} must be one of {', '.join(ROUTERS)}")
    return adapter, ROUTERS[layout]


def _tensor(file: TensorFile, key: str, who: str) -> Stored:
    if key not in file.tensors:
        raise CheckpointError(f"{file.path}: tensor {key!r} is missing, which {who}")
    return file.tensors[key]


def _check_others(file: TensorFile, layer: int, adapter: LoRA, taken: set[str], modules: Collection[str]) -> None:
    """Raises CheckpointError for an adapter that is not `taken`, another layer's, or one of `modules`."""
    for key in sorted(file.tensors.keys() - taken):
        of_layer, of_module = _OF_LAYER.fullmatch(key), _OF_MODULE.fullmatch(key)
        if of_layer and int(of_layer[1]) == layer:
            raise CheckpointError(f"{file.path}: tensor {key!r} is an adapter that {adapter} has not")
        name = of_module[1] if of_module else key
        if not of_layer and name not in modules:
            how = "read it by load_module_adapters, and give its name in modules"
            raise CheckpointError(f"{file.path}: {name!r} has an adapter, but is no part of a layer of experts: {how}")


def _names(config: MoEConfig) -> list[str]:
    return [name.removeprefix("w_").removesuffix(A) for name in config.adapter_names if name.endswith(A)]


def _places(config: MoEConfig, layer: int, router: str) -> list[tuple[str, str, str]]:
    """What has an adapter, the module in which PEFT has its tensors, and the parameter that it targets for it.

    Of two parameters of a module, the wrapper of the first one is inside of the other's.
    """
    names, block = set(_names(config)), f"layers.{layer}.mlp"
    start, places = f"base_model.model.model.{block}", []
    if names & {"gate", "up"}:
        inside = ".base_layer" if "down" in names else ""
        places.append(("gate_up", f"{start}.experts{inside}", f"{block}.experts.gate_up_proj"))
    if "down" in names:
        places.append(("down", f"{start}.experts", f"{block}.experts.down_proj"))
    if "router" in names:
        places.append(("router", f"{start}.{router}", f"{block}.{router}.weight"))
    return places


def _joined(name: str, params: Mapping[str, Array], config: MoEConfig, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """The tensors of PEFT's adapter of that name."""

    def pair(name: str) -> tuple[np.ndarray, np.ndarray]:
        a, b = (np.asarray(params[f"w_{name}{end}"]) for end in (A, B))
        a, b = (array[None] if name == "router" else array for array in (a, b))
        return np.broadcast_to(a, (len(b), *a.shape[-2:])), b

    if name == "gate_up":
        own = {part: pair(part) for part in ("gate", "up") if part in _names(config)}
        a = np.concatenate([a for a, _ in own.values()], axis=2)
        gate, up = (
            np.concatenate([b if other == part else np.zeros_like(b) for other, (_, b) in own.items()], axis=1)
            for part in ("gate", "up")
        )
        alternating = np.stack([gate, up], -1).reshape(*gate.shape[:2], -1)
        b = alternating if layout == "gpt_oss" else np.concatenate([gate, up], -1)
    else:
        a, b = pair(name)
    return a.transpose(0, 2, 1).reshape(-1, a.shape[1]), b.transpose(2, 1, 0).reshape(b.shape[2], -1)


def _apart(
    name: str, a: np.ndarray, b: np.ndarray, config: MoEConfig, layout: str, where: str
) -> dict[str, np.ndarray]:
    """The layer's parameters in PEFT's adapter of that name, `(E, inputs, R)` and `(E, R, outputs)`."""
    assert config.adapter is not None
    rank, names = config.adapter.rank, _names(config)
    pairs = {name: (a, b)}
    if name == "gate_up":
        gate, up = (b[..., 0::2], b[..., 1::2]) if layout == "gpt_oss" else np.split(b, 2, -1)
        pairs = {"gate": (a, gate), "up": (a, up)}
        if a.shape[2] != rank:
            if np.any(gate[:, rank:]) or np.any(up[:, :rank]):
                raise CheckpointError(f"{where} has gate and up in common, must have blocks of rank {rank} for each")
            pairs = {"gate": (a[..., :rank], gate[:, :rank]), "up": (a[..., rank:], up[:, rank:])}
        if unwanted := [part for part, (_, b) in pairs.items() if part not in names and np.any(b)]:
            raise CheckpointError(f"{where} has an adapter of {unwanted[0]}, which {config.adapter} has not")
    params = {}
    for part in (part for part in pairs if part in names):
        a, b = (array[0] if part == "router" else array for array in pairs[part])
        if config.adapter.shared and part != "router":
            if np.any(a != a[:1]):
                raise CheckpointError(f"{where}: each expert has an A of its own, but {config.adapter} shares it")
            a = a[0]
        params |= {f"w_{part}{A}": a, f"w_{part}{B}": b}
    return params


def _fields(path: Path) -> dict[str, Any]:
    empty: dict[str, Any] = dict.fromkeys(("rank_pattern", "alpha_pattern", "target_parameters", "target_modules"))
    fields = empty | read_json(path)
    if fields.get("peft_type") != "LORA":
        raise CheckpointError(f"{path}: peft_type={shown(fields.get('peft_type'))} must be 'LORA'")
    for name in UNSUPPORTED:
        if fields.get(name):
            raise CheckpointError(f"{path}: {name}={shown(fields[name])} must be false or missing")
    for name, kind in (("rank_pattern", dict), ("alpha_pattern", dict), ("target_parameters", list)):
        fields[name] = kind() if fields[name] is None else fields[name]
        if not isinstance(fields[name], kind):
            raise CheckpointError(f"{path}: {name}={shown(fields[name])} must be a {kind.__name__}")
    try:
        check_integers(r=fields.get("r"), **{f"rank of {key}": rank for key, rank in fields["rank_pattern"].items()})
        check_numbers(lora_alpha=fields.get("lora_alpha"), **fields["alpha_pattern"])
        LoRA(rank=fields["r"], alpha=fields["lora_alpha"])
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return fields


def _of_patterns(fields: Mapping[str, Any], target: str) -> tuple[int, float]:
    """Rank and alpha of what has that name."""
    return (
        _of_pattern(fields["rank_pattern"], target, fields["r"]),
        _of_pattern(fields["alpha_pattern"], target, fields["lora_alpha"]),
    )


def _of_pattern(patterns: Mapping[str, Any], target: str, default):
    """The value of the first pattern that the end of the name matches, which is how PEFT reads them."""
    for pattern, value in patterns.items():
        try:
            if re.fullmatch(rf"(.*\.)?({pattern})", target):
                return value
        except re.error as error:
            raise CheckpointError(f"{CONFIG}: the pattern {pattern!r} is none: {error}") from error
    return default
