"""What models weigh and how fast devices compute them: public numbers and a roofline.

Seconds of a forward of R rows through one layer: the larger of the weights' bytes over the memory's bandwidth and of
``2 R`` operations per weight over the arithmetic's peak, both at the share of the peak that kernels reach, plus the
launch of the layer's kernels. Source: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009. The shares are
assumptions: 0.7 of the bandwidth is what decoding reaches with weights of four bits, 0.45 of the arithmetic what a
prompt reaches.

Attention over the cache is left out: 4 KiB per position and layer is a thousandth of a layer's weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.topology import SPEED_ROWS, Speed

BANDWIDTH_SHARE = 0.7
ARITHMETIC_SHARE = 0.45
KV_SHARE = 0.25
"""Of a device's memory that is kept for KV; the daemon's own plan is of that size for large models."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as the simulator needs it.

    Attributes:
        hidden_size: of the rows that travel, two bytes per value.
        weights_per_layer: parameters.
        bytes_per_weight: as stored: 2 for fp16, 0.5625 for blocks of four bits with their scales.
        kv_bytes: per position and layer, in fp16.
    """

    name: str
    num_layers: int
    hidden_size: int
    weights_per_layer: float
    bytes_per_weight: float
    kv_bytes: int

    @property
    def row_bytes(self) -> int:
        return 2 * self.hidden_size

    @property
    def layer_bytes(self) -> float:
        return self.weights_per_layer * self.bytes_per_weight


MODELS = {
    shape.name: shape
    for shape in (
        # From the config.json of each: layers, hidden size, and per layer the weights of its linears.
        ModelShape("smollm2-135m", 30, 576, 3.54e6, 2.0, 768),
        ModelShape("llama-8b", 32, 4096, 218.1e6, 0.5625, 4096),
        ModelShape("qwen-32b", 64, 5120, 487.6e6, 0.5625, 4096),
        ModelShape("llama-70b", 80, 8192, 855.6e6, 0.5625, 4096),
        ModelShape("llama-405b", 126, 16384, 3187.7e6, 0.5625, 4096),
    )
}


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A kind of device.

    Attributes:
        memory_bytes: that a model may have.
        bandwidth_Bps, flops: peaks of the data sheet, dense fp16 with fp32 accumulation.
        launch_s: of the kernels of one layer.
        share: of a volunteer swarm, an assumption.
    """

    name: str
    memory_bytes: float
    bandwidth_Bps: float
    flops: float
    launch_s: float
    share: float

    def speed(self, model: ModelShape) -> Speed:
        """Seconds per layer of the three forwards that nodes announce."""
        return Speed(*(self.seconds_per_layer(model, rows) for rows in SPEED_ROWS))

    def seconds_per_layer(self, model: ModelShape, num_rows: int) -> float:
        memory_s = model.layer_bytes / (self.bandwidth_Bps * BANDWIDTH_SHARE)
        arithmetic_s = 2.0 * num_rows * model.weights_per_layer / (self.flops * ARITHMETIC_SHARE)
        return max(memory_s, arithmetic_s) + self.launch_s

    def num_layers(self, model: ModelShape) -> int:
        """That fit beside the KV; 0 when not one does."""
        return min(model.num_layers, int(self.memory_bytes * (1 - KV_SHARE) / model.layer_bytes))

    def kv_positions(self, model: ModelShape, num_layers: int) -> int:
        """Positions of KV for so many layers."""
        return int(self.memory_bytes * KV_SHARE / (model.kv_bytes * max(1, num_layers)))


GIB = float(1 << 30)
DEVICES = (
    # NVIDIA L4 datasheet; Ampere GA102 and Ada GPU architecture white papers (tensor cores, dense, fp32 accumulation);
    # Apple's M2 Max specification (fp32, which its fp16 does not exceed); dual-channel DDR4-3200 and eight cores of
    # 3.5 GHz with two AVX2 units.
    DeviceProfile("NVIDIA L4", 23 * GIB, 300e9, 121e12, 60e-6, 0.05),
    DeviceProfile("NVIDIA GeForce RTX 3060", 11 * GIB, 360e9, 25.6e12, 60e-6, 0.35),
    DeviceProfile("NVIDIA GeForce RTX 4090", 23 * GIB, 1008e9, 165e12, 50e-6, 0.30),
    DeviceProfile("Apple M2 Max", 24 * GIB, 400e9, 13.6e12, 80e-6, 0.25),
    DeviceProfile("CPU, 8 cores", 12 * GIB, 51.2e9, 0.9e12, 20e-6, 0.05),
)
