"""Our layer and what a JAX user would otherwise run, forward and forward+backward."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from blaze_jax.benchmark.ceilings import CeilingCalls, Ceilings
from blaze_jax.benchmark.inputs import BOTH, FORWARD, PASSES, expert_inputs, forward_and_backward
from blaze_jax.benchmark.peers import (
    AMPERE,
    PORTABLE,
    RAGGED_DOT,
    TOKAMAX,
    Layer,
    UnavailableError,
    estimated_bytes,
    estimated_flops,
    peer_variants,
)
from blaze_jax.benchmark.plan import MIB, MemoryPlan, plan_of
from blaze_jax.benchmark.residuals import saved_bytes
from blaze_jax.benchmark.sizes import Sizes
from blaze_jax.benchmark.timing import Call, time_calls
from blaze_jax.experts import expert_ffn
from blaze_jax.implementation import choose_implementation, kernels_of
from pallas_kernels import ampere, xla

OURS = "blaze_jax"

_SLOW_US = 250_000.0
_SLOW_REPEATS = 3


def compare(
    sizes: Sizes,
    dtype,
    *,
    peers: Sequence[str],
    repeats: int,
    implementation=None,
    limit_seconds: float = 20.0,
    same_experts: bool = False,
    float32_weights: bool = False,
    progress: Callable[[str], object] = lambda message: None,
) -> dict[str, Any]:
    """Times and memory of our layer and its peers, as they go into the JSON file.

    Args:
      sizes: of the layer.
      dtype: of tokens and expert weights.
      peers: which of `PEERS` to compare with ours.
      repeats: timed runs of each pass; three of what takes more than a quarter of a second.
      implementation: of our layer.
      limit_seconds: a call estimated, or seen, to take longer is reported and not timed.
      same_experts: route all tokens to the same K experts, not at random.
      float32_weights: time our layer also with weights in float32, which it casts, and whose gradients are float32.
      progress: called with what comes next.
    """
    inputs = expert_inputs(sizes, dtype, same_experts=same_experts)
    ceiling_calls = CeilingCalls(dtype)
    rough = ceiling_calls.rates(time_calls(ceiling_calls.calls, repeats=3))
    trial = _Trial(sizes, inputs, rough, limit_seconds)
    implementation = choose_implementation(implementation, inputs[0], inputs[1:4], ())
    ours = partial(expert_ffn, implementation=implementation)
    layers = [_Candidate(OURS, implementation, ours, trial)]
    if float32_weights:
        wide = (inputs[0], *(w.astype(jnp.float32) for w in inputs[1:4]), *inputs[4:])
        layers.append(_Candidate(f"{OURS}, float32 weights", implementation, ours, trial._replace(inputs=wide)))
    failures = []
    already = {PORTABLE: xla, AMPERE: ampere}
    for name in peers:
        if already.get(name) is kernels_of(implementation, dtype=inputs[0].dtype):
            continue
        progress(f"compiling {name}")
        try:
            layers.append(_best_variant(name, trial))
        except UnavailableError as error:
            failures.append({"layer": name, "backend": "", "status": str(error)})
    records: dict[str, dict[str, Any]] = {}
    for candidate in layers:
        progress(f"compiling {candidate.name}")
        records[candidate.name] = candidate.prepare()
    ceilings = {}
    for phase, factor in PASSES.items():
        progress(phase)
        ready = [c for c in layers if phase in c.calls]
        fast = {c.name: c.calls[phase] for c in ready if c.first_us[phase] < _SLOW_US}
        slow = {c.name: c.calls[phase] for c in ready if c.name not in fast}
        timings = time_calls(fast | ceiling_calls.calls, repeats=repeats)
        for name, call in slow.items():
            timings |= time_calls({name: call}, repeats=_SLOW_REPEATS)
        ceilings[phase] = ceiling_calls.rates(timings)
        for candidate in ready:
            record = ceilings[phase].pass_record(timings[candidate.name], factor * sizes.forward_flops)
            if OURS in timings:
                record["ratio_to_ours"] = timings[candidate.name].us / timings[OURS].us
            records[candidate.name][phase] = record
    return {
        "kind": "compare",
        "sizes": sizes._asdict(),
        "dtype": jnp.dtype(dtype).name,
        "same_experts": same_experts,
        "ceilings": {phase: c._asdict() for phase, c in ceilings.items()},
        "layers": [*records.values(), *failures],
    }


class _Trial(NamedTuple):
    """What every layer is tried on, and how long a call of one may take."""

    sizes: Sizes
    inputs: tuple
    rough: Ceilings
    limit_seconds: float


@dataclass
class _Candidate:
    """A layer on its way to being timed."""

    name: str
    backend: str
    layer: Layer
    trial: _Trial
    calls: dict[str, Call] = field(default_factory=dict)
    first_us: dict[str, float] = field(default_factory=dict)
    plans: dict[str, MemoryPlan | None] = field(default_factory=dict)

    def compile(self, phase: str) -> None:
        """Compiles a pass and runs it once, if that is not done; raises as `compile_pass` and `first_run` do."""
        if phase in self.calls:
            return
        # tokamax's "xla" is jax.lax.ragged_dot, and needs the same
        estimated_as = RAGGED_DOT if self.backend == "xla" and self.name == TOKAMAX else self.name
        call, self.plans[phase] = compile_pass(estimated_as, self.layer, phase, *self.trial)
        self.first_us[phase] = first_run(call, self.trial.limit_seconds) * 1e6
        self.calls[phase] = call

    def prepare(self) -> dict[str, Any]:
        """Compiles both passes and runs each once; what goes wrong is in the record's status."""
        record: dict[str, Any] = {"layer": self.name, "backend": self.backend, "status": "ok"}
        try:
            record["saved_mib"] = _saved(self.layer, self.trial.inputs) / MIB
            for phase in PASSES:
                self.compile(phase)
        except UnavailableError as error:
            record["status"] = str(error)
        if plan := self.plans.get(BOTH):
            record["peak_mib"] = plan.peak / MIB
        return record


def compile_pass(
    name: str, layer: Layer, phase: str, sizes: Sizes, inputs: tuple, rough: Ceilings, limit_seconds: float
) -> tuple[Call, MemoryPlan | None]:
    """One pass of a layer, compiled, and its plan of memory.

    Raises:
      UnavailableError: it would take too long, does not fit, or does not compile.
    """
    seconds = PASSES[phase] * estimated_flops(name, sizes) / rough.tflops / 1e12
    if seconds > limit_seconds:
        raise UnavailableError(f"not run: its arithmetic alone takes about {seconds:.0f} s a call ({phase})")
    limit = memory_limit()
    needed = estimated_bytes(name, sizes, inputs[0].dtype.itemsize, backward=phase == BOTH)
    if limit is not None and needed[0] > limit:
        raise UnavailableError(
            f"out of memory: {needed[1]} takes {needed[0] / 2**30:.0f} GiB, there are {limit / 2**30:.0f}"
        )
    arguments = inputs if phase == FORWARD else (*inputs, inputs[0])
    function = layer if phase == FORWARD else forward_and_backward(layer)
    try:
        compiled = jax.jit(function).lower(*arguments).compile()
    except Exception as error:  # whatever a peer or the compiler raises is what there is to report
        raise UnavailableError(_failure("does not compile", phase, error)) from error
    plan = plan_of(compiled.memory_analysis())
    if plan is not None and limit is not None and plan.total > limit:
        raise UnavailableError(
            f"out of memory: {phase} needs {plan.total / 2**30:.0f} GiB, there are {limit / 2**30:.0f}"
        )
    return partial(compiled, *arguments), plan


def first_run(call: Call, limit_seconds: float) -> float:
    """Seconds of one run, the second of two.

    Raises:
      UnavailableError: it fails or takes too long.
    """
    seconds = 0.0
    try:
        for _ in range(2):  # the first may have to allocate
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds = time.perf_counter() - start
            if seconds > limit_seconds:
                raise UnavailableError(f"stopped: one call took {seconds:.0f} s")
    except jax.errors.JaxRuntimeError as error:
        raise UnavailableError(_failure("does not run", "", error)) from error
    return seconds


def memory_limit() -> int | None:
    """Bytes that programs may use on this device, None where it does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")


def _best_variant(name: str, trial: _Trial) -> _Candidate:
    """The fastest backend of a peer, by one run of forward+backward."""
    candidates = [_Candidate(name, backend, layer, trial) for backend, layer in peer_variants(name).items()]
    if len(candidates) == 1:
        return candidates[0]
    reasons = []
    for candidate in candidates:
        try:
            candidate.compile(BOTH)
        except UnavailableError as error:
            reasons.append(f"{candidate.backend}: {error}")
    found = [c for c in candidates if BOTH in c.calls]
    if not found:
        raise UnavailableError("; ".join(reasons))
    return min(found, key=lambda c: c.first_us[BOTH])


def _saved(layer: Layer, inputs: tuple) -> int:
    try:
        return saved_bytes(layer, *inputs)
    except Exception as error:  # whatever a peer raises is what there is to report
        raise UnavailableError(_failure("does not trace", "", error)) from error


def _failure(what: str, phase: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    kind = "out of memory" if "RESOURCE_EXHAUSTED" in text else what
    return f"{kind}{f' ({phase})' if phase else ''}: {type(error).__name__}: {text[:200]}"
