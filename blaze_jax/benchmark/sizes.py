"""The sizes to measure at: those of the comparison tables, of public models, and of the command line."""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple


class Sizes(NamedTuple):
    """T tokens, d model width, n expert width, E experts, K experts per token."""

    num_tokens: int
    model_width: int
    expert_width: int
    num_experts: int
    experts_per_token: int

    @classmethod
    def parse(cls, text: str) -> "Sizes":
        """Sizes from "T,d,n,E,K"."""
        try:
            sizes = cls(*(int(part) for part in text.split(",")))
        except (TypeError, ValueError):
            raise argparse.ArgumentTypeError(f"{text!r} must be five whole numbers T,d,n,E,K") from None
        if min(sizes) < 1 or sizes.experts_per_token > sizes.num_experts:
            raise argparse.ArgumentTypeError(f"{text!r} must have sizes of at least 1 and K of at most E")
        return sizes

    @property
    def pairs(self) -> int:
        """(token, slot) pairs, T·K."""
        return self.num_tokens * self.experts_per_token

    @property
    def forward_flops(self) -> int:
        """Floating-point operations of the three products of every pair, 6·T·K·d·n."""
        return 6 * self.pairs * self.model_width * self.expert_width

    @property
    def weight_elements(self) -> int:
        """Numbers in the experts' three weight arrays."""
        return 3 * self.num_experts * self.model_width * self.expert_width

    def config_fields(self) -> dict[str, Any]:
        """The sizes that `MoEConfig` takes."""
        names = ("num_experts", "experts_per_token", "expert_width")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        return "T={}, d={}, n={}, E={}, K={}".format(*self)


class Routed(NamedTuple):
    """T tokens, E experts, K experts per token, of which a router knows."""

    num_tokens: int
    num_experts: int
    experts_per_token: int

    def __str__(self) -> str:
        return "T={}, E={}, K={}".format(*self)


GPU_SIZES = (
    Sizes(24576, 1536, 256, 128, 8),
    Sizes(32768, 4096, 1024, 128, 8),
    Sizes(32768, 4096, 256, 256, 16),
    Sizes(65536, 1024, 4096, 16, 4),
    Sizes(32768, 2048, 8192, 16, 4),
    *(Sizes(tokens, 512, 2048, 4, 1) for tokens in (65536, 131072, 524288, 2097152)),
)
"""Fine-grained, wide and MoEBlaze's: the rows other libraries were measured at on an H200."""

_PRESETS = {
    "mixtral": (4096, 14336, 8, 2),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "deepseek-v3": (7168, 2048, 256, 8),
    "olmoe": (2048, 1024, 64, 8),
    "gpt-oss-20b": (2880, 2880, 32, 4),
}

PRESET_NAMES = tuple(_PRESETS)


def preset(name: str, num_tokens: int) -> Sizes:
    """The Mixture-of-Experts layer of a public model: Mixtral 8x7B, Qwen3-30B-A3B, DeepSeek-V3, OLMoE, gpt-oss-20b."""
    return Sizes(num_tokens, *_PRESETS[name])


_ROUTED = ((24576, 128, 8), (32768, 128, 8), (65536, 16, 4), (262144, 256, 8), (1048576, 64, 4), (2097152, 4, 1))

GPU_CASES: dict[str, Sequence[Any]] = {
    "layers": GPU_SIZES,
    "kernels": GPU_SIZES,
    "scaling": [Sizes(8192 << i, 512, 2048, 4, 1) for i in range(9)],  # up to 2M tokens at MoEBlaze's smallest layer
    "rounding": [Sizes(16384, 1536, 256, 512, 8)],  # few tokens for each of many experts: their last tiles count
    "routing": [Routed(*sizes) for sizes in _ROUTED],
    "memory": GPU_SIZES,
    "compile-time": GPU_SIZES[:1],
    "mesh": [
        Sizes(32768, 4096, 1024, 128, 8),
        GPU_SIZES[0],
    ],  # a device's; in the finer one communication takes longest
    "reading": [Sizes(1, 4096, 1536, 128, 8)],  # 4.8 GB in bfloat16
    "expected": PRESET_NAMES,
}
"""The cases of each command of the benchmark on a GPU."""

_SMALL = (Sizes(4096, 512, 512, 16, 2), Sizes(2048, 256, 128, 32, 4))

CPU_CASES = GPU_CASES | {
    "layers": _SMALL,
    "kernels": _SMALL,
    "scaling": [Sizes(512 << i, 64, 128, 4, 1) for i in range(5)],
    "rounding": [Sizes(2048, 128, 64, 32, 4)],
    "routing": [Routed(2048, 32, 4), Routed(4096, 8, 2)],
    "mesh": [Sizes(512, 256, 128, 16, 4)],
}
"""The same on a CPU, where two cores take seconds."""
