"""A GPU of each compute capability: the assembler goes by that alone."""

from pallas_kernels.compile_only.gpus import GPUS

ONE_OF_EACH = list({gpu.capability: name for name, gpu in GPUS.items()}.values())
