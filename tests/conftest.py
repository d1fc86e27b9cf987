"""Settings of every test: four CPU devices to shard over, and the same hypothesis examples on every run."""

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 4)

hypothesis.settings.register_profile("library", derandomize=True, deadline=None, max_examples=30, database=None)
hypothesis.settings.load_profile("library")


def pytest_collection_modifyitems(items):
    """Skips what needs a Hopper GPU where there is none."""
    if jax.default_backend() == "gpu" and jax.devices()[0].compute_capability == "9.0":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a Hopper GPU"))
