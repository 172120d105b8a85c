"""Who else uses the device: NVIDIA's management library for a GPU, the kernel's counters for the CPU.

Only other programs count: not this process, and not other nodes of this product, which would make one another back off.
"""

from __future__ import annotations

import importlib
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import psutil
import structlog

from fusion_node.daemon.manners_core import DeviceUsage

MAX_FAILURES = 5
"""In a row. A driver that is being replaced fails a few times, one that is gone fails for good."""

log = structlog.get_logger(__name__)


class WatchFailed(Exception):
    """What others do with the device cannot be told, now or ever again."""


class DeviceWatch(Protocol):
    """Samples of one device. Not thread-safe; takes milliseconds, so it is called beside the event loop."""

    def sample(self, *, now: float, own_busy_s: float) -> DeviceUsage:
        """What others did since the last call.

        Args:
            now: seconds of a monotonic clock.
            own_busy_s: seconds that this node has computed on the device since its start.

        Raises:
            WatchFailed: there is nothing to be known any more.
        """
        ...


def open_watch(device_type: str, *, uuid: str | None, wanted: bool | None) -> DeviceWatch | None:
    """The watch for a device; None when none is wanted or can be had, which is logged once.

    Args:
        device_type: ``cpu``, ``cuda`` or ``mps``.
        uuid: of a CUDA device, as NVML names it.
        wanted: None watches a GPU and not a CPU. A person feels at once when a game stutters, and hardly when a
            compiler is slower, which ``--threads`` bounds anyway.
    """
    if wanted is False or (wanted is None and device_type == "cpu"):
        return None
    try:
        match device_type:
            case "cpu":
                return CpuWatch()
            case "cuda" if uuid is not None:
                return GpuWatch(uuid)
            case _:
                raise WatchFailed(f"there is no way to ask a device of type {device_type}")
    except WatchFailed as error:
        log.info("not backing off for other programs", reason=str(error))
        return None


class GpuWatch:
    """One NVIDIA GPU.

    Where NVML does not tell processes apart (under WSL), or not by the ids that we know (in a container with process
    ids of its own), others have what the device was busy with less what we computed.

    Args:
        uuid: ``GPU-…``. Not the index: CUDA_VISIBLE_DEVICES renumbers what CUDA sees.
        nvml: the library's module; None imports it.
        own_pid: of this process.
        is_node: whether a process is a node of this product.

    Raises:
        WatchFailed: no driver, or it does not know the device.
    """

    def __init__(
        self,
        uuid: str,
        *,
        nvml: Any = None,
        own_pid: int | None = None,
        is_node: Callable[[int], bool] | None = None,
    ) -> None:
        try:
            self._nvml = nvml or importlib.import_module("pynvml")
        except ImportError as error:
            raise WatchFailed("nvidia-ml-py is not installed") from error
        try:
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except self._nvml.NVMLError as error:
            raise WatchFailed(f"NVML: {error}") from error
        self._own_pid = own_pid or os.getpid()
        self._is_node = is_node or _is_node
        self._since_us = 0
        self._last: tuple[float, float] | None = None
        self._failures = 0
        self._usage = DeviceUsage(0.0)

    def sample(self, *, now: float, own_busy_s: float) -> DeviceUsage:
        try:
            self._usage = self._sample(now, own_busy_s)
            self._failures = 0
        except self._nvml.NVMLError as error:
            self._failures += 1
            if self._failures >= MAX_FAILURES:
                raise WatchFailed(f"NVML: {error}") from error
        return self._usage

    def _sample(self, now: float, own_busy_s: float) -> DeviceUsage:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        processes = self._processes()
        last, self._last = self._last, (now, own_busy_s)
        ours = {pid for pid in processes if pid == self._own_pid or self._is_node(pid)}
        percents = self._percents() if self._own_pid in ours else None
        if percents is None:
            total = float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
            return DeviceUsage(_less_own(total, last, now, own_busy_s), None, memory.free, memory.total)
        others = sum(percent for pid, percent in percents.items() if pid not in ours and not self._is_node(pid))
        sizes = [size for pid, size in processes.items() if pid not in ours]
        known = [size for size in sizes if size is not None]
        others_bytes = sum(known) if len(known) == len(sizes) else None
        return DeviceUsage(min(others, 100.0), others_bytes, memory.free, memory.total)

    def _processes(self) -> dict[int, int | None]:
        """Process ids and their bytes; a program that both computes and draws is listed twice with the same."""
        found: dict[int, int | None] = {}
        for ask in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
            try:
                found |= {process.pid: process.usedGpuMemory for process in getattr(self._nvml, ask)(self._handle)}
            except self._nvml.NVMLError as error:
                if error.value != self._nvml.NVML_ERROR_NOT_SUPPORTED:
                    raise
        return found

    def _percents(self) -> dict[int, float] | None:
        """Mean share of the multiprocessors per process since the last call; None where it is not told."""
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._handle, self._since_us)
        except self._nvml.NVMLError as error:
            # No sample at all, which pynvml makes an error of too: nobody used the device.
            if error.value in (self._nvml.NVML_ERROR_NOT_FOUND, self._nvml.NVML_SUCCESS):
                return {}
            if error.value == self._nvml.NVML_ERROR_NOT_SUPPORTED:
                return None
            raise
        by_pid: dict[int, list[float]] = defaultdict(list)
        for sample in samples:
            # Drivers are known to return unset fields as enormous numbers.
            if sample.timeStamp > self._since_us and sample.smUtil <= 100:
                by_pid[sample.pid].append(float(sample.smUtil))
        self._since_us = max((sample.timeStamp for sample in samples), default=self._since_us)
        return {pid: sum(values) / len(values) for pid, values in by_pid.items()}


class CpuWatch:
    """All processors of the machine together: 100 % is all of them."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._last = self._read()

    def sample(self, *, now: float, own_busy_s: float) -> DeviceUsage:
        # By time differences: psutil's own percentages are counted per thread that asks.
        before, self._last = self._last, self._read()
        total, busy, own = (new - old for new, old in zip(self._last, before, strict=True))
        percent = 100.0 * max(0.0, busy - own) / total if total > 0 else 0.0
        memory = psutil.virtual_memory()
        return DeviceUsage(min(percent, 100.0), None, memory.available, memory.total)

    def _read(self) -> tuple[float, float, float]:
        """Seconds of all processors, those that were busy, and those of this process."""
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # The kernel counts a guest's time as its owner's too.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        own = self._process.cpu_times()
        return total, total - idle, own.user + own.system


def _less_own(total: float, last: tuple[float, float] | None, now: float, own_busy_s: float) -> float:
    if last is None or now <= last[0]:
        return 0.0
    return max(0.0, total - min(100.0, 100.0 * (own_busy_s - last[1]) / (now - last[0])))


def _is_node(pid: int) -> bool:
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:
        return False
    return any(word == "fusion_node.cli.main" or Path(word).name == "fusion-node" for word in words[:4])
