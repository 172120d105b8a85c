"""Numerics classes: the arithmetic that a node promises, and what it means for tensors in memory and on the wire."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusion_node.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NumericsClass:
    """Weights, activations, residual and KV all have one type; products accumulate as the backend does.

    Attributes:
        name: as announced in records and asked for in plans.
        dtype: of weights, activations and KV.
        wire_dtype: encoding of rows between stages (p2p.messages.DTYPE_BYTES).
    """

    name: str
    dtype: torch.dtype
    wire_dtype: str


NUMERICS = {
    "fp32": NumericsClass("fp32", torch.float32, "f32"),
    "bf16": NumericsClass("bf16", torch.bfloat16, "bf16"),
    "fp16": NumericsClass("fp16", torch.float16, "f16"),
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
