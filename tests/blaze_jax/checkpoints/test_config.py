"""A `config.json` in the words of the models' public files: used, passed over, or refused by its name."""

import json
import math
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from blaze_jax import MoEConfig, Router, checkpoints, clamped_swiglu
from tests.blaze_jax.checkpoints.models import FAMILIES, FIXTURES, LATER, model

RELEASES = json.loads((Path(__file__).parent / "public_configs.json").read_text())
"""Files of public releases, all fields: "public copy" are as others have copied them, "memory" as this test's author
remembers them. Lists of modules that are not compressed are cut to one."""

PUBLIC = {release["config"]["model_type"]: release["config"] for release in reversed(RELEASES.values())}
"""The first of each family."""


def layer(num_experts, experts_per_token, expert_width, *, router, **options):
    sizes = {"num_experts": num_experts, "experts_per_token": experts_per_token, "expert_width": expert_width}
    return MoEConfig(**sizes, router=Router(**router), load_balancing_weight=0.0, **options)


def sigmoid_layer(num_experts, expert_width, **router):
    router |= {"scoring": "sigmoid", "normalize_weights": True}
    return layer(num_experts, 8, expert_width, router=router, shared_width=expert_width, selection_bias=True)


def qwen_layer(num_experts, experts_per_token, expert_width, shared_width, *, normalize_weights):
    router, shared = {"normalize_weights": normalize_weights}, {"shared_width": shared_width, "shared_gate": True}
    return layer(num_experts, experts_per_token, expert_width, router=router, **shared)


GPT_OSS = {"activation": clamped_swiglu(1.702, 7.0), "router_bias": True}
SUM = {"normalize_weights": True}
SIGMOID = {"scoring": "sigmoid", **SUM}
WITHOUT_DENSE = ("mixtral", "olmoe", "gpt_oss", "minimax_m2", "granitemoe", "dbrx", "minicpm")
LAYERS = {
    "mixtral": (layer(8, 2, 14336, router={"normalize_weights": True}), ()),
    "qwen3_moe": (layer(128, 8, 768, router={"normalize_weights": True}), ()),
    "olmoe": (layer(64, 8, 1024, router={"normalize_weights": False}), ()),
    "deepseek_v3": (sigmoid_layer(256, 2048, weight_scale=2.5, num_groups=8, groups_per_token=4), (0, 1, 2)),
    "kimi_k2": (sigmoid_layer(384, 2048, weight_scale=2.827), (0,)),
    "glm4_moe": (sigmoid_layer(128, 1408), (0,)),
    "gpt_oss": (layer(32, 4, 2880, router={"scoring": "softmax_selected"}, **GPT_OSS), ()),
    "qwen2_moe": (qwen_layer(64, 8, 2560, 20480, normalize_weights=False), ()),
    "qwen3_next": (qwen_layer(512, 10, 512, 512, normalize_weights=True), ()),
    "deepseek_v2": (layer(64, 6, 1408, router={"normalize_weights": False}, shared_width=2816), (0,)),
    "minimax_m2": (layer(256, 8, 1536, router=SIGMOID, selection_bias=True), ()),
    "granitemoe": (layer(32, 8, 512, router={"scoring": "softmax_selected"}), ()),
    "ernie4_5_moe": (layer(64, 6, 1536, router=SUM, shared_width=3072, selection_bias=True), (0,)),
    "dbrx": (layer(16, 4, 10752, router=SUM), ()),
    "minicpm": (layer(40, None, 128, router={"scoring": "relu", "weight_norm": "rms"}, activation="silu"), ()),
}
"""The layer and the dense layers that `PUBLIC` describe, by family."""


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("family", LAYERS)
def test_public_models(family):
    described = checkpoints.read_model(PUBLIC[family])
    assert (described.layer, described.dense_layers) == LAYERS[family]


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("name", RELEASES)
def test_every_field_of_a_public_release_is_known_or_passed_over(name):
    config = RELEASES[name]["config"]
    described = checkpoints.read_model(config)
    layer = described.layer
    assert described.family == config["model_type"]
    assert MoEConfig.from_huggingface(config) == layer
    width, layers = ("d_model", "n_layers") if described.family == "dbrx" else ("hidden_size", "num_hidden_layers")
    assert (described.width, described.num_layers) == (config[width], config[layers])
    assert described.use_bias == (described.family == "gpt_oss")
    has_dense = described.family not in WITHOUT_DENSE
    assert described.dense_width == (config["intermediate_size"] if has_dense else None)
    shared = config.get("n_shared_experts", config.get("moe_num_shared_experts", 0)) * layer.expert_width
    assert layer.shared_width == config.get("shared_expert_intermediate_size", shared)
    first = config.get("first_k_dense_replace", config.get("moe_layer_start_index", 0))
    assert described.dense_layers == tuple(range(first))


def test_there_are_three_releases_of_each_family():
    counted = Counter(release["config"]["model_type"] for release in RELEASES.values())
    assert counted.keys() == LAYERS.keys()
    fewer = {"dbrx": 2, "minicpm": 1}
    assert all(count >= fewer.get(family, 3) for family, count in counted.items())


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("family", FAMILIES + LATER)
def test_files_of_transformers_5_by_path_folder_or_content(family):
    path = FIXTURES / family / "config.json"
    layer = model(family).layer
    assert MoEConfig.from_huggingface(path) == MoEConfig.from_huggingface(json.loads(path.read_text())) == layer
    assert MoEConfig.from_huggingface(str(path)) == layer


def test_dense_layers_are_listed_or_every_other_or_the_first():
    config = PUBLIC["qwen3_moe"] | {"num_hidden_layers": 6, "mlp_only_layers": [3], "decoder_sparse_step": 2}
    assert checkpoints.read_model(config).dense_layers == (0, 2, 3, 4)
    assert len(checkpoints.read_model(PUBLIC["deepseek_v3"] | {"first_k_dense_replace": 10**9}).dense_layers) == 61
    config = PUBLIC["ernie4_5_moe"] | {"num_hidden_layers": 7, "moe_layer_interval": 2, "moe_layer_end_index": 4}
    assert checkpoints.read_model(config).dense_layers == (0, 2, 4, 5, 6)


def test_losses_count_where_transformers_adds_them():
    config = PUBLIC["qwen3_moe"] | {"output_router_logits": True}
    assert MoEConfig.from_huggingface(config).load_balancing_weight == pytest.approx(0.001 * 8 / 48)


FFN = {"model_type": ""}
"""What tells a change of DBRX's `ffn_config`, which says this of itself."""


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("mixtral", {"model_type": "llama"}, "model_type='llama' must be mixtral or qwen3_moe or olmoe"),
        ("mixtral", {"hidden_act": "quick"}, "hidden_act='quick' must be silu or"),
        ("mixtral", {"num_experts": 4}, "num_experts=4 must be num_local_experts=8"),
        ("mixtral", {"num_experts_per_tok": 9}, "experts_per_token=9 must be from 1 to"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 must be 0"),
        ("mixtral", {"experts_everywhere": True}, "experts_everywhere=True is unknown to mixtral, and could change"),
        ("mixtral", {"quantization_config": {"quant_method": "awq"}}, "quantization_config=.* is unknown"),
        ("olmoe", {"n_group": 4}, "n_group=4 is unknown to olmoe"),
        ("qwen3_moe", {"mlp_only_layers": [48]}, "mlp_only_layers=.* from 0 to 47"),
        ("qwen3_moe", {"mlp_only_layers": "1"}, "mlp_only_layers"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 4}, "shared_expert_intermediate_size=4 is unknown"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax' must be sigmoid"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy' must be noaux_tc"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2 must be 1"),
        ("deepseek_v3", {"n_group": 7}, "num_groups=7 must be a divisor"),
        ("deepseek_v3", {"quantization_config": {"weight_block_size": [64, 64]}}, "weight_block_size"),
        ("deepseek_v3", {"quantization_config": "fp8"}, "quantization_config='fp8' must be null, or have"),
        ("gpt_oss", {"experts_per_token": 2}, "experts_per_token=2 must be num_experts_per_tok=4"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act='gelu' must be silu"),
        ("gpt_oss", {"swiglu_limit": -1.0}, "limit=-1.0 must be positive"),
        ("olmoe", {"num_experts": 10**12}, "num_experts=1000000000000 must be an integer from"),
        ("qwen3_moe", {"num_hidden_layers": 10**12, "decoder_sparse_step": 2}, "num_hidden_layers=1000000000000"),
        ("gpt_oss", {"swiglu_limit": -(10**400)}, "swiglu_limit=-1000.* must be a finite number"),
        ("mixtral", {"norm_topk_prob": False}, "norm_topk_prob=False must be True"),
        ("mixtral", {"model_type": "phimoe"}, r"'phimoe' has another layer: its router \(sparsemixer\) weighs"),
        ("mixtral", {"model_type": ["phimoe"]}, r"model_type=\['phimoe'\] must be mixtral or"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "'noaux_tc' must be greedy or group_limited_greedy"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "topk_group": 0}, "topk_group=0 must be an integer"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True must be False"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid' must be softmax"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0 must be an integer"),
        ("qwen3_next", {"quantization_config": {"fmt": "e5m2"}}, "quantization_config=.* must be null, or have"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias=False must be True"),
        ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size=8 must be 0"),
        ("granitemoe", {"shared_intermediate_size": 8}, "shared_intermediate_size=8 is unknown to granitemoe"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias=True must be False"),
        ("ernie4_5_moe", {"moe_gate_act": "sigmoid"}, "moe_gate_act='sigmoid' must be softmax"),
        ("minicpm", {"ffn_type": "vanilla"}, "ffn_type='vanilla' must be block_linear, a BlockFFN whose ex"),
        ("minicpm", {"norm_after_router": "sum"}, "norm_after_router='sum' must be rms"),
        ("minicpm", {"router_act": "sigmoid"}, "router_act='sigmoid' must be relu"),
        ("minicpm", {"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06 must be 1e-05, which normalises the router's weights"),
        ("minicpm", {"num_shared_experts": 1}, "num_shared_experts=1 must be 0"),
        ("dbrx", {"ffn_config": 3}, "config: ffn_config=3 must be an object"),
        ("dbrx", {"moe_top_k": 2}, "config: moe_top_k=2 is unknown to dbrx"),
        ("dbrx", FFN | {"moe_jitter_eps": 0.1}, "ffn_config: moe_jitter_eps=0.1 must be None or 0, for no noise of"),
        ("dbrx", FFN | {"moe_normalize_expert_weights": 0.5}, "moe_normalize_expert_weights=0.5 must be null or a n"),
        ("dbrx", FFN | {"ffn_act_fn": {"name": "silu", "approximate": True}}, "ffn_act_fn={.*} must be None or {'name"),
        ("dbrx", FFN | {"uniform_expert_assignment": True}, "ffn_config: uniform_expert_assignment=True is unknown"),
    ],
)
def test_what_contradicts_or_is_beyond_reason_is_named(family, change, message):
    if FFN.items() <= change.items():
        change = {"ffn_config": PUBLIC["dbrx"]["ffn_config"] | change}
    with pytest.raises(checkpoints.CheckpointError, match=message):
        checkpoints.read_model(PUBLIC[family] | change)


@pytest.mark.parametrize(("order", "router"), [(None, {"normalize_weights": False}), (2, {"weight_norm": 2.0})])
@pytest.mark.default_cases("*")
def test_weights_of_dbrx_are_divided_by_any_norm(order, router):
    part = PUBLIC["dbrx"]["ffn_config"] | {"moe_normalize_expert_weights": order}
    described = checkpoints.read_model(PUBLIC["dbrx"] | {"ffn_config": part})
    assert described.layer.router == Router(**router)


NEEDED = """hidden_size num_hidden_layers hidden_act norm_topk_prob n_group topk_group model_type routed_scaling_factor
n_shared_experts first_k_dense_replace moe_intermediate_size num_local_experts num_experts n_routed_experts d_model
shared_expert_intermediate_size moe_num_experts moe_k moe_num_shared_experts moe_layer_start_index n_layers
ffn_type router_act norm_after_router expert_size"""
NO_SUCH_VALUE = ("8", None, [1], {}, math.nan, 1e400, 10**400, -(10**400))


@pytest.mark.default_cases("mixtral", "qwen3_moe", "olmoe", "kimi_k2", "gpt_oss", "ernie4_5_moe", "dbrx")
@pytest.mark.parametrize("family", LAYERS)
def test_what_decides_the_mathematics_must_be_there_and_of_its_type(family):
    config = PUBLIC[family]
    without_groups = {"n_group", "topk_group"} if family == "deepseek_v2" else set()
    for name in config.keys() & set(NEEDED.split()) - without_groups:
        other = 1 if isinstance(config[name], bool) else True
        for value in (*NO_SUCH_VALUE, other):
            with pytest.raises(checkpoints.CheckpointError, match=f"config: {name}=.* must be "):
                checkpoints.read_model(config | {name: value})
        with pytest.raises(checkpoints.CheckpointError, match="is missing, must be "):
            checkpoints.read_model({key: value for key, value in config.items() if key != name})


def test_groups_of_deepseek_v2_count_by_their_best_expert():
    sizes = {"n_routed_experts": 160, "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0}  # the large one's
    read = checkpoints.read_model(PUBLIC["deepseek_v2"] | sizes | {"topk_method": "group_limited_greedy"})
    groups = {"num_groups": 8, "groups_per_token": 3, "scores_per_group": 1}
    assert read.layer.router == Router(normalize_weights=False, weight_scale=16.0, **groups)
    greedy = checkpoints.read_model(PUBLIC["deepseek_v2"] | sizes)
    assert greedy.layer.router == Router(normalize_weights=False, weight_scale=16.0)


TWICE = "{" + ",".join(f'"a{n % 80_000}": 0' for n in range(80_001)) + "}"


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[1]", "must hold a JSON object, holds list"),
        (TWICE, "'a0' stands there twice"),
        ("[" * 100_000, "is not JSON"),
        ("\x00\xff", "is not JSON"),
        (None, "cannot be read"),
        ("a pipe", "is no file"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_broken_files_are_named_in_no_time(tmp_path, text, message):
    path = tmp_path / "config.json"
    if text == "a pipe":
        os.mkfifo(path)
    elif text is not None:
        path.write_text(text)
    start = time.perf_counter()
    with pytest.raises(checkpoints.CheckpointError, match=f"config.json: .*{message}"):
        MoEConfig.from_huggingface(path)
    assert time.perf_counter() - start < 5


OF_OTHER_PARTS = {"qkv_bias": True, "use_qk_norm": True, "mlp_bias": False, "expert_capacity": None, "n_group": 0}
OF_OTHER_PARTS |= {"shared_expert_intermediate_size": 0, "partial_rotary_factor": 0.5, "factor": 2, "attn_factor": 1}
OF_OTHER_PARTS |= {"exact": True, "unsloth_fixed": True, "unsloth_version": "2025.9", "text_config": None, 7: 8}
OF_OTHER_PARTS |= {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 32768}
OF_OTHER_PARTS |= {"_experts_implementation": "grouped_mm", "attention_dropout": 0.1, "logits_to_keep": 1}
OF_OTHER_PARTS |= {"tokenizer_class": "Qwen2Tokenizer", "router_aux_loss_coef": 0.5, "seq_aux": True}
OF_OTHER_PARTS |= {"aux_loss_alpha": 0.1, "max_window_layers": 28, "sliding_window": 4096, "use_sliding_window": True}
OF_OTHER_PARTS |= {"quantization_config": None}


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "mixtral"])
def test_what_concerns_other_parts_is_passed_over(family):
    assert checkpoints.read_model(PUBLIC[family] | OF_OTHER_PARTS) == checkpoints.read_model(PUBLIC[family])


REFUSED = """expert_capacity_factor numExpertsPerGroup moe_shared_size use_gate gating_dropout mlp_bias ffn_mult
activation_limit swiglu_beta topk_scale n_group scoring router_z_loss_coef shared_width residual_multiplier weight_scale
drop_tokens normalize_weights quantization use_bias"""


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("name", REFUSED.split())
def test_what_could_change_the_layer_is_refused(name):
    with pytest.raises(checkpoints.CheckpointError, match=f"{name}=2 is unknown to olmoe, and could change the layer"):
        checkpoints.read_model(PUBLIC["olmoe"] | {name: 2})


def test_a_name_that_cannot_be_printed_is_escaped():
    with pytest.raises(checkpoints.CheckpointError, match=r"expert\\ud800=1 is unknown") as raised:
        checkpoints.read_model(PUBLIC["olmoe"] | {"expert\ud800": 1})
    assert str(raised.value).isascii()
