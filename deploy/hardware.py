"""What is known of hardware before anything runs on it."""

from __future__ import annotations

from pathlib import Path

from cluster.config import Device, Dtype

_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
_GB = 10**9
GPU_BYTES = {
    "T4": 16 * _GB,
    "V100": 32 * _GB,
    "L4": 24 * _GB,
    "A10G": 24 * _GB,
    "A100": 80 * _GB,
    "A100-40G": 40 * _GB,
    "A100-80G": 80 * _GB,
    "L40S": 48 * _GB,
    "H20": 96 * _GB,
    "H100": 80 * _GB,
    "H200": 141 * _GB,
    "B200": 180 * _GB,
}
"""Memory of one GPU by Ray's name of its type, as sold; the larger where two
have one name, since what is too big for that one fits neither."""
USABLE_SHARE = 0.92
"""Of a GPU's memory; the rest is the driver's, the libraries' and lost between allocations."""


def has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine's CPU multiplies bf16 in hardware."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return not _BF16_FLAGS.isdisjoint(value.split())
    return False


def element_bytes(dtype: Dtype, device: Device) -> int:
    """Bytes of an element; AUTO on a CPU is what this machine's would take."""
    is_auto_cpu = dtype is Dtype.AUTO and device is Device.CPU
    return 4 if dtype is Dtype.FP32 or (is_auto_cpu and not has_bf16()) else 2
