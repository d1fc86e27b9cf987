"""Every field of a public model's config.json: used as transformers uses it, refused, or without effect there, too."""

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file

from tests.blaze_jax.checkpoints.models import FIXTURES, expected
from tests.numerics import assert_close
from tests.train_example.check_with_transformers import LOGITS_OF_VARIANTS, VARIANTS
from train_example.config import UserError
from train_example.program.arguments import new_config
from train_example.program.presets import PRESETS
from train_example.public_models.config import FAMILIES, public_config
from train_example.public_models.gpt_oss import decoder_class
from train_example.public_models.weights import load_params

USED = {
    "decoder_sparse_step": 2,
    "head_dim": 12,
    "hidden_act": "gelu",
    "hidden_size": 24,
    "intermediate_size": 12,
    "max_position_embeddings": 32,
    "mlp_only_layers": [0],
    "moe_intermediate_size": 12,
    "norm_topk_prob": None,  # the other one
    "num_attention_heads": 8,
    "num_experts": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 5,
    "num_key_value_heads": 1,
    "rms_norm_eps": 0.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
    "tie_word_embeddings": None,
    "vocab_size": 40,
}
REFUSED = {
    "attention_bias": True,
    "attention_dropout": 0.1,
    "clip_qkv": 8.0,
    "layer_types": ["full_attention", "sliding_attention"],
    "logit_softcapping": 30.0,
    "partial_rotary_factor": 0.5,
    "qkv_bias": True,
    "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "shared_expert_intermediate_size": 8,
    "use_qk_norm": False,
    "use_sliding_window": True,
}
ROTATIONS = {"rope_type": "yarn", "type": "linear", "partial_rotary_factor": 0.5, "factor": 4.0}
WITHOUT_EFFECT = {
    "architectures": ["Another"],
    "bos_token_id": 3,
    "dtype": "float16",
    "eos_token_id": 4,
    "initializer_range": 1.0,
    "max_window_layers": 1,
    "output_router_logits": False,  # of a loss, with the coefficient, as below
    "pad_token_id": 5,
    "router_aux_loss_coef": 0.5,
    "sliding_window": 2,
    "transformers_version": "6.0.0",
    "use_cache": False,
}
OF_GPT_OSS = {
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "num_local_experts": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
    "sliding_window": 7,
}
REFUSED_OF_GPT_OSS = {
    "attention_bias": False,
    "swiglu_alpha": 1.5,
    "swiglu_limit": 8.0,
    "layer_types": ["full_attention"],
    "quantization_config": {"quant_method": "fp8"},
}
OF_QWEN3 = ("decoder_sparse_step", "max_window_layers", "mlp_only_layers", "moe_intermediate_size")


def changed(folder, family, **change):
    """The folder, with a config.json of that family in which fields are others."""
    config = json.loads((FIXTURES / family / "config.json").read_text())
    for name, value in change.items():
        config[name] = (not config[name]) if value is None else value
    if "num_experts" in change:
        config.pop("num_local_experts", None)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.default_cases("*")
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe"])
def test_every_field_is_used_or_refused_or_without_effect(tmp_path, family):
    fields = json.loads((FIXTURES / family / "config.json").read_text()).keys()
    assert fields <= {*USED, *REFUSED, *WITHOUT_EFFECT, "model_type", "num_local_experts"}
    plain = public_config(FIXTURES / family)
    for name, value in (USED | WITHOUT_EFFECT).items():
        if family == "qwen3_moe" or name not in OF_QWEN3:
            read = public_config(changed(tmp_path, family, **{name: value}))
            assert (read != plain) == (name in USED), name
    assert public_config(changed(tmp_path, family, rope_parameters={}, rope_theta=7)).rotary_base == 7
    loss = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    assert public_config(changed(tmp_path, family, **loss)).load_balancing_weight > 0
    for name, value in REFUSED.items():
        with pytest.raises(UserError, match=f"{name}="):
            public_config(changed(tmp_path, family, **{name: value}))
    for name, value in ROTATIONS.items():
        with pytest.raises(UserError, match=f"has rope_parameters's {name}={value}, "):
            public_config(changed(tmp_path, family, rope_parameters={"rope_type": "default", name: value}))


def test_fields_of_gpt_oss_are_used_or_refused(tmp_path):
    plain = public_config(FIXTURES / "gpt_oss-model")
    assert plain.windows == (5, 0, 5)
    for name, value in OF_GPT_OSS.items():
        assert public_config(changed(tmp_path, "gpt_oss-model", **{name: value})) != plain, name
    for name, value in REFUSED_OF_GPT_OSS.items():
        with pytest.raises(UserError, match=name):
            public_config(changed(tmp_path, "gpt_oss-model", **{name: value}))
    rope = json.loads((FIXTURES / "gpt_oss-model" / "config.json").read_text())["rope_parameters"]
    for name in rope:
        other = rope | {name: "linear" if name == "rope_type" else not rope[name] if name == "truncate" else 48}
        if name == "rope_type":
            with pytest.raises(UserError, match="rope_parameters's"):
                public_config(changed(tmp_path, "gpt_oss-model", rope_parameters=other))
        else:
            assert public_config(changed(tmp_path, "gpt_oss-model", rope_parameters=other)) != plain, name
    # As the published files have it.
    published = {name: value for name, value in rope.items() if name != "rope_theta"}
    older = {"rope_parameters": {}, "rope_scaling": published, "rope_theta": 500}
    assert public_config(changed(tmp_path, "gpt_oss-model", **older)) == plain


def test_public_releases_have_no_field_that_the_decoder_does_not_know(tmp_path):
    """The layer's own reader passes over what is of other parts; here all of it counts."""
    releases = json.loads((FIXTURES.parent / "public_configs.json").read_text())
    read = {}
    for name, release in releases.items():
        if release["config"]["model_type"] in FAMILIES and not name.endswith("FP8"):
            (tmp_path / "config.json").write_text(json.dumps(release["config"]))
            read[name] = public_config(tmp_path)
    assert len(read) == 8
    oss = read["openai/gpt-oss-20b"]
    assert replace(oss, max_positions=None, load_balancing_weight=0.0) == replace(
        PRESETS["gpt-oss-20b"].model, load_balancing_weight=0.0
    )
    coder = read["Qwen/Qwen3-Coder-480B-A35B-Instruct"]  # which says that it has no shared experts
    assert (coder.shared_width, coder.qk_norm, coder.head_width) == (0, "head", 128)


@pytest.mark.default_cases("gpt_oss-model")
@pytest.mark.ci_cases("olmoe", "qwen3_moe")
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers_with_other_values_of_the_fields(tmp_path, name):
    family = name.strip()
    config = public_config(changed(tmp_path, family, **VARIANTS[name]))
    model = decoder_class(config)(config, config.moe(), jnp.float32)
    params = load_params(FIXTURES / family, model)
    logits = jax.jit(model.apply)({"params": params}, expected(family)["ids"])
    assert_close(logits, load_file(LOGITS_OF_VARIANTS)[name], 1e-5)


def test_a_head_of_its_own_where_the_embedding_should_be_the_head(tmp_path):
    folder = shutil.copytree(FIXTURES / "olmoe", tmp_path / "model")
    config = public_config(changed(folder, "olmoe", tie_word_embeddings=True))
    with pytest.raises(UserError, match=r"tensor 'lm_head.weight' is not 'model.embed_tokens.weight', though"):
        load_params(folder, decoder_class(config)(config, config.moe(), jnp.float32))


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("mixtral", {}, "is a model of mixtral, must be one of olmoe, qwen3_moe, gpt_oss"),
        ("olmoe", {"hidden_size": "wide"}, "config.json: hidden_size='wide' must be an integer"),
        ("qwen3_moe", {"rms_norm_eps": "small"}, "rms_norm_eps='small' must be a positive number"),
        ("qwen3_moe", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a positive number"),
        ("olmoe", {"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta=nan must be a positive number"),
        ("olmoe", {"rope_parameters": [1]}, r"rope_parameters=\[1\] must be an object"),
        ("olmoe", {"tie_word_embeddings": "false"}, "tie_word_embeddings='false' must be true or false"),
        ("olmoe", {"num_attention_heads": 3}, "num_attention_heads=3 must be a multiple of num_key_value_heads=2, and"),
        ("olmoe", {"num_attention_heads": 10**12}, "num_attention_heads=1000000000000 must be an integer from 1"),
        ("olmoe", {"head_dim": 7}, "heads of width 7"),
        ("olmoe", {"vocab_size": 2.5}, "vocab_size=2.5 must be an integer"),
        ("olmoe", {"layer_types": 7}, "layer_types=7, must be full_attention in every layer"),
    ],
)
def test_models_that_the_decoder_is_not_and_fields_that_lie_are_named(tmp_path, family, change, message):
    with pytest.raises(UserError, match=message):
        public_config(changed(tmp_path, family, **change))


def test_a_run_has_sequences_no_longer_than_the_model_was_made_for_and_an_activation_that_its_experts_have(tmp_path):
    assert new_config({"checkpoint": str(FIXTURES / "qwen3_moe")}).sequence_length == 64
    folder = changed(tmp_path, "olmoe", hidden_act="gelu")
    with pytest.raises(UserError, match=r"--experts-layer sort\+ragged_dot has no geglu, only swiglu"):
        new_config({"checkpoint": str(folder), "experts_layer": "sort+ragged_dot"})
