"""Which device computes, how many threads, and how much memory is free. Measured, not configured."""

from __future__ import annotations

import contextlib
import ctypes
import platform
from collections import Counter
from collections.abc import Iterator, Sequence

import psutil
import torch

from fusion_node.errors import ConfigError, ResourceExhausted

Device = torch.device
"""For those who hold one and do not import torch."""

CUDA_CONTEXT_BYTES = 512 * 2**20
"""What a process takes on a GPU before its first tensor: 250 to 550 MiB by GPU and driver, kernels included. A process
cannot measure its own, because CUDA tells nothing before the context is there."""


def choose_device(name: str = "auto") -> torch.device:
    """The device by name, or the best there is: CUDA, then Apple's MPS, then the CPU.

    Raises:
        ConfigError: the device asked for is not there.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}: use auto, cpu, cuda, cuda:0 or mps") from error
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(device.type, False):
        raise ConfigError(f"device {name!r} is not available on this machine: use --device cpu or auto")
    return device


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the device has matrix units for bfloat16, so that it multiplies in it twice as fast or more."""
    if device.type == "cpu":
        # Where torch is too old to be asked, or the CPU is of another kind, float32 does as well.
        capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
        return bool(capabilities.get("amx_bf16"))
    return device.type == "cuda"


def choose_devices(names: str = "auto") -> list[torch.device]:
    """The devices that share a node's layers: those named, separated by commas; ``auto`` and ``cuda`` take every GPU.

    Raises:
        ConfigError: a device asked for is not there.
    """
    if names in ("auto", "cuda") and torch.cuda.is_available():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [choose_device(name.strip()) for name in names.split(",")]


def describe_devices(devices: Sequence[torch.device]) -> str:
    """A short name for people, for example ``2 x NVIDIA L4``."""
    counts = Counter(map(describe_device, devices))
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())


def describe_device(device: torch.device) -> str:
    """A short name for people, for example ``NVIDIA L4`` or ``cpu x86_64``."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()}"


def free_memory_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on the device; for the CPU, without pushing other programs to swap."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return int(psutil.virtual_memory().available)


def process_memory_bytes(device: torch.device) -> int:
    """Bytes that this process holds on the device, as a task manager shows them; on CUDA the context is an estimate."""
    if device.type == "cuda":
        return CUDA_CONTEXT_BYTES + torch.cuda.memory_reserved(device)
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    return int(psutil.Process().memory_info().rss)


def limit_device_memory(device: torch.device, max_bytes: int) -> None:
    """Makes allocations of this process on a GPU fail with ResourceExhausted beyond so many bytes, context included."""
    if device.type == "cuda":
        _, total_bytes = torch.cuda.mem_get_info(device)
        fraction = (max_bytes - CUDA_CONTEXT_BYTES) / total_bytes
        torch.cuda.set_per_process_memory_fraction(min(max(fraction, 0.0), 1.0), device)
    elif device.type == "mps":
        torch.mps.set_per_process_memory_fraction(min(max_bytes / torch.mps.recommended_max_memory(), 1.0))


def release_cached_memory(device: torch.device) -> None:
    """Gives back what allocators keep of tensors that are gone, so that other programs can have it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
    elif platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def device_uuid(device: torch.device) -> str | None:
    """The name under which a GPU's driver knows it, ``GPU-…``; None where there is no such name."""
    if device.type != "cuda":
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


@contextlib.contextmanager
def memory_errors(message: str) -> Iterator[None]:
    """Turns what torch raises when a device is full into ResourceExhausted with that message.

    On the CPU there is no class for it, only the allocator's words.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise ResourceExhausted(message) from error
        raise


def prepare_thread() -> None:
    """To be called first on a thread that computes.

    torch hands its number of threads to a new thread only when that asks for it. Operators that ran before would use
    another number, and so round differently from the same operators a moment later.
    """
    torch.set_num_threads(torch.get_num_threads())


def set_threads(num_threads: int | None) -> int:
    """Sets how many threads torch computes with; None leaves its choice. Returns the number in force."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    return torch.get_num_threads()
