"""The call of FlashAttention's kernel, with a stand-in that does what its documentation says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusion_node.engine.attention import PackedBatch, Segment, packed_attention
from fusion_node.engine.flash_attention import agrees, varlen_function
from fusion_node.engine.kv_cache import KVLayout, KVPool

CPU = torch.device("cpu")
KV_HEADS, HEADS, DIM = 2, 6, 16


def stand_in(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first_q: torch.Tensor, first_k: torch.Tensor,
    max_q: int, max_k: int, *, softmax_scale: float, causal: bool, window_size: tuple[int, int], softcap: float,
    corner: str = "lower right",
) -> torch.Tensor:  # fmt: skip
    assert causal
    assert window_size[1] == 0
    assert (first_q.dtype, first_k.dtype) == (torch.int32, torch.int32)
    out = torch.empty_like(q)
    for sequence in range(len(first_q) - 1):
        tokens = slice(int(first_q[sequence]), int(first_q[sequence + 1]))
        slots = slice(int(first_k[sequence]), int(first_k[sequence + 1]))
        num_tokens, num_slots = tokens.stop - tokens.start, slots.stop - slots.start
        assert num_tokens <= max_q
        assert num_slots <= max_k
        own = torch.arange(num_tokens)[:, None] + (num_slots - num_tokens if corner == "lower right" else 0)
        seen = torch.arange(num_slots)
        sees = (seen <= own) & ((window_size[0] < 0) | (seen >= own - window_size[0]))
        keys, values = (t[slots].float().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        scores = torch.einsum("tnh,snh->nts", q[tokens].float(), keys) * softmax_scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        shares = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        out[tokens] = torch.einsum("nts,snh->tnh", shares, values).to(q.dtype)
    return out


def segments(has_tree: bool) -> list[Segment]:
    made = [
        Segment(0, 5, 0, (range(20, 25),), range(5)),
        Segment(5, 6, 30, (range(40, 60), range(70, 81)), (30,)),
        Segment(6, 14, 12, (range(100, 120),), range(12, 20)),
    ]
    if has_tree:
        made.append(Segment(14, 17, 4, (range(150, 157),), (4, 5, 5), (1, 3, 5), 4, (4, 5, 5)))
    return made


@pytest.mark.parametrize("has_tree", [False, True])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_chains_in_one_call_are_those_of_the_other_kernels(
    has_tree: bool, window: int | None, softcap: float | None
) -> None:
    torch.manual_seed(1)
    chosen = tuple(segments(has_tree))
    module, num_tokens = torch.nn.Module(), chosen[-1].stop
    module.layer_idx = 0  # type: ignore[assignment]
    query, key, value = (torch.randn(1, count, num_tokens, DIM) for count in (HEADS, KV_HEADS, KV_HEADS))
    past = torch.randn(2, KV_HEADS, 200, DIM)

    def out(**how: Any) -> torch.Tensor:
        pool = KVPool([KVLayout(KV_HEADS, DIM, DIM)], 200, dtype=torch.float32, device=CPU)
        pool.write(0, slice(0, 200), past[0], past[1])
        batch = PackedBatch(pool, chosen, **how)
        return packed_attention(
            module, query, key, value, None, scaling=0.25, batch=batch, sliding_window=window, softcap=softcap
        )[0]

    torch.testing.assert_close(out(find_varlen=lambda *_: stand_in), out())


def test_kernel_is_used_only_where_it_agrees_with_torch() -> None:
    def other_corner(*arguments: Any, **more: Any) -> torch.Tensor:
        return stand_in(*arguments, **more, corner="upper left")

    def older(*arguments: Any, **more: Any) -> torch.Tensor:
        raise TypeError("unexpected keyword argument 'softcap'")

    assert agrees(stand_in, CPU, torch.float16, DIM)
    assert not agrees(other_corner, CPU, torch.float16, DIM)
    assert not agrees(older, CPU, torch.float16, DIM)
    assert varlen_function(CPU, torch.float16, DIM) is None
    assert varlen_function(torch.device("cuda"), torch.float32, DIM) is None
