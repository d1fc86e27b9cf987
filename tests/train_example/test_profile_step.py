"""Where a step's time goes: kernels by part, with traces written by hand and programs compiled here."""

import json
import re
from dataclasses import replace
from typing import get_args

import jax
import pytest

from blaze_jax.benchmark.rates import Ceilings
from blaze_jax.benchmark.timing import Kernel
from tests.train_example.small import CONFIG, FULL_MODEL, MODEL, windows
from train_example import profile_step as profile
from train_example.compile_step import lower_step, xla_options
from train_example.config import Remat
from train_example.program import step_parts as parts
from train_example.program.model import make_model
from train_example.program.presets import PRESETS
from train_example.step import init_state

CONFIG = replace(CONFIG, model=FULL_MODEL)
PROGRAM = """
%fused_copy (p: f32[8]) -> bf16[8] {
  ROOT %convert.1 = bf16[8]{0} convert(%p), metadata={op_name="final_norm/convert"}
}

%fused_stack (q: f32[2,8], r: f32[8], i: s32[]) -> f32[2,8] {
  %subtract.1 = s32[] subtract(%c, %i), metadata={op_name="jit(f)/while/body/sub"}
  ROOT %dus = f32[2,8]{1,0} dynamic-update-slice(%q, %r, %i), metadata={op_name="while/dynamic_update_slice"}
}

%fused_experts (s: f32[8]) -> (f32[8], f32[8]) {
  %custom.1 = f32[8]{0} custom-call(%s), metadata={op_name="jit(f)/moe_blocks/moe/experts/moe_up/mpmd_map"}
  ROOT %tuple.1 = (f32[8]{0}, f32[8]{0}) tuple(%custom.1, %custom.1)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %loop_convert_fusion.3 = bf16[8]{0} fusion(%a), kind=kLoop, calls=%fused_copy, metadata={op_name="final_norm/convert"}
  %fusion-start.2 = ((f32[2,8]{1,0}), f32[2,8]{1,0}, u32[]) fusion-start(%a), kind=kLoop, calls=%fused_stack
  %dynamic_slice_fusion = (f32[8]{0}, f32[8]{0}) fusion(%a), kind=kCustom, calls=%fused_experts
  ROOT %dot.1 = f32[8]{0} dot(%a, %a), metadata={op_name="jit(f)/moe_blocks/attention/query/dot_general"}
}
"""


@pytest.mark.parametrize(
    ("name", "op", "part"),
    [
        ("loop_convert_fusion_3", "loop_convert_fusion.3", parts.CASTS),
        ("loop_convert_fusion_3", "", parts.CASTS),
        ("some_kernel", "fusion-start.2", parts.CASTS),
        ("moe_up_mosaic_gpu", "dynamic_slice_fusion", "experts"),
        ("nvjet_hsh_128x256", "dot.1", "projections"),
        ("moe_dispatch_count", "", "router and dispatch"),
        ("moe_combine", "unknown.7", "experts"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "", "attention"),
        ("MemcpyD2D", "", parts.CASTS),
        ("mystery", "unknown.7", parts.OTHER),
    ],
)
def test_the_part_of_a_kernel(name, op, part):
    assert parts.part_of(Kernel(name, "jit_f", 0, 1, op), parts.parts_of_instructions(PROGRAM)) == part


def test_parts_add_up_to_the_time_in_which_anything_ran():
    kernels = [
        Kernel("gemm", "", 0, 10, "dot.1"),
        Kernel("up", "", 5, 10, "dynamic_slice_fusion"),  # half of it while the first still runs
        Kernel("mystery", "", 30, 4),
        Kernel("gemm", "", 40, 2, "dot.1"),
    ]
    found = {row["part"]: row for row in parts.by_part(kernels, parts.parts_of_instructions(PROGRAM), 1)}
    times = {name: round(1e6 * row["ms"]) for name, row in found.items() if row["ms"]}
    assert times == {"projections": 12, "experts": 5, parts.OTHER: 4}
    assert found["projections"]["launches"] == 2
    assert found[parts.OTHER]["kernels"] == [{"name": "mystery", "ms": pytest.approx(4e-6)}]


def as_if_run(text):
    """A trace of all instructions that do something, one after the other with gaps."""
    names = re.findall(r"^  (?:ROOT )?%?([\w.\-]+) = .*? (?:fusion|dot|custom-call|copy|convert|reduce)\(", text, re.M)
    return [Kernel(name, "jit_train_step", 30.0 * i, 20.0, name) for i, name in enumerate(names)]


@pytest.mark.slow
def test_every_part_of_the_model_is_found_in_its_program_and_the_record_accounts_for_the_whole_step():
    model = make_model(CONFIG)
    state = jax.eval_shape(lambda: init_state(CONFIG, model))
    text = lower_step(CONFIG, model, state, windows(1, 8, 17)).compile(xla_options(CONFIG)).as_text()
    kernels = as_if_run(text)
    record = profile.profile_record(
        kernels, 2, parts.parts_of_instructions(text), CONFIG, 10_000, Ceilings(tflops=800.0, gbs=4000.0)
    )
    times = {row["part"]: row["ms"] for row in record["parts"]}
    assert all(times[name] for name in parts.PARTS if name != parts.OTHER), times
    assert sum(times.values()) == record["device_ms"] == pytest.approx(20 * len(kernels) / 2 / 1e6)
    assert times[parts.OTHER] < 0.1 * record["device_ms"]
    assert record["step_ms"] == pytest.approx((30 * len(kernels) - 10) / 2 / 1e6)
    assert record["device_ms"] + record["gaps_ms"] == pytest.approx(record["step_ms"])
    assert all(row["bound_ms"] > 0 for row in record["parts"] if row["part"] != parts.OTHER)
    assert record["bound_ms"] == pytest.approx(sum(row["bound_ms"] for row in record["parts"]))


def test_the_work_is_six_operations_a_parameter_and_token_and_that_of_attention_and_the_optimizers_bytes():
    config = replace(CONFIG, model=replace(FULL_MODEL, num_dense_layers=0, num_kv_heads=FULL_MODEL.num_heads))
    m, tokens = config.model, config.batch_size * config.sequence_length
    flops = {name: sum(one.flops for one in works) for name, works in parts.step_work(config, 1).items()}
    assert flops["projections"] == 6 * tokens * 4 * m.width**2 * m.num_layers
    assert flops["dense feed-forward"] == 6 * tokens * 3 * m.width * m.shared_width * m.num_layers
    pairs = tokens * m.experts_per_token
    matrices = 6 * pairs * 3 * m.width * m.expert_width
    assert flops["experts"] == (matrices + 4 * pairs * m.width) * m.num_layers  # and the sums over slots
    assert flops["attention"] == 7 * tokens * config.sequence_length * m.width * m.num_layers
    # The optimizer reads and writes parameters and moments.
    (work,) = parts.step_work(CONFIG, 100)["optimizer"]
    assert work.bytes == 100 * (2 * 2 + 6 * 4)
    (work,) = parts.step_work(replace(CONFIG, momentum_dtype="bfloat16", dtype="float32"), 100)["optimizer"]
    assert work.bytes == 100 * (2 * 4 + 4 * 4 + 2 * 2)


@pytest.mark.slow
def test_the_command_prints_and_writes_a_profile(tmp_path, capsys, monkeypatch):
    def trace(run):
        run()
        return [Kernel("moe_combine", "", 0, 3e6), Kernel("mystery", "", 4e6, 1e6)]

    monkeypatch.setattr(profile, "trace", trace)
    monkeypatch.setattr(profile, "on_gpu", lambda: True)
    monkeypatch.setitem(PRESETS, "tiny", replace(CONFIG, model=MODEL))
    file, figure = tmp_path / "new" / "profile.json", tmp_path / "figures" / "profile.png"
    options = "--preset tiny --traced 1 --after 2"
    assert profile.main([*options.split(), "--json", str(file), "--plot", str(figure)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^  experts +3\.00 +60\.0%", shown, re.M)
    assert re.search(r"^  other +1\.00 +20\.0%", shown, re.M)
    assert "      mystery" in shown
    assert re.search(r"^  gaps +1\.00 +20\.0%", shown, re.M)
    assert "memory that no step does without" in shown
    assert "after 2 steps, in CUDA graphs" in shown
    assert re.search(r"tokens/s, \d+ TFLOP/s of the model's own arithmetic, \d+% of dense", shown)
    content = json.loads(file.read_text())
    assert content["records"][0]["parts"][0]["kernels"] == [{"name": "moe_combine", "ms": 3.0}]
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is a GPU")
def test_without_a_gpu_the_command_says_so_at_once(capsys):
    assert profile.main([]) == 2
    assert capsys.readouterr().err == "profile_step: there is no GPU to trace, the device here is cpu\n"


def test_the_floor_of_memory_holds_the_whole_state_and_what_the_remat_setting_does_not_compute_again():
    for config in (CONFIG, replace(CONFIG, momentum_dtype="bfloat16")):
        state = jax.eval_shape(lambda c=config: init_state(c, make_model(c)))
        parameters, moments = (
            sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(t)) for t in (state.params, state.optimizer_state)
        )
        floor = parts.memory_floor(config, parameters // 4)
        assert floor["float32 parameters"] == parameters
        assert floor["optimizer's moments"] == pytest.approx(moments, rel=1e-3)  # there are counters, too
        assert floor["working copy and gradients"] == parameters  # half and half
    config = replace(CONFIG, model=replace(FULL_MODEL, num_dense_layers=0), accumulate=2, dtype="float32")
    kept = {r: parts.memory_floor(replace(config, remat=r), 1)["kept for the backward pass"] for r in get_args(Remat)}
    m, tokens = config.model, config.batch_size * config.sequence_length // 2
    layer_input, of_experts = 4 * tokens * m.width, 4 * tokens * 2 * m.experts_per_token * m.expert_width
    assert kept["full"] == m.num_layers * layer_input
    assert kept["except-experts"] == m.num_layers * (layer_input + of_experts)
    assert kept["none"] > m.num_layers * (7 * layer_input + of_experts)  # keys and values are half as wide
