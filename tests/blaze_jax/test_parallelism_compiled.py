"""The layer over two H200s that need not be there: what runs while tokens travel, and where parts of rows go."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax
from jax.sharding import AxisType, Mesh, NamedSharding

from blaze_jax import MoEConfig, Parallelism, moe
from blaze_jax.experts import compute_experts
from pallas_kernels.compile_only import absent_host

pytestmark = pytest.mark.compile_only

TOKENS, WIDTH = 512, 256  # of a device
CONFIG = MoEConfig(num_experts=8, experts_per_token=2, expert_width=256)
BLOCK = rf"bf16\[{TOKENS},{WIDTH // 2}\]"  # of columns
DEPARTURES = rf"{BLOCK}.* collective-permute(-start)?\("
"""In the usual pass, the same before further turns, and a turn. Of so few numbers, two blocks travel together."""
NAMES = ("w_gate", "w_up", "w_down")


def compiled(layers: int, backward: bool, role: str = "expert") -> str:
    """The program of layers in a scan; of one, in none."""
    mesh = Mesh(np.array(absent_host(2)), (role,), axis_types=(AxisType.Auto,))
    parallel = Parallelism(mesh, **{role: role})
    specs = {name: spec for name, spec in parallel.specs(CONFIG, WIDTH).items() if name in NAMES}
    of_stack = {name: P(None, *spec) for name, spec in specs.items()}
    by_token = P(role)

    def layer(x, params, weights, experts):
        options = {"activation": "swiglu", "save": "pre_activations", "implementation": "mosaic_gpu"}
        return compute_experts(x, params, weights, experts, parallel=parallel, specs=specs, **options)

    @partial(jax.shard_map, mesh=mesh, in_specs=(of_stack, *[by_token] * 3), out_specs=by_token, check_vma=False)
    def run(params, x, weights, experts):
        if layers == 1:
            return layer(x, {name: stack[0] for name, stack in params.items()}, weights, experts)
        return lax.scan(lambda x, p: (layer(x, p, weights, experts), None), x, params)[0]

    def gradients(params, x, weights, experts):
        return jax.grad(lambda *a: run(*a, experts).astype(jnp.float32).sum(), (0, 1, 2))(params, x, weights)

    def array(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    shapes = {name: (layers, *CONFIG.parameters(WIDTH)[name].shape) for name in NAMES}
    params = {name: array(shapes[name], jnp.bfloat16, of_stack[name]) for name in NAMES}
    tokens = [((WIDTH,), jnp.bfloat16), ((2,), jnp.bfloat16), ((2,), jnp.int32)]
    arrays = [array((2 * TOKENS, *shape), dtype, by_token) for shape, dtype in tokens]
    with jax.default_device(absent_host(2)[0]):
        lowered = jax.jit(gradients if backward else run).lower(params, *arrays)
    return lowered.compile().as_text()


def computation(program: str, name: str | None = None) -> list[str]:
    """The lines of one of its computations, by default that of the entry, in the order in which it runs."""
    if name is None:
        (name,) = re.findall(r"^ENTRY %?([\w.\-]+)", program, re.MULTILINE)
    (lines,) = re.findall(rf"^(?:ENTRY )?%?{re.escape(name)} \(.*?^}}", program, re.MULTILINE | re.DOTALL)
    return lines.splitlines()


def numbers(lines: list[str], pattern: str) -> list[int]:
    return [i for i, line in enumerate(lines) if re.search(pattern, line)]


def test_own_tokens_are_computed_while_others_travel():
    program, sent = compiled(1, backward=False), rf"bf16\[{TOKENS},{WIDTH}\]"
    lines = computation(program)
    (tokens_leave,) = numbers(lines, rf"{sent}.* collective-permute-start\(")
    (tokens_arrive,) = numbers(lines, rf"{sent}.* collective-permute-done\(")
    own, others = numbers(lines, r"custom-call\(.*moe_up_projection")
    (further,) = numbers(lines, r" conditional\(")
    assert tokens_leave < own < tokens_arrive < others < further
    (usual,) = re.findall(r"true_computation=%?([\w.\-]+)", lines[further])
    lines = computation(program, usual)
    rows = numbers(lines, r"custom-call\(.*moe_down_projection")
    assert len(rows) == 4  # two blocks of columns of others' tokens, and of own ones
    leave, arrive = (numbers(lines, rf"{BLOCK}.* collective-permute-{end}\(") for end in ("start", "done"))
    assert rows[0] < leave[0] < rows[2]
    for begin, end in zip(leave, arrive, strict=True):
        assert any(begin < row < end for row in rows)
    assert not numbers(lines, rf"{sent}.* collective-permute| collective-permute\(")
    assert len(numbers(program.splitlines(), DEPARTURES)) == 3


def test_gradients_travel_a_block_of_columns_at_a_time():
    """As wide as the tokens they would take as much memory, twice, beside the rows of the budget."""
    assert len(numbers(compiled(1, backward=True).splitlines(), DEPARTURES)) == 3


@pytest.mark.parametrize("backward", [False, True])
def test_one_array_of_other_experts_travels_under_each_kernel(backward):
    lines = computation(compiled(1, backward, role="fsdp"))
    start, done = (numbers(lines, rf"bf16\[4,256,256\].* collective-permute-{end}\(") for end in ("start", "done"))
    kernels = numbers(lines, r"custom-call\(.*moe_(up_projection|down_backward|\w+_weight_gradients)")
    assert len(start) == len(done) >= (6 if backward else 3)  # XLA combines two of so few numbers
    assert not numbers(lines, r" collective-permute\(| all-gather|reduce-scatter")
    for begin, end in zip(start, done, strict=True):
        assert any(begin < kernel < end for kernel in kernels)


def test_rows_written_in_parts_are_not_moved_to_a_stack_by_the_kernel():
    """XLA would give the kernel of the last part a layer's place in the stack, where nobody has written the others."""
    program = compiled(2, backward=True)
    fusions = re.findall(r"^%[\w.\-]*dynamic-slice-fusion[\w.\-]* \(.*?^}", program, re.MULTILINE | re.DOTALL)
    written = [f for f in fusions if re.search(r"custom-call\(.*moe_(up_projection|down_backward)", f)]
    assert written
    assert not any("dynamic-update-slice" in fusion for fusion in written)


@pytest.mark.parametrize(("power", "limit"), [(1, 150), (2, 141)])
@pytest.mark.default_cases("1-150")
def test_memory_of_a_layer_that_keeps_what_it_gathers(power, limit):
    """Without a budget of rows, and also where the gradient is known before the output."""
    mesh = Mesh(np.array(absent_host(2)), ("expert",), axis_types=(AxisType.Auto,))
    parallel = Parallelism(mesh, expert="expert", keep_gathered=True, row_budget=None)
    config, width = MoEConfig(num_experts=8, experts_per_token=2, expert_width=1024, implementation="mosaic_gpu"), 1024
    specs = parallel.specs(config, width)

    def array(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    def loss(x, params):
        return (moe(x, params, config, parallel=parallel)[0].astype(jnp.float32) ** power).sum()

    params = {name: array(p.shape, specs[name]) for name, p in config.parameters(width).items()}
    with jax.default_device(absent_host(2)[0]):
        lowered = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(array((8192, width), P("expert")), params)
    assert lowered.compile().memory_analysis().temp_size_in_bytes <= limit * 10**6
