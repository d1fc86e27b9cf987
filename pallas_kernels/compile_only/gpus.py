"""GPUs that programs can be compiled for without having one, as XLA wants them described."""

from typing import NamedTuple


class Gpu(NamedTuple):
    """A GPU as NVIDIA publishes it: data sheets, and the table of limits in the CUDA C++ programming guide.

    The assembler goes by the compute capability alone, and a kernel's launch by the shared memory of a block and the
    number of multiprocessors. XLA weighs its own fusions by the rest.

    Attributes:
      name: as the driver tells it.
      capability: the compute capability.
      multiprocessors: their number.
      block_kib: shared memory that a block can have, in KiB; a multiprocessor has 1 KiB more.
      l2_mib: the L2 cache, in MiB.
      memory_gb: the memory, in GB.
      memory_gbs: its bandwidth, in GB/s.
      clock_ghz: the boost clock.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    block_kib: int
    l2_mib: int
    memory_gb: int
    memory_gbs: int
    clock_ghz: float


GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163, 40, 80, 2039, 1.41),
    "rtx3090": Gpu("NVIDIA GeForce RTX 3090", (8, 6), 82, 99, 6, 24, 936, 1.70),
    "l4": Gpu("NVIDIA L4", (8, 9), 58, 99, 48, 24, 300, 2.04),
    "l40s": Gpu("NVIDIA L40S", (8, 9), 142, 99, 96, 48, 864, 2.52),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 99, 72, 24, 1008, 2.52),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 227, 50, 80, 3352, 1.98),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 227, 60, 150, 4800, 1.98),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 227, 126, 180, 8000, 1.97),
    "rtx5090": Gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 99, 96, 32, 1792, 2.41),
}


def target_config(gpu: Gpu, cuda: str) -> str:
    """The description of a GPU under a version of CUDA, such as "13.0.0": XLA's `GpuTargetConfigProto` as text."""
    major, minor = gpu.capability
    accelerated = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    threads = 1536 if (major, minor) in ((8, 6), (8, 9), (12, 0)) else 2048
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {(gpu.block_kib + 1) * 1024}
  threads_per_core_limit: {threads}
  core_count: {gpu.multiprocessors}
  fpus_per_core: {64 if (major, minor) == (8, 0) else 128}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.memory_gbs}000000000
  l2_cache_size: {gpu.l2_mib * 2**20}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory_gb}000000000
  shared_memory_per_block_optin: {gpu.block_kib * 1024}
  cuda_compute_capability {{ major: {major} minor: {minor} {accelerated} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "{cuda}"
  runtime_version: "{cuda}"
  compile_time_toolkit_version: "{cuda}"
  dnn_version: "9.12.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{gpu.name}"
"""
