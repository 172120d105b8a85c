"""Numerics classes: the arithmetic that a node promises, and what it means for tensors in memory and on the wire.

docs/numerics.md defines each class, operation by operation. This is the table of types; who rounds where: GEMMs in
fusion_node.engine.f16r32, scores and KV in fusion_node.engine.attention, rows in fusion_node.engine.tensor_codec.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fusion_node.errors import ConfigError

FP16_MAX = 65504.0
"""The largest finite fp16 (IEEE 754 binary16)."""


@dataclass(frozen=True, slots=True)
class NumericsClass:
    """The types that a class of arithmetic is made of.

    Attributes:
        name: as announced in records and asked for in plans.
        dtype: of the residual stream, and of everything that no other field names: norms, rotary tables and products,
            activation functions, routers, biases, and what a GEMM puts out.
        gemm_dtype: both inputs of a GEMM, weights and activations, are rounded to it; products are summed in float32.
        attention_input_dtype: queries are rounded to it before the scores, and scores, softmax and the weighted sum of
            values are then float32; None: queries stay as they are and attention computes in ``dtype``.
        kv_dtype: of keys and values at rest. A token's own are rounded before its own step reads them. int8: the values
            of a head at a position share a scale, see ``quantize_rows``.
        wire_dtype: encoding of rows between stages (p2p.messages.DTYPE_BYTES).
    """

    name: str
    dtype: torch.dtype
    gemm_dtype: torch.dtype
    attention_input_dtype: torch.dtype | None
    kv_dtype: torch.dtype
    wire_dtype: str

    @property
    def rounds_gemm_inputs(self) -> bool:
        """Whether GEMMs must do more than what torch does with tensors of ``dtype``."""
        return self.gemm_dtype != self.dtype

    def weight_dtype(self, device: torch.device) -> torch.dtype:
        """How GEMM weights are kept on this device, whose values are ``gemm_dtype``'s in any case.

        CUDA multiplies 16-bit inputs into float32 outputs. A CPU does not: on it the same values are kept wide,
        because widening them in each call takes up to 19 times the product itself (one row, 4096 x 4096).
        """
        return self.gemm_dtype if device.type == "cuda" else self.dtype


_CLASSES = (
    NumericsClass("fp32", torch.float32, torch.float32, None, torch.float32, "f32"),
    NumericsClass("f16r32", torch.float32, torch.float16, torch.float16, torch.float16, "f16"),
    NumericsClass("bf16", torch.bfloat16, torch.bfloat16, None, torch.bfloat16, "bf16"),
    NumericsClass("fp16", torch.float16, torch.float16, None, torch.float16, "f16"),
)

KV8_SUFFIX = "+kv8"
"""Of a class that is another in all but the KV at rest."""

NUMERICS = {c.name: c for c in _CLASSES} | {
    c.name: c for c in (replace(c, name=c.name + KV8_SUFFIX, kv_dtype=torch.int8) for c in _CLASSES)
}

WIRE_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def numerics_class(name: str) -> NumericsClass:
    """Looks a numerics class up by name.

    Raises:
        ConfigError: when there is none of that name.
    """
    try:
        return NUMERICS[name]
    except KeyError:
        raise ConfigError(f"unknown numerics {name!r}: choose one of {', '.join(NUMERICS)}") from None


def round_to(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds to nearest, ties to even. Wider values beyond fp16's range become its largest ones; NaN stays NaN.

    Saturating keeps the rounding continuous: of two honest nodes, one just below the edge and one just above it, the
    second would otherwise answer with infinities.
    """
    if dtype == torch.float16 and tensor.dtype != dtype:
        # bfloat16 has no 65504: its neighbours are 65280 and 65536, which fp16 lacks.
        tensor = tensor.float().clamp(-FP16_MAX, FP16_MAX)
    return tensor.to(dtype)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row (last dimension) as int8 with a float32 scale, the largest absolute value / 127: ``x ~ q * scale``.

    Divided in float32, rounded to nearest, ties to even. A row of zeros has scale 0.

    Returns:
        ``q`` of the shape of ``x``, and the scales with 1 as last dimension.
    """
    wide = x.float()
    scale = wide.abs().amax(dim=-1, keepdim=True) / 127 if x.shape[-1] else wide.new_zeros((*x.shape[:-1], 1))
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (wide / divisor).round_().clamp_(-127, 127).to(torch.int8), scale


def keep_and_read(x: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    """What comes back, in the type of ``x``, of rows that were put into the KV cache."""
    if kv_dtype == torch.int8:
        quantized, scale = quantize_rows(x)
        return (quantized.float() * scale).to(x.dtype)
    return round_to(x, kv_dtype).to(x.dtype)
