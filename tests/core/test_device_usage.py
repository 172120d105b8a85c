"""Who else uses the device, as told by a driver that is played here, and by this machine's kernel."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace as Answer

import pynvml
import pytest

from fusion_node.daemon import device_usage
from fusion_node.daemon.device_usage import MAX_FAILURES, CpuWatch, GpuWatch, WatchFailed, open_watch

GIB = 2**30
OURS, GAME, DESKTOP, OTHER_NODE = 100, 200, 300, 400


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


@dataclass
class Driver:
    """The functions of pynvml that are used, over a GPU that the test describes."""

    compute: Sequence[tuple[int, int | None]] = ((OURS, 8 * GIB),)
    graphics: Sequence[tuple[int, int | None]] = ()
    percents: Sequence[tuple[int, int]] = ()
    percents_error: int | None = None
    broken: bool = False
    total_percent: int = 0
    asked_since: list[int] = field(default_factory=list)
    now_us: int = 1000

    NVML_SUCCESS = 0
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NOT_FOUND = 6
    NVMLError = NVMLError

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise NVMLError(self.NVML_ERROR_NOT_FOUND)
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Answer:
        if self.broken:
            raise NVMLError(999)
        return Answer(free=4 * GIB, total=24 * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Answer]:
        return [Answer(pid=pid, usedGpuMemory=size) for pid, size in self.compute]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[Answer]:
        return [Answer(pid=pid, usedGpuMemory=size) for pid, size in self.graphics]

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Answer:
        return Answer(gpu=self.total_percent)

    def nvmlDeviceGetProcessUtilization(self, handle: str, since_us: int) -> list[Answer]:
        self.asked_since.append(since_us)
        if self.percents_error is not None:
            raise NVMLError(self.percents_error)
        self.now_us += 1000
        return [Answer(pid=pid, smUtil=percent, timeStamp=self.now_us) for pid, percent in self.percents]


def watch(driver: Driver, is_node: Callable[[int], bool] = lambda pid: pid == OTHER_NODE) -> GpuWatch:
    return GpuWatch("GPU-1", nvml=driver, own_pid=OURS, is_node=is_node)


def test_own_work_and_other_nodes_do_not_count() -> None:
    driver = Driver(
        compute=[(OURS, 8 * GIB), (OTHER_NODE, 6 * GIB)],
        graphics=[(DESKTOP, GIB), (GAME, 3 * GIB)],
        percents=[(OURS, 90), (OTHER_NODE, 70), (DESKTOP, 3), (GAME, 40)],
    )
    usage = watch(driver).sample(now=0.0, own_busy_s=0.0)
    assert usage.others_percent == 43.0
    assert usage.others_bytes == 4 * GIB
    assert (usage.free_bytes, usage.total_bytes) == (4 * GIB, 24 * GIB)


def test_samples_of_one_process_are_averaged_and_only_new_ones_asked_for() -> None:
    driver = Driver(percents=[(GAME, 80), (GAME, 40), (OURS, 10)])
    gpu = watch(driver)
    assert gpu.sample(now=0.0, own_busy_s=0.0).others_percent == 60.0
    gpu.sample(now=2.0, own_busy_s=0.0)
    assert driver.asked_since == [0, 2000]


def test_unset_fields_of_the_driver_are_not_believed() -> None:
    driver = Driver(percents=[(GAME, 2**32 - 1), (DESKTOP, 5)])
    assert watch(driver).sample(now=0.0, own_busy_s=0.0).others_percent == 5.0


@pytest.mark.parametrize("code", [Driver.NVML_ERROR_NOT_FOUND, Driver.NVML_SUCCESS])
def test_no_sample_means_that_nobody_used_the_device(code: int) -> None:
    assert watch(Driver(percents_error=code, total_percent=50)).sample(now=0.0, own_busy_s=0.0).others_percent == 0.0


def test_memory_of_others_is_unknown_when_that_of_one_is() -> None:
    driver = Driver(graphics=[(GAME, None), (DESKTOP, GIB)])
    assert watch(driver).sample(now=0.0, own_busy_s=0.0).others_bytes is None


@pytest.mark.parametrize(
    "driver",
    [
        pytest.param(Driver(percents_error=Driver.NVML_ERROR_NOT_SUPPORTED, total_percent=70), id="WSL"),
        pytest.param(Driver(compute=[(77001, 8 * GIB)], percents=[(77001, 70)], total_percent=70), id="container"),
    ],
)
def test_where_processes_cannot_be_told_apart_others_have_what_we_did_not_compute(driver: Driver) -> None:
    gpu = watch(driver)
    assert gpu.sample(now=0.0, own_busy_s=5.0).others_percent == 0.0
    assert gpu.sample(now=2.0, own_busy_s=6.0).others_percent == 20.0
    assert gpu.sample(now=4.0, own_busy_s=8.0).others_percent == 0.0
    usage = gpu.sample(now=6.0, own_busy_s=8.0)
    assert (usage.others_percent, usage.others_bytes) == (70.0, None)


def test_driver_that_fails_for_a_moment_repeats_the_last_sample_and_then_is_given_up() -> None:
    driver = Driver(percents=[(GAME, 60)])
    gpu = watch(driver)
    before = gpu.sample(now=0.0, own_busy_s=0.0)
    driver.broken = True
    for number in range(1, MAX_FAILURES):
        assert gpu.sample(now=float(number), own_busy_s=0.0) == before
    with pytest.raises(WatchFailed, match="error 999"):
        gpu.sample(now=9.0, own_busy_s=0.0)


def test_device_that_the_driver_does_not_know_is_said_so() -> None:
    with pytest.raises(WatchFailed, match="NVML: error 6"):
        GpuWatch("GPU-2", nvml=Driver())


# the real machine


def test_the_library_has_what_the_played_driver_has() -> None:
    names = [name for name in vars(Driver) if name.startswith(("nvml", "NVML"))]
    assert [name for name in names if not hasattr(pynvml, name)] == []
    assert issubclass(pynvml.NVMLError_NotSupported, pynvml.NVMLError)
    assert pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND).value == Driver.NVML_ERROR_NOT_FOUND
    assert (pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_SUPPORTED) == (0, Driver.NVML_ERROR_NOT_SUPPORTED)


def test_watch_is_opened_for_a_gpu_and_on_request_for_a_cpu() -> None:
    assert open_watch("cpu", uuid=None, wanted=None) is None
    assert open_watch("cpu", uuid=None, wanted=False) is None
    assert open_watch("cuda", uuid="GPU-1", wanted=False) is None
    assert isinstance(open_watch("cpu", uuid=None, wanted=True), CpuWatch)
    assert open_watch("mps", uuid=None, wanted=True) is None
    # No such device, and on most machines that test this, no driver either.
    assert open_watch("cuda", uuid="GPU-no-such", wanted=None) is None


def test_other_programs_load_of_the_processors_is_seen_and_our_own_is_not() -> None:
    cpu = CpuWatch()
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        _burn(0.4)
        both = cpu.sample(now=0.0, own_busy_s=0.0)
    finally:
        other.kill()
        other.wait()
    assert 0.0 < both.others_percent <= 100.0
    assert both.total_bytes > both.free_bytes > 0


def test_time_of_this_process_is_taken_off() -> None:
    readings = iter([(0.0, 0.0, 0.0), (100.0, 80.0, 50.0), (200.0, 80.0, 51.0), (200.0, 80.0, 51.0)])

    class Played(CpuWatch):
        def _read(self) -> tuple[float, float, float]:
            return next(readings)

    cpu = Played()
    assert [cpu.sample(now=0.0, own_busy_s=0.0).others_percent for _ in range(3)] == [30.0, 0.0, 0.0]


def test_nodes_of_this_product_are_recognised_by_their_command_line() -> None:
    command = [sys.executable, "-c", "print(flush=True); input()", "/usr/bin/fusion-node", "join"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as node:
        assert node.stdout is not None
        node.stdout.readline()  # before it runs, the kernel may not tell its command line yet
        assert device_usage._is_node(node.pid)
        assert not device_usage._is_node(os.getpid())
        node.kill()
    assert not device_usage._is_node(node.pid)


def _burn(cpu_s: float) -> None:
    begin = time.process_time()
    while time.process_time() < begin + cpu_s:
        pass
