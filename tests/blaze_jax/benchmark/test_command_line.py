"""The command line, on sizes too small to time anything."""

import json
import shlex

import jax
import pytest

from blaze_jax.benchmark import mesh, rates, studies
from blaze_jax.benchmark.__main__ import STUDIES, _cases, main, parse_arguments
from blaze_jax.benchmark.own_process import ProcessError
from blaze_jax.benchmark.sizes import Sizes
from blaze_jax.benchmark.studies import Routed
from pallas_kernels.mosaic.interpreter import interpreted

SMALL = "16,8,4,3,2"
PNG = b"\x89PNG"
ON_CPU = jax.default_backend() == "cpu"


@pytest.fixture
def measured(tmp_path):
    """Runs a command that succeeds and returns its results file."""

    def run(command):
        file = tmp_path / "new" / "results.json"
        assert main([*shlex.split(command), "--json", str(file)]) == 0
        return json.loads(file.read_text(encoding="utf-8"))

    return run


@pytest.mark.slow
def test_the_table_of_kernels_and_its_json(capsys, measured):
    written = measured(f"kernels --config {SMALL} --dtype bfloat16 --repeats 2")
    out = capsys.readouterr().out
    assert f"jax {jax.__version__}" in out.splitlines()[0]
    assert "T=16, d=8, n=4, E=3, K=2, bfloat16" in out
    (record,) = written["records"]
    assert record["sizes"]["num_experts"] == 3
    assert record["ceilings"]["one_expert_tflops"] > 0
    assert record["ceilings"]["sustained_one_expert_tflops"] > 0
    assert record["passes"].keys() == {"forward", "forward+backward"}
    for timed in record["passes"].values():
        assert len(timed["samples_us"]) == 2
        assert min(timed["tflops"], timed["sustained"]["tflops"]) > 0
    if ON_CPU:
        assert "wall time, because there is no GPU" in out
        assert written["environment"]["device"] == "cpu"


@pytest.mark.skipif(not ON_CPU, reason="in the interpreter")
@pytest.mark.slow
def test_the_table_of_kernels_of_a_family(capsys, monkeypatch):
    monkeypatch.setattr(
        rates, "take_turns", lambda calls, **_: {name: {"us": 1 / (1 + i)} for i, name in enumerate(calls)}
    )
    options = "--config 8,8,8,2,1 --dtype bfloat16 --repeats 1 --implementation mosaic_gpu --family ampere"
    with interpreted():
        assert main(["kernels", *shlex.split(options)]) == 0
    out = capsys.readouterr().out
    assert "cpu, kernels for Ampere" in out
    assert "our product of one expert" in out


@pytest.mark.slow
def test_our_layer_and_every_peer_have_a_line_for_each_pass(capsys, measured, tmp_path):
    figures = tmp_path / "figures"
    written = measured(f"--config {SMALL} --config 32,8,4,3,1 --repeats 2 --turns 1 --float32-weights --plot {figures}")
    out = capsys.readouterr().out
    assert not ON_CPU or "no GPU here but cpu: wall time, and small sizes" in out
    assert out.index("T=16, d=8") < out.index("T=32, d=8")
    for record in written["records"]:
        rows = {layer["layer"]: layer for layer in record["layers"]}
        conventional = ["dense dispatch", "sort + lax.ragged_dot", "sort + tokamax"]
        ours = ["blaze_jax", "blaze_jax (ampere)", "blaze_jax, float32 weights"]
        assert sorted(rows) == [*ours, *conventional]
        assert next(iter(rows)) == "blaze_jax"
        for name, layer in rows.items():
            missing = {"sort + tokamax": "tokamax", "blaze_jax (ampere)": "no NVIDIA GPU"}.get(name)
            if missing and layer["status"] != "ok":
                assert missing in layer["status"]
                assert layer["status"] in out
                continue
            assert layer["status"] == "ok"
            assert min(layer["saved_mib"], layer["forward"]["us"], layer["forward+backward"]["ratio_to_ours"]) > 0
    for name in ("speed.png", "memory.png"):
        assert (figures / name).read_bytes().startswith(PNG)


def test_presets_and_no_peers():
    arguments = parse_arguments(["--preset", "gpt-oss-20b", "--tokens", "4", "--peers"])
    assert arguments.command == "layers"
    assert _cases(arguments, STUDIES["layers"], on_gpu=True) == [(4, 2880, 2880, 32, 4)]
    assert arguments.peers == []


@pytest.mark.skipif(not ON_CPU, reason="takes the small sizes that a CPU gets")
@pytest.mark.parametrize(
    ("command", "cases", "kind", "said"),
    [
        ("routing", [Routed(512, 8, 2)], "routing", "XLA's top_k + argsort"),
        ("scaling", [Sizes(t, 16, 8, 4, 2) for t in (64, 128)], "scaling", "ns per token"),
        ("few-tokens", [Sizes(3, 16, 8, 4, 2)], "few_tokens", "experts in use"),
        ("bases", [Sizes(3, 64, 64, 4, 2)], "bases", "nf4, decoded before"),
        ("rounding", [Sizes(64, 16, 8, 4, 2)], "token_rounding", "rounded nearest"),
        ("atomic", [Sizes(64, 16, 1, 64, 4)], "atomic", "whole layer"),
        ("routers", [Sizes(64, 16, 8, 8, 2)], "routers", "half masked"),
        ("reading", [Sizes(1, 16, 8, 4, 2)], "reading", "layer at the file's speed"),
    ],
)
@pytest.mark.slow
def test_the_other_studies(command, cases, kind, said, capsys, measured, monkeypatch):
    monkeypatch.setitem(STUDIES, command, STUDIES[command]._replace(on_cpu=cases))
    records = measured(f"{command} --repeats 2")["records"]
    assert said in capsys.readouterr().out
    assert [record["kind"] for record in records] == [kind] * len(cases)
    if command == "routing":
        assert set(records[0]["calls"]) > {"capacity factor 1", "rounded to nearest", "rounded down"}


def test_what_to_expect_of_many_gpus_is_computed(capsys):
    assert main(["expected"]) == 0
    out = capsys.readouterr().out
    assert out.index("mixtral") < out.index("deepseek-v3")
    assert "  1024  " in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--repeats 0", "argument --repeats: 0 must be at least 1"),
        ("--limit-seconds -1", "argument --limit-seconds: -1 must be positive"),
        ("draw results.json", "required: --plot"),
        ("routing --preset olmoe", "unrecognized arguments: --preset olmoe"),
        ("mesh data=2 --family ampere", "unrecognized arguments: --family ampere"),
        ("mesh data=2,data=4", "each once"),
        ("layers --peers pytorch", "invalid choice: 'pytorch'"),
        ("sideways", "invalid choice: 'sideways'"),
    ],
)
def test_options_that_do_not_fit(options, message, capsys):
    with pytest.raises(SystemExit):
        main(options.split())
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "command"),
    [("--kernels", "kernels"), ("--repeats 3 --mesh expert=2", "mesh"), ("--mesh=data=2", "mesh")],
)
def test_an_option_that_has_become_a_command_is_named_in_a_line(options, command, capsys):
    assert main(options.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"has become a command: python -m blaze_jax.benchmark {command} ..." in line


def test_a_file_that_cannot_be_written_is_told_before_measuring(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert main(["--config", SMALL, "--json", str(tmp_path / "file" / "results.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_case_over_devices_that_fails_is_a_failure(capsys, monkeypatch):
    cases = []
    environment = dict.fromkeys(("date", "device", "jax", "jaxlib", "blaze_jax"), "made up") | {"platform": "cpu"}

    def run_apart(function, *arguments, seconds=None):
        cases.append(arguments[0])
        raise ProcessError("was killed")

    monkeypatch.setattr("blaze_jax.benchmark.__main__.run_apart", lambda function: environment)
    monkeypatch.setattr(mesh, "run_apart", run_apart)
    assert main(["mesh", "expert=2"]) == 1
    out = capsys.readouterr().out
    assert "was killed" in out
    assert "nothing is kept; --json FILE keeps the results" in out
    (case,) = cases
    assert case.sizes.weight_elements < 10**8  # not those of a GPU


def test_no_devices_at_all_are_a_failure(capsys, monkeypatch):
    def run_apart(function):
        raise ProcessError("RuntimeError: no GPU")

    monkeypatch.setattr("blaze_jax.benchmark.__main__.run_apart", run_apart)
    assert main(["mesh", "expert=2"]) == 2
    assert "RuntimeError: no GPU" in capsys.readouterr().err


@pytest.mark.skipif(not ON_CPU, reason="takes the small sizes that a CPU gets")
@pytest.mark.slow
def test_a_layer_over_devices_against_one(capsys, measured):
    (record,) = measured("mesh expert=2 --repeats 1 --layers 2 --variant chunks=2 --config 64,32,16,4,2")["records"]
    assert "T=64, d=32, n=16, E=4, K=2; expert=2; chunks=2, float32" in capsys.readouterr().out
    assert record["options"] == {"chunks": 2}
    errors = record["passes"]["forward+backward"]["errors"]
    assert errors.keys() == {"y", "dx", "d_weights", "d_w_gate", "d_w_up", "d_w_down"}
    assert max(errors.values()) < 1e-5


@pytest.mark.parametrize("command", ["memory", "compile-time"])
def test_compiling_for_another_gpu_says_what_is_missing(command, capsys, monkeypatch):
    monkeypatch.setattr("blaze_jax.benchmark.__main__.missing_compiler", lambda: "the plugin is not installed")
    assert main([command]) == 2
    assert f"{command} cannot run: the plugin is not installed" in capsys.readouterr().err


@pytest.mark.compile_only
@pytest.mark.slow
def test_compile_time_and_memory_of_an_absent_gpu(capsys, monkeypatch, measured):
    monkeypatch.setattr(studies, "LAYERS", (2,))
    (record,) = measured("compile-time --config 64,64,32,4,2")["records"]
    assert "together" in capsys.readouterr().out
    (model,) = record["models"]
    assert (model["layers"], model["kernels"], model["different_kernels"]) == (2, 10, 10)  # as many as of one layer
    assert all(model[f"{stage}_s"] > 0 for stage in ("trace", "lower", "compile"))
    (record,) = measured("memory --config 64,64,32,4,2 --peers 'dense dispatch'")["records"]
    assert [layer["status"] for layer in record["layers"]] == ["ok"] * 4
    assert record["layers"][0]["saved_mib"] > record["layers"][2]["saved_mib"]  # all there is, and inputs alone
