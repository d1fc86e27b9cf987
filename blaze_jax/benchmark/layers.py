"""Our layer next to what a JAX user would otherwise run: times and memory here, or memory by the plan for an H200."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp

from blaze_jax.benchmark.back_to_back import take_turns
from blaze_jax.benchmark.memory import MIB, MemoryPlan, plan_of, saved_bytes
from blaze_jax.benchmark.peers import AMPERE, PORTABLE, SONICMOE, Layer, UnavailableError, estimate, peer_variants
from blaze_jax.benchmark.rates import DENSE, CeilingCalls
from blaze_jax.benchmark.results import OURS, Record, head
from blaze_jax.benchmark.sizes import BOTH, FORWARD, PASSES, Sizes, abstract_inputs, expert_inputs, forward_and_backward
from blaze_jax.benchmark.sonicmoe import sonicmoe_calls
from blaze_jax.benchmark.timing import Call, seconds_of, time_calls
from blaze_jax.experts import expert_ffn
from blaze_jax.implementation import choose_implementation, kernels_of
from blaze_jax.plan import Save
from pallas_kernels import ampere, xla
from pallas_kernels.compile_only import compile_for_gpu

_SLOW_US, _SLOW_REPEATS = 250_000.0, 3


class Limits(NamedTuple):
    """Bounds of a call: seconds, where products run at so many TFLOP/s, and bytes of memory.

    With `absent`, it is compiled for an H200 that need not be here.
    """

    seconds: float = math.inf
    tflops: float = 1.0
    num_bytes: float = math.inf
    absent: bool = False


H200 = Limits(num_bytes=141 * 10**9, absent=True)


@dataclass
class Candidate:
    """A layer on its way into a record.

    Attributes:
      name: its own, or the peer's.
      backend: which of a peer's it is.
      layer: a function of jax; None for what cannot be had, and for what is given by its calls.
      inputs: the layer's arguments.
      status: "ok", or what went wrong first.
      calls: a function without arguments for each pass that can run.
      first_us: microseconds of its first run.
      plan: XLA's, of both passes.
    """

    name: str
    backend: str
    layer: Layer | None = None
    inputs: tuple = ()
    status: str = "ok"
    calls: dict[str, Call] = field(default_factory=dict)
    first_us: dict[str, float] = field(default_factory=dict)
    plan: MemoryPlan | None = None

    def prepare(self, phase: str, sizes: Sizes, limits: Limits) -> None:
        """Compiles a pass and, unless that is for an absent GPU, runs it twice."""
        try:
            if self.layer is not None:
                self.calls[phase], plan = compile_pass(self, phase, sizes, limits)
                self.plan = plan if phase == BOTH else self.plan
            if phase in self.calls and not limits.absent:
                # what is given by its calls may tune itself in the first, for a minute
                longest = math.inf if self.layer is None else limits.seconds
                self.first_us[phase] = first_run(self.calls[phase], longest) * 1e6
        except UnavailableError as error:
            self.calls.pop(phase, None)
            self.fail(str(error))

    def fail(self, status: str) -> None:
        """Keeps the first failure."""
        self.status = status if self.status == "ok" else self.status

    def record(self) -> Record:
        """The beginning of its record: name, status, and what the backward pass keeps."""
        record: Record = {"layer": self.name, "backend": self.backend}
        try:
            if self.layer is not None:
                record["saved_mib"] = saved_bytes(self.layer, *self.inputs) / MIB
        except Exception as error:  # whatever a peer raises is what there is to report
            self.fail(_failure("does not trace", "", error))
        if self.plan is not None:
            record |= {"temporaries_mib": self.plan.temporaries / MIB, "peak_mib": self.plan.peak / MIB}
        return record | {"status": self.status}


def compare(
    sizes: Sizes,
    dtype,
    *,
    peers: Sequence[str],
    repeats: int,
    turns: int = 5,
    turn_seconds: float = 0.5,
    implementation=None,
    limit_seconds: float = 20.0,
    same_experts: bool = False,
    float32_weights: bool = False,
    saves: bool = False,
    say: Callable[[str], object] = lambda message: None,
) -> Record:
    """Times our layer and its peers in turns, in single runs and back to back, and tells their memory.

    A single run follows an emptied L2 cache, and is timed by its kernels. Back to back is how layers serve in training,
    at the clock and the power of a long run, by wall time: it counts what the host takes to launch, where that is
    longer. What takes longer than a turn has no such time.

    Args:
      sizes: the layer's.
      dtype: the tokens' and expert weights'.
      peers: which of `PEERS`, or SonicMoE, to compare with ours; of each, its fastest backend by one run.
      repeats: timed runs of each pass; three of what takes more than a quarter of a second.
      turns: turns of each pass back to back.
      turn_seconds: seconds of a turn at least, after a third of it that is not counted.
      implementation: our layer's.
      limit_seconds: a call estimated, or seen, to take longer is reported and not timed.
      same_experts: route all tokens to the same K experts, not at random.
      float32_weights: time our layer also with weights in float32, which it casts, and whose gradients are float32.
      saves: time our layer also with every other `save`.
      say: is told what comes next.
    """
    inputs = expert_inputs(sizes, dtype, same_experts=same_experts)
    ceiling_calls = CeilingCalls(dtype)
    rough = ceiling_calls.rates(time_calls(ceiling_calls.calls, repeats=3))
    limits = Limits(limit_seconds, rough.tflops, memory_limit())
    implementation = choose_implementation(implementation, inputs[0], inputs[1:4], ())
    ours = Candidate(OURS, implementation, partial(expert_ffn, implementation=implementation), inputs)
    layers = [ours]
    if float32_weights:
        wide = (inputs[0], *(w.astype(jnp.float32) for w in inputs[1:4]), *inputs[4:])
        layers.append(Candidate(f"{OURS}, float32 weights", implementation, ours.layer, wide))
    if saves:
        others = {
            f"{OURS}, {save=}": partial(expert_ffn, implementation=implementation, save=save)
            for save in get_args(Save)[1:]
        }
        layers += [Candidate(name, implementation, layer, inputs) for name, layer in others.items()]
    for candidate in layers:
        say(f"compiling {candidate.name}")
        candidate.prepare(BOTH, sizes, limits)
    same = {PORTABLE: xla, AMPERE: ampere}
    for name in peers:
        if same.get(name) is not kernels_of(implementation, dtype=inputs[0].dtype):
            say(f"compiling {name}")
            layers.append(_best_variant(name, inputs, sizes, limits))
    for candidate in layers:
        candidate.prepare(FORWARD, sizes, limits)
    rows, ceilings = {candidate.name: candidate.record() for candidate in layers}, {}
    for phase, factor in PASSES.items():
        say(phase)
        ready = {c.name: c for c in layers if phase in c.calls}
        apart = [name for name, c in ready.items() if c.first_us[phase] >= _SLOW_US]
        together = {name: c.calls[phase] for name, c in ready.items() if name not in apart}
        timings = time_calls(together | ceiling_calls.calls, repeats=repeats)
        for name in apart:
            timings |= time_calls({name: ready[name].calls[phase]}, repeats=_SLOW_REPEATS)
        ceilings[phase] = ceiling_calls.rates(timings)
        for name in ready:
            if (timing := timings[name]).clock == timings[DENSE].clock:
                rows[name][phase] = ceilings[phase].pass_record(timing, factor * sizes.forward_flops)
            else:  # of another clock than ours: no time to compare
                rows[name][phase] = {"note": timing.note}
    say("back to back")
    short = [(c, phase) for c in layers for phase in c.calls if c.first_us[phase] < turn_seconds * 1e6]
    calls = {(c.name, phase): c.calls[phase] for c, phase in short}
    times = take_turns(calls | {(DENSE, DENSE): ceiling_calls.calls[DENSE]}, turns=turns, seconds=turn_seconds)
    dense = ceiling_calls.dense_tflops(times.pop((DENSE, DENSE))["us"])
    for (name, phase), run in times.items():
        rows[name][phase]["sustained"] = run | {"tflops": PASSES[phase] * sizes.forward_flops / run["us"] / 1e6}
    for phase in PASSES:
        for row in rows.values():
            timed, our_time = row.get(phase, {}), rows[OURS].get(phase, {})
            for of, ours in ((timed, our_time), (timed.get("sustained"), our_time.get("sustained"))):
                if of and ours and "us" in of:
                    of["ratio_to_ours"] = of["us"] / ours["us"]
    return head("compare", sizes, dtype) | {
        "same_experts": same_experts,
        "ceilings": {phase: c._asdict() | {"sustained_tflops": dense} for phase, c in ceilings.items()},
        "layers": list(rows.values()),
    }


def measure_memory(sizes: Sizes, dtype, *, peers: Sequence[str]) -> Record:
    """Tells what is kept, and XLA's plan of forward+backward on an absent H200, for our layer and its peers."""
    inputs = abstract_inputs(sizes, dtype)
    ours = {save: partial(expert_ffn, save=save, implementation="mosaic_gpu") for save in get_args(Save)}
    candidates = [Candidate(f"{OURS}, {save=}", "", layer, inputs) for save, layer in ours.items()]
    candidates += [variant for name in peers for variant in _variants(name, inputs, for_gpu=True)]
    for candidate in candidates:
        candidate.prepare(BOTH, sizes, H200)
    return head("memory", sizes, dtype) | {"target": "h200", "layers": [c.record() for c in candidates]}


def compile_pass(candidate: Candidate, phase: str, sizes: Sizes, limits: Limits) -> tuple[Call, MemoryPlan | None]:
    """One pass of a layer as a call, and its plan of memory.

    Raises:
      UnavailableError: it would take too long, does not fit, or does not compile.
    """
    inputs, function = candidate.inputs, candidate.layer or (lambda *_: None)
    arguments = inputs if phase == FORWARD else (*inputs, inputs[0])
    itemsize = jnp.dtype(inputs[0].dtype).itemsize
    needs = estimate(candidate.name, candidate.backend, sizes, itemsize, backward=phase == BOTH)
    seconds = PASSES[phase] * needs.forward_flops / limits.tflops / 1e12
    if seconds > limits.seconds:
        raise UnavailableError(f"not run: its arithmetic alone takes about {seconds:.0f} s a call ({phase})")
    if needs.num_bytes > limits.num_bytes:
        raise UnavailableError(f"out of memory: {needs.what} takes {_of(needs.num_bytes, limits)}")
    run = function if phase == FORWARD else forward_and_backward(function)
    try:
        if limits.absent:
            compiled: Any = compile_for_gpu(run, *arguments).executable
        else:
            compiled = jax.jit(run).lower(*arguments).compile()
    except Exception as error:  # whatever a peer or the compiler raises is what there is to report
        raise UnavailableError(_failure("does not compile", phase, error)) from error
    plan = plan_of(compiled.memory_analysis())
    if plan is not None and plan.total > limits.num_bytes:
        raise UnavailableError(f"out of memory: {phase} needs {_of(plan.total, limits)}")
    return partial(compiled, *arguments), plan


def first_run(call: Call, limit_seconds: float) -> float:
    """Seconds of one run, the second of two.

    Raises:
      UnavailableError: it fails or takes too long.
    """
    seconds = 0.0
    for _ in range(2):  # the first may have to allocate
        try:
            seconds = seconds_of(call)
        except Exception as error:  # whatever a peer raises is what there is to report
            raise UnavailableError(_failure("does not run", "", error)) from error
        if seconds > limit_seconds:
            raise UnavailableError(f"stopped: one call took {seconds:.0f} s")
    return seconds


def memory_limit() -> float:
    """Bytes that programs may use on this device; infinite where it does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit") or math.inf


def _variants(name: str, inputs: tuple, *, for_gpu: bool | None = None) -> list[Candidate]:
    """A candidate for each backend of a peer, or one that says why there is none here."""
    try:
        if name == SONICMOE and for_gpu:
            raise UnavailableError("XLA has no plan of what PyTorch does")
        if name == SONICMOE:
            version, calls = sonicmoe_calls(*inputs)
            return [Candidate(name, version, inputs=inputs, calls=calls)]
        found = peer_variants(name, for_gpu=for_gpu)
    except UnavailableError as error:
        return [Candidate(name, "", status=str(error))]
    return [Candidate(name, backend, layer, inputs) for backend, layer in found.items()]


def _best_variant(name: str, inputs: tuple, sizes: Sizes, limits: Limits) -> Candidate:
    """A peer's fastest backend, by a run of forward+backward; one that says what failed if none of several runs."""
    variants = _variants(name, inputs)
    for candidate in variants:
        candidate.prepare(BOTH, sizes, limits)
    best = min(variants, key=lambda c: c.first_us.get(BOTH, math.inf))
    if len(variants) > 1 and BOTH not in best.calls:
        return Candidate(name, "", status="; ".join(f"{c.backend}: {c.status}" for c in variants))
    return best


def _of(num_bytes: float, limits: Limits) -> str:
    return f"{num_bytes / 2**30:.0f} GiB, there are {limits.num_bytes / 2**30:.0f}"


def _failure(what: str, phase: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    kind = "out of memory" if "RESOURCE_EXHAUSTED" in text else what
    return f"{kind}{f' ({phase})' if phase else ''}: {type(error).__name__}: {text[:200]}"
