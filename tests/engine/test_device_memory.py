"""Bounds on memory and giving it back, on the devices of this machine."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from fusion_node.engine.device import (
    CUDA_CONTEXT_BYTES,
    device_uuid,
    free_memory_bytes,
    limit_device_memory,
    memory_errors,
    multiplies_bf16,
    process_memory_bytes,
    release_cached_memory,
)
from fusion_node.errors import ResourceExhausted

MIB = 2**20
CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_memory_of_the_process_on_a_cpu_is_what_is_resident() -> None:
    release_cached_memory(CPU)  # else it may take what an earlier test has left behind, which is resident already
    before = process_memory_bytes(CPU)
    held = torch.ones(64 * MIB, dtype=torch.uint8)
    assert 60 * MIB < process_memory_bytes(CPU) - before < 100 * MIB
    assert process_memory_bytes(CPU) <= psutil.virtual_memory().total
    del held


def test_released_memory_is_no_longer_held_and_releasing_is_harmless() -> None:
    small = [torch.ones(32 * 1024, dtype=torch.uint8) for _ in range(2000)]
    with_them = process_memory_bytes(CPU)
    del small
    release_cached_memory(CPU)
    release_cached_memory(CPU)
    assert process_memory_bytes(CPU) < with_them - 30 * MIB


def test_cpu_has_no_uuid_and_no_limit_of_this_kind() -> None:
    assert device_uuid(CPU) is None
    limit_device_memory(CPU, 1)
    assert torch.ones(MIB).sum() == MIB


@needs_cuda
def test_allocation_beyond_the_bound_of_a_gpu_is_refused_and_what_is_below_is_not() -> None:
    device = torch.device("cuda", 0)
    try:
        limit_device_memory(device, CUDA_CONTEXT_BYTES + 256 * MIB)
        held = torch.empty(128 * MIB, dtype=torch.uint8, device=device)
        assert process_memory_bytes(device) >= CUDA_CONTEXT_BYTES + held.nbytes
        with pytest.raises(ResourceExhausted, match="full"), memory_errors("full"):
            torch.empty(256 * MIB, dtype=torch.uint8, device=device)
        del held
        free = free_memory_bytes(device)
        release_cached_memory(device)
        assert free_memory_bytes(device) >= free + 100 * MIB
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@needs_cuda
def test_uuid_of_a_gpu_is_the_drivers() -> None:
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetHandleByUUID(device_uuid(torch.device("cuda", 0)))


def test_narrow_products_are_taken_where_the_device_has_units_for_them() -> None:
    assert multiplies_bf16(torch.device("cuda"))
    assert not multiplies_bf16(torch.device("mps"))
    cpuinfo = Path("/proc/cpuinfo")
    if hasattr(torch.cpu, "get_capabilities") and cpuinfo.exists():
        flags = next(
            (line for line in cpuinfo.read_text(encoding="utf-8").splitlines() if line.startswith("flags")), ""
        )
        assert multiplies_bf16(torch.device("cpu")) == ("amx_bf16" in flags.split())
