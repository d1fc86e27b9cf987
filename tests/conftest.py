"""Settings of every test: four CPU devices to shard over, and the same hypothesis examples on every run."""

import hypothesis
import jax

jax.config.update("jax_num_cpu_devices", 4)

hypothesis.settings.register_profile("library", derandomize=True, deadline=None, max_examples=30, database=None)
hypothesis.settings.load_profile("library")
