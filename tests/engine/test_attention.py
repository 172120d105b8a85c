"""Attention whose mask is too large to keep: taken in parts, and the same as in one."""

from __future__ import annotations

import pytest
import torch

from fusion_node.engine.attention import PackedBatch, Segment, attend, packed_attention
from fusion_node.engine.kv_cache import KVLayout, KVPool

FIRST, ROWS, KV_HEADS, HEADS, DIM = 300, 40, 3, 9, 16
NUM_SLOTS = FIRST + ROWS
RUNS = (range(100, 400), range(420, 420 + ROWS))


def chain() -> Segment:
    return Segment(0, ROWS, FIRST, RUNS, range(FIRST, NUM_SLOTS))


def tree() -> Segment:
    """Two branches that take turns, behind what is committed."""
    visible = [sum(1 << other for other in range(row % 2, row + 1, 2)) for row in range(ROWS)]
    positions = [FIRST + row // 2 for row in range(ROWS)]
    return Segment(0, ROWS, FIRST, RUNS, positions, visible, FIRST, positions)


@pytest.mark.parametrize("segment", [chain(), tree()], ids=["chain", "tree"])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("softcap", [None, 20.0], ids=["fused", "plain products"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_attend_in_parts_are_those_that_attend_together(
    segment: Segment, window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(5)
    pool = KVPool([KVLayout(KV_HEADS, DIM, DIM)], 500, dtype=torch.float32, device=torch.device("cpu"))
    pool.write(0, slice(0, 500), torch.randn(KV_HEADS, 500, DIM), torch.randn(KV_HEADS, 500, DIM))
    query_1NTH = torch.randn(1, HEADS, ROWS, DIM, dtype=dtype)
    whole, few = PackedBatch(pool, (segment,)), PackedBatch(pool, (segment,), max_scores=5 * HEADS * 100)
    (kept,), (made,) = whole.groups(window, 0, dtype), few.groups(window, 0, dtype)
    assert kept.make_mask is None
    assert made.mask is None
    assert made.make_mask is not None
    expected, parts = (attend(query_1NTH, pool, 0, group, 0.25, softcap, None) for group in (kept, made))
    assert expected.shape == (1, ROWS, HEADS, DIM)
    torch.testing.assert_close(parts, expected)


def test_masks_are_never_larger_than_they_may_be() -> None:
    pool = KVPool([KVLayout(KV_HEADS, DIM, DIM)], 500, dtype=torch.float32, device=torch.device("cpu"))
    pool.write(0, slice(0, 500), torch.zeros(KV_HEADS, 500, DIM), torch.zeros(KV_HEADS, 500, DIM))
    max_scores = 6 * 3 * NUM_SLOTS
    (group,) = PackedBatch(pool, (chain(),), max_scores=max_scores).groups(None, 0, torch.float32)
    assert group.make_mask is not None
    make_mask, sizes = group.make_mask, []

    def counted(first: int, stop: int) -> torch.Tensor:
        mask = make_mask(first, stop)
        sizes.append(mask.numel() * HEADS // KV_HEADS)
        return mask

    group = type(group)(group.tokens, group.slots, make_mask=counted, max_scores=max_scores)
    attend(torch.zeros(1, HEADS, ROWS, DIM), pool, 0, group, 0.25, None, None)
    assert len(sizes) == -(-ROWS // 6)
    assert max(sizes) <= max_scores


def test_mask_that_is_kept_is_not_repeated_beyond_what_it_may_be_for_heads_that_share_keys() -> None:
    layout = KVLayout(1, DIM, DIM)
    pool = KVPool([layout], 500, dtype=torch.float32, device=torch.device("cpu"))
    pool.write(0, slice(0, 500), torch.zeros(1, 500, DIM), torch.zeros(1, 500, DIM))
    (group,) = PackedBatch(pool, (chain(),), max_scores=4 * ROWS * NUM_SLOTS).groups(None, 0, torch.float32)
    assert group.mask is not None
    attend(torch.zeros(1, 9, ROWS, DIM), pool, 0, group, 0.25, None, None)
    assert group.num_folded == 0
    attend(torch.zeros(1, 4, ROWS, DIM), pool, 0, group, 0.25, None, None)
    assert group.num_folded == 4 * ROWS * NUM_SLOTS


def test_masks_kept_for_all_sequences_of_a_batch_are_bounded_together() -> None:
    pool = KVPool([KVLayout(KV_HEADS, DIM, DIM)], 500, dtype=torch.float32, device=torch.device("cpu"))
    segments = tuple(
        Segment(start, start + ROWS, FIRST, RUNS, range(FIRST, NUM_SLOTS)) for start in range(0, 4 * ROWS, ROWS)
    )
    batch = PackedBatch(pool, segments, max_scores=4 * 3 * ROWS * NUM_SLOTS)
    groups = batch.groups(None, 0, torch.float32)
    assert [group.make_mask is None for group in groups] == [True, True, True, False]


@pytest.mark.parametrize("lengths", [(60, 4, 30), (4, 30, 60), (60, 60, 300, 4, 60)])
@pytest.mark.parametrize("window", [None, 16])
def test_single_tokens_that_attend_together_are_those_that_attend_alone(
    lengths: tuple[int, ...], window: int | None
) -> None:
    """In whatever order they come, and however many fit into a group."""
    torch.manual_seed(3)
    pool = KVPool([KVLayout(KV_HEADS, DIM, DIM)], 2000, dtype=torch.float32, device=torch.device("cpu"))
    pool.write(0, slice(0, 2000), torch.randn(KV_HEADS, 2000, DIM), torch.randn(KV_HEADS, 2000, DIM))
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    count = len(lengths)
    query, key, value = (torch.randn(1, heads, count, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))

    def out(numbers: range) -> torch.Tensor:
        segments = [
            Segment(i, i + 1, lengths[n], (range(400 * n, 400 * n + lengths[n] + 1),), (lengths[n],))
            for i, n in enumerate(numbers)
        ]
        rows = slice(numbers.start, numbers.stop)
        batch = PackedBatch(pool, tuple(segments))
        together, _ = packed_attention(
            module, query[:, :, rows], key[:, :, rows], value[:, :, rows], None,
            scaling=0.25, batch=batch, sliding_window=window,
        )  # fmt: skip
        return together

    alone = torch.cat([out(range(n, n + 1)) for n in range(count)], dim=1)
    torch.testing.assert_close(out(range(count)), alone)
