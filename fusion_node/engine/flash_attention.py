"""FlashAttention's kernel for sequences of different lengths, where its package is installed and does as it should.

One call then attends for all chains of a packed batch, instead of one per sequence. Nobody has to install it: without
it, torch's own kernels do the same. Before it is used on a device, a few small sequences are computed both ways, and
it is left out when it raises or disagrees, so that a version with another interface costs speed and nothing else.

Shapes: T packed tokens, S KV slots of all sequences together, N query heads, K KV heads, H head dim.
"""

from __future__ import annotations

import functools
import importlib
from typing import Protocol

import torch
import torch.nn.functional as F

_TYPES = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 256
_TOLERANCE = 2e-2
"""Of 16-bit types, relative to the largest value: ten times what two kernels differ by, a tenth of what a wrong mask
does."""


class VarlenFunction(Protocol):
    """``flash_attn.flash_attn_varlen_func`` as far as it is used: causal from each sequence's lower right corner."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
    ) -> torch.Tensor: ...


@functools.cache
def varlen_function(device: torch.device, dtype: torch.dtype, head_dim: int) -> VarlenFunction | None:
    """The kernel, or None where there is none that can be used."""
    if device.type != "cuda" or dtype not in _TYPES or head_dim > _MAX_HEAD_DIM:
        return None
    try:
        function: VarlenFunction = importlib.import_module("flash_attn").flash_attn_varlen_func
    except (ImportError, AttributeError):
        return None
    return function if agrees(function, device, dtype, head_dim) else None


def agrees(function: VarlenFunction, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernel computes what torch does: a prefill, a chunk behind a prefix, a decode, and a window."""
    generator = torch.Generator().manual_seed(0)
    lengths, heads, kv_heads = ((5, 5), (3, 9), (1, 7)), 4, 2
    q, k, v = (
        torch.randn((sum(length[part] for length in lengths), count, head_dim), generator=generator).to(device, dtype)
        for part, count in ((0, heads), (1, kv_heads), (1, kv_heads))
    )
    bounds = [
        torch.tensor([0, *(sum(length[part] for length in lengths[: i + 1]) for i in range(3))]).to(device, torch.int32)
        for part in (0, 1)
    ]
    for window in (None, 4):
        try:
            ours = function(
                q, k, v, bounds[0], bounds[1], 5, 9,
                softmax_scale=0.3, causal=True, window_size=(-1 if window is None else window - 1, 0), softcap=0.0,
            )  # fmt: skip
        except (RuntimeError, TypeError, ValueError):
            return False
        expected = _by_torch(q, k, v, lengths, window)
        if ours.shape != expected.shape or (ours - expected).abs().max() > _TOLERANCE * expected.abs().max():
            return False
    return True


def _by_torch(
    q_TNH: torch.Tensor,
    k_SKH: torch.Tensor,
    v_SKH: torch.Tensor,
    lengths: tuple[tuple[int, int], ...],
    window: int | None,
) -> torch.Tensor:
    outputs, first_q, first_k = [], 0, 0
    for num_tokens, num_slots in lengths:
        own = torch.arange(num_slots - num_tokens, num_slots, device=q_TNH.device)[:, None]
        seen = torch.arange(num_slots, device=q_TNH.device)
        sees = (seen <= own) & (seen > own - (window or num_slots))
        q, k, v = (
            x[first : first + count].transpose(0, 1).unsqueeze(0).float()
            for x, first, count in (
                (q_TNH, first_q, num_tokens), (k_SKH, first_k, num_slots), (v_SKH, first_k, num_slots)
            )
        )  # fmt: skip
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=0.3)
        outputs.append(out[0].transpose(0, 1))
        first_q, first_k = first_q + num_tokens, first_k + num_slots
    return torch.cat(outputs).to(q_TNH.dtype)
