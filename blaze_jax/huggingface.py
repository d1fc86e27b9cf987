"""Layers as the `config.json` of a public model describes them.

`read_public_model` reads the file by the row of its family in a table, which names the fields that decide the layer's
mathematics; the type of each is checked. Fields that nobody took are passed over, unless their name says that they
could change the layer.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

from blaze_jax.activations import clamped_swiglu
from blaze_jax.checks import shown
from blaze_jax.json_file import CheckpointError, read_json
from blaze_jax.router import Router
from pallas_kernels.codings import FLOAT8_BLOCK


@dataclass(frozen=True, kw_only=True)
class PublicModel[Config]:
    """A model as its `config.json` describes it.

    Attributes:
      family: the file's model_type, such as mixtral or deepseek_v3.
      width: d, the width of a token.
      num_layers: how many layers it has.
      dense_layers: numbers of those without experts, from 0.
      dense_width: hidden width of the dense layers; None for a family that has none.
      use_bias: whether the experts have biases, an argument of the modules.
      layer: the `MoEConfig` of its Mixture-of-Experts layers.
    """

    family: str
    width: int
    num_layers: int
    dense_layers: tuple[int, ...]
    dense_width: int | None
    use_bias: bool
    layer: Config


def read_public_model[Config](
    config: Mapping[str, Any] | str | Path, make_layer: Callable[..., Config]
) -> PublicModel[Config]:
    """Returns the model that a `config.json`, its folder or its content describes; see `checkpoints.read_model`.

    `make_layer` is `MoEConfig`, which this module does not know: that class reads public files by this function.
    """
    where = "config"
    if not isinstance(config, Mapping):
        where = Path(config) / "config.json" if Path(config).is_dir() else Path(config)
        config = read_json(where)
    fields = Fields(config, str(where))
    if isinstance(kind := config.get("model_type"), str) and kind in _REFUSED:
        raise CheckpointError(f"{where}: model_type={kind!r} has another layer: {_REFUSED[kind]}")
    name = fields.choice("model_type", list(_FAMILIES))
    family = _FAMILIES[name]
    fields = Fields(config, str(where), family.names)
    fields.choice("model_type", [name])
    own = fields.part(family.part) if family.part else fields
    num_layers = fields.count("num_hidden_layers", most=_MOST_LAYERS)
    experts_per_token = own.count_of_any("num_experts_per_tok", "experts_per_token") if family.fixed else None
    adds_losses = fields.boolean("output_router_logits", default=False)
    weight = own.number("router_aux_loss_coef", 0.0) if adds_losses else 0.0
    for other, values in {**family.needed, **family.only}.items():
        default = _MISSING if other in family.needed else values[0]
        own.choice(other, list(values), default, family.because.get(other, ""))
    if family.quantization:
        fields.check_quantization(**family.quantization)
    own.pass_over(*family.passed)
    try:
        dense_layers = family.dense_layers and family.dense_layers(fields, num_layers)
        router, options = (_read(own, values) for values in (family.router, family.layer))
        if "activation" not in options:
            options["activation"] = _ACTIVATIONS[own.choice("hidden_act", list(_ACTIVATIONS))]
        layer = make_layer(
            num_experts=own.count_of_any("num_local_experts", "num_experts", "n_routed_experts"),
            experts_per_token=experts_per_token,
            expert_width=own.count("intermediate_size" if dense_layers is None else "moe_intermediate_size"),
            # transformers counts each of a token's choices as one, and all layers as one.
            load_balancing_weight=weight * (experts_per_token or 0) / max(num_layers - len(dense_layers or ()), 1),
            router=Router(**router),
            **options,
        )
    except CheckpointError:
        raise
    except ValueError as error:  # of the layer's own checks
        raise CheckpointError(f"{where}: no layer of this library fits it: {error}") from error
    model = PublicModel(
        family=name,
        width=fields.count("hidden_size"),
        num_layers=num_layers,
        dense_layers=dense_layers or (),
        dense_width=None if dense_layers is None else fields.count("intermediate_size"),
        use_bias="router_bias" in options,
        layer=layer,
    )
    for all_of_them in (fields, own):
        all_of_them.check_all_known(name)
    return model


_MISSING = object()
_LARGEST_COUNT = 2**31 - 1
_MOST_LAYERS = 10_000
"""No model has near as many, and what has a loop over them ends soon."""

_TOUCHES_THE_LAYER = re.compile(
    r"expert|moe|rout|mlp|ffn|glu|top_?k|quant"
    r"|(?<![a-z])(act|bias|capacity|clamp|compress|dense|drop(?!out)|feed|ff|gat(e|ing)|group|hidden|inner|intermediate"
    r"|jitter|multipl|nois|normali|renorm|scal|scor|select|shar|sparse)"
)
"""Words of which one stands in the name of each field that changed such a layer so far."""

_OF_OTHER_PARTS = {"attention_bias", "chunk_size_feed_forward", "output_hidden_states", "output_router_logits"}
_OF_OTHER_PARTS |= {"qkv_bias", "rope_scaling", "router_aux_loss_coef"}
"""Fields of attention, or of what a model returns, whose names have such a word."""


class Fields:
    """The fields of a `config.json`, which notes those that were asked for.

    Args:
      values: the file's content.
      where: the file, in errors.
      names: what the file calls fields that are asked for by other names.
    """

    def __init__(self, values: Mapping[str, Any], where: str, names: Mapping[str, str] | None = None):
        self._values, self._where, self._names, self._known = values, where, names or {}, set()

    def part(self, name: str) -> "Fields":
        """Returns the fields of an object in the file."""
        values = self._get(name, _MISSING, lambda value: isinstance(value, Mapping), "an object")
        return Fields(values, f"{self._where}: {name}", self._names)

    def pass_over(self, *names: str) -> None:
        """Notes fields that do not matter, although their names have a word for a part of the layer."""
        self._known.update(names)

    def count(self, name: str, default: Any = _MISSING, *, least: int = 1, most: int = _LARGEST_COUNT) -> int:
        rule = f"an integer from {least} to {most}"
        return self._get(name, default, lambda value: _is_number(value, int) and least <= value <= most, rule)

    def count_of_any(self, *names: str) -> int:
        """Returns a number that has several names, of which releases of transformers write some or all."""
        first, *others = [name for name in names if self._names.get(name, name) in self._values] or names[:1]
        count = self.count(first)
        for name in others:
            self._get(name, None, lambda value: _is_number(value, int) and value == count, f"{first}={count}")
        return count

    def counts(self, name: str, below: int) -> list[int]:
        """Returns numbers of layers; none where the field is null or missing."""

        def holds(value):
            return value is None or (isinstance(value, list) and all(type(v) is int and 0 <= v < below for v in value))

        return self._get(name, None, holds, f"a list of integers from 0 to {below - 1}") or []

    def number(self, name: str, default: Any = _MISSING, *, positive: bool = False) -> float:
        def holds(value):  # an integer may have hundreds of digits
            return _is_number(value, int | float) and abs(value) <= sys.float_info.max and (value > 0 or not positive)

        return float(self._get(name, default, holds, "a positive number" if positive else "a finite number"))

    def norm_order(self, name: str, default: Any = _MISSING) -> float | None:
        """Returns the p of a p-norm, None where the field is null."""

        def holds(value):
            return value is None or (_is_number(value, int | float) and 1 <= value <= sys.float_info.max)

        order = self._get(name, default, holds, "null or a number of at least 1")
        return order if order is None else float(order)

    def boolean(self, name: str, default: Any = _MISSING) -> bool:
        return self._get(name, default, lambda value: isinstance(value, bool), "true or false")

    def choice(self, name: str, allowed: list, default: Any = _MISSING, because: str = "") -> Any:
        def holds(value):
            return any(value == right and isinstance(value, bool) == isinstance(right, bool) for right in allowed)

        return self._get(name, default, holds, " or ".join(map(str, allowed)) + because)

    def check_quantization(self, **expected: Any) -> None:
        """Raises CheckpointError if the file tells of compression by another method, or in another way."""

        def holds(value):
            return value is None or (isinstance(value, Mapping) and dict(value) | expected == expected | dict(value))

        self._get("quantization_config", None, holds, f"null, or have {expected}")

    def check_all_known(self, family: str) -> None:
        """Raises CheckpointError if a field that nobody asked for could change the layer.

        Its name has a word for a part of the layer then, and its value is not null, false, zero or empty, which leave
        out what the family has not. Other fields say something of other parts of a model. So do names that begin with
        an underscore, which transformers uses for itself.
        """
        for name in sorted(map(str, self._values.keys() - self._known - _OF_OTHER_PARTS)):
            words = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()
            if self._values.get(name) and not name.startswith("_") and _TOUCHES_THE_LAYER.search(words):
                printable = name.encode("ascii", "backslashreplace").decode()
                raise CheckpointError(
                    f"{self._where}: {printable}={shown(self._values[name])} is unknown to {family}, and could change "
                    "the layer; leave it out if it does not"
                )

    def _get(self, name: str, default: Any, holds: Callable[[Any], bool], rule: str) -> Any:
        """Returns the field's value, or the default; CheckpointError unless the rule holds for it."""
        name = self._names.get(name, name)
        self._known.add(name)
        value = self._values.get(name, default)
        if not holds(value):
            found = f"={shown(value)}" if name in self._values else " is missing,"
            raise CheckpointError(f"{self._where}: {name}{found} must be {rule}")
        return value


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What the files of a family say in their own way, and what they leave unsaid.

    Attributes:
      router: options of the `Router`; a function reads one from the fields.
      layer: other arguments of the layer, in the same way.
      dense_layers: reads the numbers of the layers without experts; None for a family that has none.
      names: the family's names of fields that most call otherwise.
      needed: fields that must be there, and the values of which the layer's mathematics is this one.
      only: the same of fields that may be missing, which means the first value.
      because: what is another, in errors.
      passed: fields that do not matter, although their names have a word for a part of the layer.
      quantization: how numbers may be compressed; None for a family of which nobody has published any.
      part: the object of the file that describes the layer; "" where the file does.
      fixed: whether every token has the same number of experts.
    """

    router: Mapping[str, Any] = field(default_factory=dict)
    layer: Mapping[str, Any] = field(default_factory=dict)
    dense_layers: Callable[[Fields, int], tuple[int, ...]] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    needed: Mapping[str, Sequence] = field(default_factory=dict)
    only: Mapping[str, Sequence] = field(default_factory=dict)
    because: Mapping[str, str] = field(default_factory=dict)
    passed: tuple[str, ...] = ()
    quantization: Mapping[str, Any] | None = None
    part: str = ""
    fixed: bool = True


def _read(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value(fields) if callable(value) else value for name, value in values.items()}


def _listed_or_between(fields: Fields, num_layers: int) -> tuple[int, ...]:
    step = fields.count("decoder_sparse_step", 1)
    listed = set(fields.counts("mlp_only_layers", num_layers))
    return tuple(n for n in range(num_layers) if n in listed or (n + 1) % step)


def _the_first(fields: Fields, num_layers: int) -> tuple[int, ...]:
    return tuple(range(min(fields.count("first_k_dense_replace", least=0), num_layers)))


def _outside_of_a_range(fields: Fields, num_layers: int) -> tuple[int, ...]:
    start, end = fields.count("moe_layer_start_index", least=0), fields.count("moe_layer_end_index", -1, least=-1)
    step, last = fields.count("moe_layer_interval", 1), num_layers - 1 if end == -1 else end
    return tuple(n for n in range(num_layers) if (n + 1) % step or not start <= n <= last)


def _shared_width(fields: Fields) -> int:
    return fields.count("n_shared_experts", least=0) * fields.count("moe_intermediate_size")


def _clamped(fields: Fields) -> Any:
    fields.choice("hidden_act", ["silu"])
    return clamped_swiglu(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0))


def _named_in_an_object(fields: Fields) -> str:
    named = fields.choice("ffn_act_fn", [None, *({"name": name} for name in _ACTIVATIONS)], None)
    return _ACTIVATIONS[named["name"] if named else "silu"]


def _ungated(fields: Fields) -> str:
    return _UNGATED[fields.choice("hidden_act", list(_UNGATED))]


def _divided_by_sum(fields: Fields) -> bool | None:
    return {None: False, 1: True}.get(fields.norm_order("moe_normalize_expert_weights", 1))


def _other_norm(fields: Fields) -> float | None:
    order = fields.norm_order("moe_normalize_expert_weights", 1)
    return None if order == 1 else order


def _if_limited(read: Callable[[Fields], int], fields: Fields) -> int:
    return read(fields) if _limited(fields) else 1


def _limited(fields: Fields) -> bool:
    return fields.choice("topk_method", ["greedy", "group_limited_greedy"], "greedy") != "greedy"


_NORMALIZED = {"normalize_weights": methodcaller("boolean", "norm_topk_prob")}
_SCALED = {"weight_scale": methodcaller("number", "routed_scaling_factor")}
_GROUPS = {"num_groups": methodcaller("count", "n_group"), "groups_per_token": methodcaller("count", "topk_group")}

_FLOAT8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [FLOAT8_BLOCK, FLOAT8_BLOCK]}
_QWEN3 = _Family(router=_NORMALIZED, dense_layers=_listed_or_between, quantization=_FLOAT8)
_QWEN2_SHARED = {"shared_width": methodcaller("count", "shared_expert_intermediate_size"), "shared_gate": True}
_DEEPSEEK_V3 = _Family(
    router={"scoring": "sigmoid", **_NORMALIZED, **_SCALED, **_GROUPS},
    layer={"shared_width": _shared_width, "selection_bias": True},
    dense_layers=_the_first,
    only={"scoring_func": ["sigmoid"], "topk_method": ["noaux_tc"], "moe_layer_freq": [1]},
    quantization=_FLOAT8,
)
"""Kimi-K2 and GLM-4.5 have its layer, too; what GLM-4.5 leaves out has one value there."""

_FAMILIES = {
    "mixtral": _Family(router={"normalize_weights": True}, only={"router_jitter_noise": [0], "norm_topk_prob": [True]}),
    "qwen3_moe": _QWEN3,
    "olmoe": _Family(router=_NORMALIZED),
    **dict.fromkeys(["deepseek_v3", "kimi_k2", "glm4_moe"], _DEEPSEEK_V3),
    "gpt_oss": _Family(
        router={"scoring": "softmax_selected"},
        layer={"activation": _clamped, "router_bias": True},
        only={"norm_topk_prob": [True]},
        quantization={"quant_method": "mxfp4"},
    ),
    **dict.fromkeys(["qwen2_moe", "qwen3_next"], replace(_QWEN3, layer=_QWEN2_SHARED)),
    "deepseek_v2": _Family(
        router={
            "normalize_weights": False,
            "scores_per_group": lambda fields: 1 if _limited(fields) else 2,
            **{option: partial(_if_limited, read) for option, read in _GROUPS.items()},
            **_SCALED,
        },
        layer={"shared_width": _shared_width},
        dense_layers=_the_first,
        needed={"norm_topk_prob": [False]},
        only={"scoring_func": ["softmax"], "moe_layer_freq": [1]},
        passed=("n_group", "topk_group"),
    ),
    "minimax_m2": _Family(
        router={"scoring": "sigmoid", "normalize_weights": True},
        layer={"selection_bias": True},
        only={
            "scoring_func": ["sigmoid"],
            "use_routing_bias": [True],
            "shared_intermediate_size": [0],
            "router_jitter_noise": [0],
            "layernorm_mlp_beta": [1],
        },
        passed=("mlp_intermediate_size", "shared_moe_mode"),
        quantization=_FLOAT8 | {"fmt": "float8_e4m3fn"},
    ),
    "granitemoe": _Family(
        router={"scoring": "softmax_selected"},
        passed=("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"),
    ),
    "ernie4_5_moe": _Family(
        router={"normalize_weights": True},
        layer={"shared_width": _shared_width, "selection_bias": True},
        dense_layers=_outside_of_a_range,
        names={
            "num_local_experts": "moe_num_experts",
            "num_experts_per_tok": "moe_k",
            "n_shared_experts": "moe_num_shared_experts",
        },
        only={
            "use_bias": [False],
            "moe_use_aux_free": [True],
            "moe_gate": ["topk"],
            "moe_gate_act": ["softmax", None],
            "moe_norm_min": [1e-12],
        },
        passed=("moe_capacity",),
    ),
    "dbrx": _Family(
        router={"normalize_weights": _divided_by_sum, "weight_norm": _other_norm},
        layer={"activation": _named_in_an_object},
        names={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_local_experts": "moe_num_experts",
            "num_experts_per_tok": "moe_top_k",
            "intermediate_size": "ffn_hidden_size",
            "router_aux_loss_coef": "moe_loss_weight",
        },
        only={"moe_jitter_eps": [None, 0]},
        because={"moe_jitter_eps": ", for no noise of the router reaches the experts here"},
        passed=("hidden_size", "moe_loss_weight", "num_beam_groups", "top_k"),
        part="ffn_config",
    ),
    "minicpm": _Family(  # as those of BlockFFN say: MiniCPM itself has no experts
        router={"scoring": "relu", "weight_norm": "rms"},
        layer={"activation": _ungated},
        names={"intermediate_size": "expert_size"},
        needed={
            "ffn_type": ["block_linear"],
            "router_act": ["relu"],
            "norm_after_router": ["rms"],
            "rms_norm_eps": [1e-5],
        },
        only={"num_shared_experts": [0]},
        because={
            "ffn_type": ", a BlockFFN whose experts' matrices lie one after the other",
            "rms_norm_eps": ", which normalises the router's weights, too",
        },
        passed=(
            *("block_implementation", "ffn_gated", "intermediate_size", "moe_routing_strategy", "moe_top_k"),
            *("moe_top_p", "norm_scale", "scale_depth", "scale_emb"),
        ),
        fixed=False,
    ),
}
"""By model_type."""

_REFUSED = {
    "phimoe": "its router (sparsemixer) weighs each of a token's two experts by a softmax of its own over the logits "
    "near the largest that is left, where all weights of a Router are of one softmax"
}
"""Public families whose layer is another one, and what differs."""

_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "relu": "reglu"}
_ACTIVATIONS |= dict.fromkeys(["gelu_pytorch_tanh", "gelu_new"], "geglu_tanh")
_UNGATED = {"silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu", "relu2": "relu2"}
_UNGATED |= dict.fromkeys(["gelu_pytorch_tanh", "gelu_new"], "gelu_tanh")
