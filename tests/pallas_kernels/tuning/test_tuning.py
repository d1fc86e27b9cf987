"""Tuned parameters: where a call's come from, files that are not what they should be, orders that miss no tile."""

import os
import re
from dataclasses import asdict

import jax.numpy as jnp
import pytest

from pallas_kernels import hopper, tuning, xla
from pallas_kernels.tuning import add_tunings, find_tuning, parameters, tables_in_use, tried
from pallas_kernels.tuning.parameters import (
    H200,
    ColumnBlock,
    MmaTuning,
    TileTuning,
    block_kib,
    heuristic,
    mma_heuristic,
    nvidia_gpu,
    shape_key,
    with_columns,
)

GPU = nvidia_gpu() or H200
SIZES = {"rows": 196608, "dtype": "bfloat16", "d": 1536, "n": 256, "E": 128}
SHAPE = "rows=2^18,d=1536,n=256,E=128,bfloat16"
PLACE = (GPU, "up_projection", SHAPE)
WIDE = TileTuning(minor_dim=1, tile_width=8)
OTHER = TileTuning(stages=3)
TILE = {"stages": 4, "minor_dim": 0, "tile_width": 1}


def entry(tuning):
    return {"tuning": asdict(tuning), "measured": {"us": 1.0}}


def find(own=None, kernel="up_projection", **sizes):
    return find_tuning(kernel, own, **(SIZES | sizes))


@pytest.fixture
def user_file(monkeypatch, tmp_path):
    path = tmp_path / "new" / "tuning.json"
    monkeypatch.setenv("BLAZE_JAX_TUNING", str(path))
    return path


@pytest.fixture
def package_file(monkeypatch, tmp_path):
    path = tmp_path / "some_gpu.json"
    monkeypatch.setattr(tuning, "package_files", lambda: [path])
    return path


def test_own_before_the_users_before_the_packages_before_the_heuristic(user_file, package_file):
    package_file.write_text('{"format": 1, "tunings": {}}')
    assert find() == heuristic("up_projection", SHAPE) == TileTuning(4, 0, 1)
    add_tunings(package_file, {PLACE: entry(WIDE)})
    os.utime(package_file, ns=(0, 0))  # clocks of some file systems are coarse
    assert find() == WIDE
    add_tunings(user_file, {PLACE: entry(OTHER)})
    assert find() == OTHER
    assert find(TileTuning(tile_width=16)) == TileTuning(tile_width=16)


def test_entries_of_other_shapes_kernels_and_gpus_do_not_count(user_file):
    other_shape = SHAPE.replace("E=128", "E=64")
    places = [("NVIDIA H900", *PLACE[1:]), (GPU, "down_projection", SHAPE), (*PLACE[:2], other_shape)]
    add_tunings(user_file, {place: entry(WIDE) for place in places})
    assert find() == TileTuning()
    assert find(E=64) == WIDE


def test_what_is_written_is_read_again_and_nothing_is_lost(user_file):
    add_tunings(user_file, {PLACE: entry(WIDE)})
    assert find() == WIDE
    add_tunings(user_file, {(GPU, "column_block", SHAPE): entry(ColumnBlock(256))})
    os.utime(user_file, ns=(0, 0))
    assert find(kernel="column_block") == ColumnBlock(256)
    assert find() == WIDE


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("not json", "cannot be read: Expecting value"),
        ("[1, 2]", "it has no 'tunings'"),
        ('{"records": []}', "it has no 'tunings'"),
        ('{"format": 2, "tunings": {}}', "has format 2, this version reads 1"),
        ('{"format": 1, "tunings": {"NVIDIA H200": [3]}}', "must hold GPU, kernel, shape, entry"),
    ],
)
def test_a_bad_file_is_a_warning_once(content, reason, user_file):
    user_file.parent.mkdir()
    user_file.write_text(content)
    with pytest.warns(UserWarning, match=re.escape(reason)) as warned:
        assert find() == TileTuning()
    assert str(user_file) in str(warned[0].message)
    assert find() == TileTuning()  # a second warning would be an error here
    with pytest.raises(ValueError, match=re.escape(reason)):
        add_tunings(user_file, {})
    assert user_file.read_text() == content


def test_a_folder_in_the_files_place_is_a_warning(user_file):
    user_file.mkdir(parents=True)
    with pytest.warns(UserWarning, match="cannot be read"):
        assert find() == TileTuning()


@pytest.mark.parametrize(
    ("kernel", "values", "reason"),
    [
        ("up_projection", TILE | {"stages": 5}, "stages=5 must be one of 2, 3, 4"),
        ("up_projection", TILE | {"minor_dim": True}, "minor_dim=True must be one of 0, 1"),
        ("up_projection", TILE | {"tile_width": 3}, "tile_width=3 must be one of 1, 2, 4"),
        ("up_projection", TILE | {"columns": 64}, "columns=64 must be one of 128, 256"),
        ("up_projection", TILE | {"columns": 128, "stages": 7}, "stages=7 must be one of 2, 3, 4, 5, 6"),
        ("up_weight_gradients", TILE | {"columns": 128}, "columns=128 of up_weight_gradients must be 256"),
        ("up_projection", TILE | {"shares": "some"}, "shares='some' must be 'dynamic', 'fixed' or None"),
        ("up_projection", {"stages": 4}, "the parameters of up_projection must be stages, minor_dim, tile_width"),
        ("up_projection", None, "got None"),
        ("mma_up_backward", asdict(MmaTuning(128, 64, 3)) | {"columns": 64}, "columns=64 must be one of 128, 256"),
        ("column_block", {"columns": 1024}, "columns=1024 must be one of 128, 256, 512"),
        ("sideways_projection", {}, "there is no kernel 'sideways_projection'"),
    ],
)
def test_a_bad_entry_is_a_warning_and_the_others_count(kernel, values, reason, user_file):
    add_tunings(user_file, {(GPU, kernel, "other"): {"tuning": values}, PLACE: entry(WIDE)})
    with pytest.warns(UserWarning, match=re.escape(reason)):
        assert find() == WIDE


def test_where_the_users_file_is(monkeypatch, tmp_path):
    monkeypatch.setenv("BLAZE_JAX_TUNING", "")
    assert tuning.user_file() is None
    assert find() == TileTuning()
    monkeypatch.delenv("BLAZE_JAX_TUNING")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning.user_file() == tmp_path / "blaze_jax" / "tuning.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuning.user_file() == tmp_path / ".cache" / "blaze_jax" / "tuning.json"


def test_parameters_of_another_kind_are_refused():
    with pytest.raises(ValueError, match=r"tuning=ColumnBlock\(.*\) of up_projection must be a TileTuning or None"):
        find(ColumnBlock())


def test_narrow_tiles_of_kernels_that_have_none_are_refused():
    with pytest.raises(ValueError, match="columns=128 of down_backward must be 256"):
        find(TileTuning(columns=128), "down_backward")


@pytest.mark.parametrize(
    ("given", "wide_tiles", "narrow", "expected"),
    [
        (TileTuning(2, 1, 8), 527, True, TileTuning(6, 1, 8, columns=128)),
        (TileTuning(2, 1, 8), 528, True, TileTuning(2, 1, 8, columns=256)),
        (TileTuning(), 1, False, TileTuning(columns=256)),
        (TileTuning(columns=256), 1, True, TileTuning(columns=256)),
        (TileTuning(3, columns=128), 10**6, True, TileTuning(3, columns=128)),
        (TileTuning(6, columns=128), 1, False, TileTuning(4, columns=256)),
    ],
)
@pytest.mark.default_cases("*")
def test_narrow_tiles_where_there_are_few(given, wide_tiles, narrow, expected):
    assert with_columns(given, wide_tiles, 132, narrow=narrow) == (expected, expected.columns)


def test_rows_are_rounded_to_powers_of_two_and_nothing_else_is():
    assert shape_key(**SIZES) == SHAPE
    of_rows = [shape_key(rows, jnp.float16, d=8) for rows in (0, 1, 2, 90, 91, 128, 181, 182)]
    assert [key.split(",")[0] for key in of_rows] == [f"rows=2^{i}" for i in (0, 0, 1, 6, 7, 7, 7, 8)]
    # Rows as kernels count them, with the room between experts, are those of the pairs.
    assert shape_key(196608 + 8 * 128 + 128, "bfloat16") == shape_key(196608, "bfloat16")


@pytest.fixture
def on_an_h200(monkeypatch):
    monkeypatch.setattr(parameters, "compute_capability", lambda: "9.0")


def test_the_packages_file_keeps_what_the_rules_do_not_give(on_an_h200):
    (path,) = tuning.package_files()
    tunings, problems = tuning.read_tunings(path)
    assert problems == []
    for (gpu, kernel, shape), found in tunings.items():
        assert gpu == H200
        assert re.fullmatch(r"rows=2\^\d+,d=\d+,n=\d+,E=\d+,(bfloat16|float16|float32)", shape), shape
        assert found != heuristic(kernel, shape), (kernel, shape)


@pytest.mark.parametrize(
    ("capability", "kind", "expected"),
    [
        ("8.0", "bfloat16", (256, 64, 3)),
        ("9.0", "float32", (256, 64, 3)),
        ("9.0", "bfloat16", (256, 64, 4)),
        ("8.9", "bfloat16", (256, 32, 4)),
        ("12.0", "float32", (128, 64, 3)),
        ("99.0", "float16", (256, 32, 4)),  # whatever it is, that fits
    ],
)
@pytest.mark.default_cases("*")
def test_the_tile_for_ampere_by_what_fits(capability, kind, expected):
    tile = mma_heuristic("up_projection", kind, capability)
    assert (tile.columns, tile.k_step, tile.stages, tile.abreast) == (*expected, 1)
    assert tile.shared_bytes <= block_kib(capability) * 1024
    gradients = mma_heuristic("mma_up_weight_gradients", kind, capability)
    assert (gradients.abreast, gradients.sweep) == (8, 2 if expected == (256, 64, 4) else 1)


@pytest.mark.parametrize(
    ("kernel", "shape", "order"),
    [
        ("mma_up_weight_gradients", "rows=2^18,d=1536,n=256,E=128", (8, 2)),
        ("mma_up_weight_gradients", "rows=2^18,d=1024,n=4096,E=16", (4, 2)),
        ("mma_up_weight_gradients", "rows=2^18,d=512,n=1024,E=2", (8, 1)),  # 64 tiles for 132 multiprocessors
        ("mma_down_projection", "rows=2^17,d=512,n=1024,E=2", (1, 2)),
        ("mma_down_projection", "rows=2^12,d=1536,n=256,E=128", (1, 1)),
        ("mma_down_backward", "rows=2^18,d=1536,n=256,E=128", (1, 1)),
        ("mma_up_projection", "rows=2^18,d=4096,n=1024,E=128", (8, 1)),
        ("mma_up_projection", "rows=2^18,d=1536,n=256,E=128", (1, 1)),
        ("up_projection", "rows=2^18,d=4096,n=1024,E=128", (0, 1)),
        ("up_projection", "rows=2^17,d=2048,n=8192,E=16", (1, 16)),  # weights that leave the L2
        ("down_backward", "rows=2^17,d=2048,n=8192,E=16", (0, 4)),
        ("down_projection", "rows=2^17,d=2048,n=8192,E=16", (0, 1)),
        ("up_weight_gradients", "rows=2^17,d=2048,n=8192,E=16", (0, 8)),
        ("down_weight_gradients", "rows=2^18,d=4096,n=1024,E=128", (0, 4)),
        ("up_weight_gradients", "rows=2^19,d=4096,n=256,E=256", (0, 8)),  # two column tiles
    ],
)
@pytest.mark.default_cases("*")
def test_tiles_abreast_and_sweeps_for_ampere_and_stripes_for_hopper_where_they_were_faster(
    on_an_h200, kernel, shape, order
):
    found = heuristic(kernel, shape + ",bfloat16")
    names = ("abreast", "sweep") if kernel.startswith("mma_") else ("minor_dim", "tile_width")
    assert tuple(getattr(found, name) for name in names) == order


def test_a_trial_comes_before_the_tables_and_notes_the_shapes(user_file):
    add_tunings(user_file, {PLACE: entry(OTHER)})
    before = tables_in_use()
    with tried({"up_projection": WIDE}) as trial:
        assert tables_in_use() != before
        assert find() == WIDE
        assert find(kernel="up_backward") == TileTuning()
    assert trial.shapes == {"up_projection": SHAPE, "up_backward": SHAPE}
    assert find() == OTHER
    assert tables_in_use() == before


def test_column_blocks():
    sizes = (1000, 2048, 256, 8, jnp.bfloat16)
    assert xla.column_block(*sizes) == hopper.column_block(*sizes) == 512
    assert hopper.column_block(*sizes, tuning=ColumnBlock(256)) == 256
