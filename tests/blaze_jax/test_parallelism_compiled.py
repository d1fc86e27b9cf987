"""The layer over two H200s that need not be there: what runs while tokens travel, and where parts of rows go."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax
from jax.sharding import AxisType, Mesh, NamedSharding

from blaze_jax import MoEConfig, Parallelism
from blaze_jax.experts import experts_over_devices
from pallas_kernels.compile_only import absent_host

pytestmark = pytest.mark.compile_only

TOKENS, WIDTH = 512, 256  # of a device
CONFIG = MoEConfig(num_experts=8, experts_per_token=2, expert_width=256)
NAMES = ("w_gate", "w_up", "w_down")


def compiled(layers: int, backward: bool) -> str:
    """The program of layers in a scan; of one, in none."""
    mesh = Mesh(np.array(absent_host(2)), ("expert",), axis_types=(AxisType.Auto,))
    parallel = Parallelism(mesh, expert="expert")
    stack = (None,) if layers > 1 else ()
    specs = {name: spec for name, spec in parallel.specs(CONFIG, WIDTH).items() if name in NAMES}
    of_stack = {name: P(*stack, *spec) for name, spec in specs.items()}
    by_token = P("expert")

    def layer(x, params, weights, experts):
        options = {"activation": "swiglu", "save": "pre_activations", "implementation": "mosaic_gpu"}
        return experts_over_devices(parallel, specs, params, x, weights, experts, **options)

    @partial(jax.shard_map, mesh=mesh, in_specs=(of_stack, *[by_token] * 3), out_specs=by_token, check_vma=False)
    def run(params, x, weights, experts):
        if layers == 1:
            return layer(x, params, weights, experts)
        return lax.scan(lambda x, p: (layer(x, p, weights, experts), None), x, params)[0]

    def gradients(params, x, weights, experts):
        return jax.grad(lambda *a: run(*a, experts).astype(jnp.float32).sum(), (0, 1, 2))(params, x, weights)

    def array(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    shapes = {name: CONFIG.parameters(WIDTH)[name].shape for name in NAMES}
    number = (layers,) if layers > 1 else ()
    params = {name: array((*number, *shapes[name]), jnp.bfloat16, of_stack[name]) for name in NAMES}
    tokens = [((WIDTH,), jnp.bfloat16), ((2,), jnp.bfloat16), ((2,), jnp.int32)]
    arrays = [array((2 * TOKENS, *shape), dtype, by_token) for shape, dtype in tokens]
    with jax.default_device(absent_host(2)[0]):
        lowered = jax.jit(gradients if backward else run).lower(params, *arrays)
    return lowered.compile().as_text()


def test_own_tokens_are_computed_while_others_travel():
    program = compiled(1, backward=False).partition("ENTRY")[2].splitlines()
    sent = rf"bf16\[{TOKENS},{WIDTH}\]"

    def lines(pattern):
        return [i for i, line in enumerate(program) if re.search(pattern, line)]

    (tokens_leave, sums_leave) = lines(rf"{sent}.* collective-permute-start\(")
    (tokens_arrive, sums_arrive) = lines(rf"{sent}.* collective-permute-done\(")
    own, others = lines(r"custom-call\(.*moe_up_projection")
    assert tokens_leave < own < tokens_arrive < others < sums_leave < sums_arrive
    over_columns = lines(r" while\(")  # of the down projection, of others' rows and of own ones
    assert over_columns[0] < sums_leave < over_columns[1] < sums_arrive


def test_rows_written_in_parts_are_not_moved_to_a_stack_by_the_kernel():
    """XLA would give the kernel of the last part a layer's place in the stack, where nobody has written the others."""
    program = compiled(2, backward=True)
    fusions = re.findall(r"^%[\w.\-]*dynamic-slice-fusion[\w.\-]* \(.*?^}", program, re.MULTILINE | re.DOTALL)
    written = [f for f in fusions if re.search(r"custom-call\(.*moe_(up_projection|down_backward)", f)]
    assert written
    assert not any("dynamic-update-slice" in fusion for fusion in written)
