"""Whether what assembles the kernels makes them spill."""

import tomllib
from pathlib import Path

import jaxlib.version
import pytest

from pallas_kernels.mosaic import device

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("jaxlib_version", "nvjitlink", "spills"),
    [
        ((0, 11, 2), (13, 0), False),
        ((0, 12, 0), None, False),
        ((0, 12, 0), (0, 0), False),  # older than 12.3, which cannot say what it is
        ((0, 12, 0), (12, 4), False),
        ((0, 12, 0), (12, 5), True),
        ((0, 12, 0, 1), (13, 5), True),
    ],
)
def test_kernels_spill_where_xla_links_them(monkeypatch, jaxlib_version, nvjitlink, spills):
    monkeypatch.setattr(jaxlib.version, "__version_info__", jaxlib_version)
    monkeypatch.setattr(device, "nvjitlink_version", lambda: nvjitlink)
    reason = device.why_kernels_spill()
    assert (reason is not None) == spills
    if spills:
        assert f"nvJitLink {nvjitlink[0]}.{nvjitlink[1]}" in reason
        assert "'nvidia-nvjitlink-cu12<12.5' 'nvidia-cusparse-cu12<12.4'" in reason
        assert "jax below 0.12" in reason


def test_what_is_compiled_in_tests_is_what_the_extra_installs():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "nvidia-nvjitlink-cu12<12.5" in extras["cuda12"]
    assert "nvidia-nvjitlink-cu12<12.5" in extras["compile-only"]
    assert extras["cuda13"] == ["jax[cuda13]<0.12"]
    assert "jax[cuda13-local]<0.12" in extras["compile-only-cuda13"]


@pytest.mark.compile_only
def test_nothing_spills_with_the_libraries_of_the_extras():
    if jaxlib.version.__version_info__ >= (0, 12):
        assert device.nvjitlink_version() == (12, 4)  # found where its package keeps it
    assert device.why_kernels_spill() is None
