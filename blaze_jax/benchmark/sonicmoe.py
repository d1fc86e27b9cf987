"""SonicMoE, a peer in PyTorch, in this process: the same arrays and routing, where torch and sonicmoe are installed."""

import importlib
from dataclasses import dataclass
from typing import Any

from blaze_jax.benchmark.peers import UnavailableError
from blaze_jax.benchmark.sizes import BOTH, FORWARD
from blaze_jax.benchmark.timing import Call

TILES = {
    *((128, 256, False, 2, 1), (128, 256, False, 1, 2), (128, 128, True, 2, 1)),
    *((192, 128, True, 1, 2), (192, 128, True, 2, 1), (128, 192, True, 1, 2)),
    *((128, 192, True, 2, 1), (256, 128, False, 2, 1), (256, 192, False, 2, 1)),
}
"""Configurations its tuner may try: those that won, or came close, when it tried all of them on an H200, which takes
eight minutes for one size. Rows and columns of a tile, ping-pong, and the cluster's two sides."""


@dataclass(frozen=True)
class OnDevice:
    """Results of PyTorch that may still be computed; `jax.block_until_ready` waits for them as for a leaf."""

    torch: Any
    results: Any

    def block_until_ready(self) -> "OnDevice":
        self.torch.cuda.synchronize()
        return self


def sonicmoe_calls(x, w_gate, w_up, w_down, weights, experts) -> tuple[str, dict[str, Call]]:
    """Its version and PyTorch's, and the passes of its experts by name: index building is timed, the router is not.

    Raises:
      UnavailableError: torch or sonicmoe cannot be imported.
    """
    names = "torch", "sonicmoe", "sonicmoe.functional", "sonicmoe.enums", "quack.autotuner"
    try:
        torch, sonicmoe, functional, enums, autotuner = map(importlib.import_module, names)
    except ImportError as error:
        raise UnavailableError(f"SonicMoE cannot be imported: {error}") from error
    _try_fewer(autotuner)
    (num_tokens, slots), num_experts = experts.shape, w_down.shape[0]
    pairs = num_tokens * slots
    tokens, gate, up, down, scores, ids = (torch.from_dlpack(a) for a in (x, w_gate, w_up, w_down, weights, experts))
    # (E, 2n, d), the rows of gate and up in turns; and (E, d, n)
    up = torch.stack([gate.transpose(1, 2), up.transpose(1, 2)], 2).reshape(num_experts, -1, x.shape[1])
    down = down.transpose(1, 2).contiguous()
    leaves = [array.detach().clone().requires_grad_() for array in (tokens, up, down, scores)]
    cotangent, activation = tokens, enums.ActivationType.SWIGLU

    def experts_alone():
        x, up, down, scores = leaves
        lengths = pairs, pairs, pairs, num_experts, num_experts + 1
        scatter, reverse, gather, count, offsets = (torch.empty(n, dtype=torch.int32, device=x.device) for n in lengths)
        functional.TC_topk_router_metadata_triton(ids, num_experts, count, offsets, gather, scatter, reverse)
        routed = gather, scatter, reverse, None, False, activation
        hidden, kept = functional._UpProjection.apply(
            x, up.permute(1, 2, 0), None, offsets, pairs, slots, *routed, False, False
        )
        return functional._DownProjection.apply(
            hidden, kept, down.permute(1, 2, 0), None, scores, offsets, num_tokens, slots, *routed
        )

    def both():
        return OnDevice(torch, torch.autograd.grad(experts_alone(), leaves, cotangent))

    version = f"{sonicmoe.__version__}, torch {torch.__version__.partition('+')[0]}"
    return version, {BOTH: both, FORWARD: lambda: OnDevice(torch, experts_alone())}


def _try_fewer(autotuner) -> None:
    """Lets the tuner of its kernels try `TILES` alone, where they can serve."""
    all_of = autotuner.Autotuner.prune_configs

    def prune_to_tiles(self, arguments):
        allowed = all_of(self, arguments)
        tiles = [config.all_kwargs().get("config") for config in allowed]
        return [c for c, t in zip(allowed, tiles, strict=True) if t is None or _tile(t) in TILES] or allowed

    autotuner.Autotuner.prune_configs = prune_to_tiles


def _tile(config) -> tuple | None:
    """The fields that `TILES` has; None for swapped operands."""
    fields = "tile_m", "tile_n", "pingpong", "cluster_m", "cluster_n"
    return None if config.swap_ab else tuple(getattr(config, field) for field in fields)
