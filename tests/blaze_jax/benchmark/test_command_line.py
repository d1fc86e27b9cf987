"""The command line, on sizes too small to time anything."""

import json
import signal
from pathlib import Path

import jax
import pytest

from blaze_jax.benchmark.__main__ import main
from blaze_jax.benchmark.arguments import parse_arguments
from blaze_jax.benchmark.sizes import CPU_MESH_SIZES, Sizes, preset
from blaze_jax.benchmark.timing import Sustained
from pallas_kernels.mosaic.interpreter import interpreted

SMALL = "16,8,4,3,2"
PNG = b"\x89PNG"
ON_CPU = jax.default_backend() == "cpu"


@pytest.mark.slow
def test_the_table_of_kernels_and_its_json(capsys, tmp_path):
    file = tmp_path / "new" / "results.json"
    assert main(["--kernels", "--config", SMALL, "--dtype", "bfloat16", "--repeats", "2", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert f"jax {jax.__version__}" in out.splitlines()[0]
    assert "T=16, d=8, n=4, E=3, K=2, bfloat16" in out
    written = json.loads(file.read_text(encoding="utf-8"))
    (record,) = written["records"]
    assert record["sizes"]["num_experts"] == 3
    assert record["ceilings"]["one_expert_tflops"] > 0
    assert record["ceilings"]["sustained_one_expert_tflops"] > 0
    assert record["passes"].keys() == {"forward", "forward+backward"}
    for timed in record["passes"].values():
        assert len(timed["samples_us"]) == 2
        assert timed["tflops"] > 0
    if ON_CPU:
        assert "wall time, there is no GPU" in out
        assert written["environment"]["device"] == "cpu"


@pytest.mark.skipif(not ON_CPU, reason="in the interpreter")
@pytest.mark.slow
def test_the_table_of_kernels_of_a_family(capsys, monkeypatch):
    monkeypatch.setattr("blaze_jax.benchmark.kernels.sustain", lambda call, **_: Sustained(1, 1.0, None))
    options = ["--kernels", "--config", "8,8,8,2,1", "--dtype", "bfloat16", "--repeats", "1"]
    with interpreted():
        assert main([*options, "--implementation", "mosaic_gpu", "--family", "ampere"]) == 0
    out = capsys.readouterr().out
    assert "cpu, kernels for Ampere" in out
    assert "our product of one expert" in out


@pytest.mark.slow
def test_our_layer_and_every_peer_have_a_line_for_each_pass(capsys, tmp_path):
    file = tmp_path / "results.json"
    options = ["--config", SMALL, "--config", "32,8,4,3,1", "--repeats", "2"]
    assert main([*options, "--json", str(file), "--plot", str(tmp_path / "figures")]) == 0
    out = capsys.readouterr().out
    assert not ON_CPU or "no GPU here but cpu: wall time, and small sizes" in out
    assert out.index("T=16, d=8") < out.index("T=32, d=8")
    for record in json.loads(file.read_text(encoding="utf-8"))["records"]:
        names = [layer["layer"] for layer in record["layers"]]
        conventional = ["dense dispatch", "sort + lax.ragged_dot", "sort + tokamax"]
        assert sorted(names) == ["blaze_jax", "blaze_jax (ampere)", *conventional]
        assert names[0] == "blaze_jax"
        for layer in record["layers"]:
            missing = {"sort + tokamax": "tokamax", "blaze_jax (ampere)": "no NVIDIA GPU"}.get(layer["layer"])
            if missing and layer["status"] != "ok":
                assert missing in layer["status"]
                assert layer["status"] in out
                continue
            assert layer["status"] == "ok"
            assert layer["saved_mib"] > 0
            assert layer["forward"]["us"] > 0
            assert layer["forward+backward"]["ratio_to_ours"] > 0
    for name in ("speed.png", "memory.png"):
        assert (tmp_path / "figures" / name).read_bytes().startswith(PNG)


@pytest.mark.slow
def test_float32_weights_have_a_line_of_their_own(capsys, tmp_path):
    file = tmp_path / "results.json"
    options = ["--config", SMALL, "--dtype", "bfloat16", "--repeats", "2", "--peers", "--float32-weights"]
    assert main([*options, "--json", str(file)]) == 0
    assert "blaze_jax, float32 weights" in capsys.readouterr().out
    ours, wide = json.loads(file.read_text(encoding="utf-8"))["records"][0]["layers"]
    assert (ours["layer"], wide["layer"]) == ("blaze_jax", "blaze_jax, float32 weights")
    assert wide["status"] == "ok"
    assert wide["forward"]["us"] > 0
    assert wide["peak_mib"] > ours["peak_mib"]


def test_presets_and_no_peers():
    arguments = parse_arguments(["--preset", "gpt-oss-20b", "--tokens", "4", "--peers"])
    assert [preset(name, arguments.tokens) for name in arguments.preset] == [(4, 2880, 2880, 32, 4)]
    assert arguments.peers == []


@pytest.mark.skipif(not ON_CPU, reason="takes the small sizes that a CPU gets")
@pytest.mark.parametrize(
    ("mode", "kind", "said"),
    [
        ("--routing", "routing", "XLA top_k + argsort dispatch"),
        ("--scaling", "scaling", "ns per token"),
        ("--token-rounding", "token_rounding", "rounded nearest"),
    ],
)
@pytest.mark.slow
def test_the_other_studies(mode, kind, said, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("blaze_jax.benchmark.sizes.CPU_ROUTING_SIZES", ((512, 8, 2),))
    scaling = tuple(Sizes(t, 16, 8, 4, 2) for t in (64, 128))
    monkeypatch.setattr("blaze_jax.benchmark.sizes.CPU_SCALING_SIZES", scaling)
    monkeypatch.setattr("blaze_jax.benchmark.sizes.CPU_ROUNDING_SIZES", Sizes(64, 16, 8, 4, 2))
    file = tmp_path / "results.json"
    assert main([mode, "--repeats", "2", "--json", str(file)]) == 0
    assert said in capsys.readouterr().out
    records = json.loads(file.read_text(encoding="utf-8"))["records"]
    assert {record["kind"] for record in records} == {kind}
    assert len(records) == (2 if mode == "--scaling" else 1)
    if mode == "--routing":
        assert set(records[0]["calls"]) > {"capacity factor 1", "rounded to nearest", "rounded down"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--repeats 0", "--repeats 0 must be at least 1"),
        ("--tokens -1", "--tokens -1 must be at least 1"),
        ("--recorded results.json", "--recorded needs --plot FOLDER"),
        ("--routing --preset olmoe", "--routing has sizes of its own"),
        ("--kernels --scaling", "not allowed with"),
        ("--mesh data=2 --family ampere", "--family is not for --mesh"),
        ("--peers pytorch", "invalid choice: 'pytorch'"),
    ],
)
def test_options_that_do_not_fit(options, message, capsys):
    with pytest.raises(SystemExit):
        main(options.split())
    assert message in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_told_before_measuring(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert main(["--config", SMALL, "--json", str(tmp_path / "file" / "results.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err


class Ended:
    """A process that ended like this, in the place of one."""

    def __init__(self, returncode, stdout="", stderr=""):
        self.returncode, self.stdout, self.stderr = returncode, stdout, stderr


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (
            Ended(-signal.SIGKILL),
            "was killed, as the system does when memory runs out: choose smaller sizes by --config",
        ),
        (Ended(-signal.SIGSEGV), "was ended by signal 11: it said nothing"),
        (
            Ended(1, stderr="Traceback ...\nValueError: 1 devices are too few\n"),
            "with status 1: ValueError: 1 devices are",
        ),
    ],
)
def test_a_case_over_devices_that_fails_is_a_failure(ended, said, capsys, monkeypatch):
    cases = []

    def run(command, **_):
        if "blaze_jax.benchmark.mesh_case" not in command:
            return Ended(0, stdout="cpu\n")
        cases.append(json.loads(Path(command[-2]).read_text()))
        return ended

    monkeypatch.setattr("blaze_jax.benchmark.mesh.subprocess.run", run)
    assert main(["--mesh", "expert=2"]) == 1
    assert said in capsys.readouterr().out
    (case,) = cases
    assert Sizes(*case["sizes"]).weight_elements < 10**8  # not those of a GPU


def test_a_case_over_devices_that_are_not_there(capsys, monkeypatch):
    monkeypatch.setattr("blaze_jax.benchmark.mesh.subprocess.run", lambda *_, **__: Ended(1, stderr="No GPU\n"))
    assert main(["--mesh", "expert=2"]) == 2
    assert "--mesh finds no devices: No GPU" in capsys.readouterr().err


@pytest.mark.skipif(not ON_CPU, reason="takes the small sizes that a CPU gets")
@pytest.mark.slow
def test_a_layer_over_devices_against_one(capsys):
    assert main(["--mesh", "expert=2", "--repeats", "1"]) == 0
    out = capsys.readouterr().out
    assert f"{CPU_MESH_SIZES[0]}, expert=2, defaults" in out
    assert "forward+backward: one device" in out


@pytest.mark.parametrize("mode", ["--compile-only", "--compile-time"])
def test_compiling_for_another_gpu_says_what_is_missing(mode, capsys, monkeypatch):
    monkeypatch.setattr("blaze_jax.benchmark.__main__.missing_compiler", lambda: "the plugin is not installed")
    assert main([mode, "h200"]) == 2
    assert f"{mode} h200 cannot run: the plugin is not installed" in capsys.readouterr().err


@pytest.mark.compile_only
@pytest.mark.slow
def test_compile_time(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("blaze_jax.benchmark.compile_time.LAYERS", (2,))
    file = tmp_path / "results.json"
    assert main(["--compile-time", "h200", "--config", "64,64,32,4,2", "--json", str(file)]) == 0
    assert "together" in capsys.readouterr().out
    (record,) = json.loads(file.read_text(encoding="utf-8"))["records"]
    (model,) = record["models"]
    assert (model["layers"], model["kernels"], model["different_kernels"]) == (2, 10, 10)  # as many as of one layer
    assert all(model[f"{stage}_s"] > 0 for stage in ("trace", "lower", "compile"))
