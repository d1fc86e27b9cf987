"""The sizes to measure at: those of the comparison tables, of public models, and of the command line."""

import argparse
from typing import NamedTuple


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

    def __str__(self) -> str:
        return "T={}, d={}, n={}, E={}, K={}".format(*self)


GPU_SIZES = tuple(
    Sizes(*sizes)
    for sizes in (
        (24576, 1536, 256, 128, 8),
        (32768, 4096, 1024, 128, 8),
        (32768, 4096, 256, 256, 16),
        (65536, 1024, 4096, 16, 4),
        (32768, 2048, 8192, 16, 4),
        (65536, 512, 2048, 4, 1),
        (131072, 512, 2048, 4, 1),
        (524288, 512, 2048, 4, 1),
        (2097152, 512, 2048, 4, 1),
    )
)
"""Fine-grained, wide and MoEBlaze's: the rows other libraries were measured at on an H200."""

MESH_SIZES = (Sizes(32768, 4096, 1024, 128, 8), Sizes(24576, 1536, 256, 128, 8))
"""Tokens of each device: a wide layer, and a fine-grained one, where communication takes longest."""

CPU_MESH_SIZES = (Sizes(512, 256, 128, 16, 4),)

CPU_SIZES = (Sizes(4096, 512, 512, 16, 2), Sizes(2048, 256, 128, 32, 4))
"""What two cores time in seconds."""

SCALING_SIZES = tuple(Sizes(8192 << i, 512, 2048, 4, 1) for i in range(9))
"""Tokens from 8k to 2M at MoEBlaze's smallest layer."""

CPU_SCALING_SIZES = tuple(Sizes(512 << i, 64, 128, 4, 1) for i in range(5))

ROUNDING_SIZES = Sizes(16384, 1536, 256, 512, 8)
"""Few tokens for each of many experts: here the last tile of every expert is worth a look."""

CPU_ROUNDING_SIZES = Sizes(2048, 128, 64, 32, 4)

ROUTING_SIZES = (
    (24576, 128, 8),
    (32768, 128, 8),
    (65536, 16, 4),
    (262144, 256, 8),
    (1048576, 64, 4),
    (2097152, 4, 1),
)
"""T, E, K of the routing table."""

CPU_ROUTING_SIZES = ((2048, 32, 4), (4096, 8, 2))

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
