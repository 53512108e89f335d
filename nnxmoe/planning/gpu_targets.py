"""NVIDIA GPUs as XLA's compiler describes them, for compiling without one.

The fields are those of openxla/xla, xla/backends/gpu/target_config/specs; sizes are those that
CUDA reports.
"""

from nnxmoe.runtime.hardware import TABLE

_CORES = {"h100": (132, 9, 1.98, 50 * 2**20), "h200": (132, 9, 1.98, 50 * 2**20), "b200": (148, 10, 1.965, 126 * 2**20)}


def target_config(name: str) -> str:
    """The text proto of a GPU of the table. KeyError for another name."""
    cores, major, clock, l2 = _CORES[name]
    sizes = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * 2**10,
        "shared_memory_per_core": 228 * 2**10,
        "shared_memory_per_block_optin": 227 * 2**10,
        "threads_per_core_limit": 2048,
        "core_count": cores,
        "fpus_per_core": 128,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": int(TABLE[name].bandwidth),
        "l2_cache_size": l2,
        "clock_rate_ghz": clock,
        "device_memory_size": int(TABLE[name].memory),
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
    }
    fields = "\n".join(f"  {field}: {value}" for field, value in sizes.items())
    return (
        f"gpu_device_info {{\n{fields}\n  cuda_compute_capability {{ major: {major} }}\n}}\n"
        f'platform_name: "CUDA"\ndnn_version_info {{ major: 9 }}\ndevice_description_str: "NVIDIA {name.upper()}"\n'
    )
