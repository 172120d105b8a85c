"""Masks of contributions: they cancel in every sum, hide every single contribution, and never wrap."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from fusion_node.engine.masked_sums import MAX_BITS, WORD_BITS, BeyondRing, MaskedSums, Words
from fusion_node.errors import LocalProtocolError
from fusion_node.mask_keys import mask_keys
from fusion_node.slices import Dims, Exchange, exchange_width, exchanges, has_squares, masked_width, split

DENSE = Dims(hidden=96, heads=8, kv_heads=2, head_dim=12, channels=160)
EXPERTS = Dims(hidden=96, heads=8, kv_heads=4, head_dim=12, channels=80, num_experts=6, experts_per_row=2)
SPLITS = [(1, 1, 1), (5, 1, 2), (1, 1, 1, 1), (3, 1, 1, 2), (1, 2, 3, 4, 5), (1,) * 8]
SECRET = bytes(range(32))
SESSION = b"s" * 16
NODE, LAYER = 17, 5


def members(dims: Dims, weights: tuple[int, ...], *, secret: bytes = SECRET, epoch: int = 0) -> list[MaskedSums]:
    bounds = split(dims, weights)
    return [
        MaskedSums(dims, bounds, own, keys=keys_of(len(weights), own, secret=secret, epoch=epoch), epoch=epoch)
        for own in range(len(weights))
    ]


def keys_of(num_members: int, member: int, *, secret: bytes = SECRET, epoch: int = 0) -> bytes:
    return mask_keys(secret, session=SESSION, epoch=epoch, opening=0, stage=0, num_members=num_members, member=member)


def parts_of(
    dims: Dims, weights: tuple[int, ...], exchange: Exchange, num_rows: int, *, seed: int = 0, scale: float = 1.0
) -> list[list[torch.Tensor]]:
    """By sender and owner; the last of values that are summed squares is positive."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in weights:
        parts = []
        for owner in split(dims, weights):
            rows = scale * torch.randn(num_rows, exchange_width(dims, owner, exchange), generator=generator)
            if has_squares(dims, exchange):
                rows[:, -1] = 1e3 * rows[:, -1].square()
            parts.append(rows)
        made.append(parts)
    return made


def sums(group: list[MaskedSums], parts: list[list[torch.Tensor]], exchange: Exchange) -> list[torch.Tensor]:
    num_rows = len(parts[0][0])
    sent = [
        each.contributions(own, node=NODE, layer=LAYER, exchange=exchange)
        for each, own in zip(group, parts, strict=True)
    ]
    return [
        each.total(
            [came(of_sender[owner], sender == owner) for sender, of_sender in enumerate(sent)], num_rows, exchange
        )
        for owner, each in enumerate(group)
    ]


def came(words: Words, is_own: bool) -> object:
    """As the owner has it: its own as it was made, that of another one as bytes."""
    return words if is_own else words.tobytes()


@pytest.mark.parametrize("weights", SPLITS, ids=lambda weights: ":".join(map(str, weights)))
@pytest.mark.parametrize(("dims", "scale"), [(DENSE, 1.0), (DENSE, 1e-3), (DENSE, 3e4), (EXPERTS, 1.0)])
def test_masks_cancel_in_every_split_and_exchange(dims: Dims, scale: float, weights: tuple[int, ...]) -> None:
    group = members(dims, weights)
    for exchange in exchanges(dims):
        parts = parts_of(dims, weights, exchange, 3, scale=scale)
        for owner, total in enumerate(sums(group, parts, exchange)):
            exact = sum(of_sender[owner].double() for of_sender in parts)
            assert total.dtype == torch.float32
            assert (total - exact).norm() <= 1e-6 * exact.norm()
            if has_squares(dims, exchange):
                assert torch.allclose(total[:, -1].double(), exact[:, -1], rtol=1e-6, atol=0.0)  # type: ignore[union-attr]


def test_members_that_are_sent_the_same_have_the_same_bits() -> None:
    weights = (2, 1, 1)
    (shared,) = parts_of(EXPERTS, (1,), Exchange.ROUTER, 5)
    generator = torch.Generator().manual_seed(3)
    parts = [[shared[0] * factor] * 3 for factor in torch.randn(3, generator=generator)]
    first, *others = sums(members(EXPERTS, weights), parts, Exchange.ROUTER)
    assert all(torch.equal(first, other) for other in others)


def test_float32_above_the_step_of_the_ring_comes_back_as_it_was() -> None:
    group, parts = members(DENSE, (1, 1, 1)), parts_of(DENSE, (1, 1, 1), Exchange.O, 2)
    for each in parts[1:]:
        each[0].zero_()
    values = parts[0][0]
    values[values.abs() < 2.0**-9] = 2.0**-9
    values[0, 0] = math.nextafter(2.0**MAX_BITS, 0) // 4 * 4
    assert torch.equal(sums(group, parts, Exchange.O)[0], values)


def chi_square(data: bytes) -> float:
    """Over the values of bytes: 255 on average where they are uniform, with a standard deviation of 23."""
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    expected = len(data) / 256
    return float(((counts - expected) ** 2 / expected).sum())


UNIFORM = 400.0
"""Six standard deviations above what is expected."""


def test_single_contribution_is_uniform_to_who_has_no_key_and_is_not_without_a_mask() -> None:
    weights, num_rows = (1, 1, 1), 64
    group, plain = members(DENSE, weights), MaskedSums.__new__(MaskedSums)
    plain.__dict__.update(group[0].__dict__, _keys={})
    for exchange in exchanges(DENSE):
        parts = parts_of(DENSE, weights, exchange, num_rows)
        masked, bare = (
            each.contributions(parts[0], node=NODE, layer=LAYER, exchange=exchange) for each in (group[0], plain)
        )
        for owner in (1, 2):
            assert chi_square(masked[owner].tobytes()) < UNIFORM
            assert chi_square(bare[owner].tobytes()) > 4 * UNIFORM
            # Of every byte of a word, the highest too; and no owner's are those of another one.
            for place in range(8):
                assert chi_square(masked[owner].tobytes()[place::8]) < UNIFORM
        assert masked[1].tobytes()[:64] != masked[2].tobytes()[:64]
        assert np.array_equal(masked[0], bare[0])


def test_no_two_values_have_one_mask() -> None:
    """Zeros show the masks themselves: no word of them comes twice, whatever they are for."""
    weights = (1, 2, 1, 1)
    seen: set[int] = set()
    num_words = 0
    zeros = {
        exchange: [torch.zeros(2, exchange_width(DENSE, b, exchange)) for b in split(DENSE, weights)]
        for exchange in exchanges(DENSE)
    }
    for epoch in (0, 1):
        for member, node, layer, exchange in itertools.product(
            members(DENSE, weights, epoch=epoch)[:1], (1, 3), (0, 1), exchanges(DENSE)
        ):
            words = member.contributions(zeros[exchange], node=node, layer=layer, exchange=exchange)
            of_others = np.concatenate([each.ravel() for each in words[1:]])
            num_words += of_others.size
            seen.update(of_others.tolist())
    assert len(seen) == num_words


def test_same_rows_are_masked_the_same_again_and_under_another_epoch_or_secret_otherwise() -> None:
    parts = parts_of(DENSE, (1, 1, 1), Exchange.QKV, 2)[0]

    def sent(**changes: object) -> bytes:
        member = members(DENSE, (1, 1, 1), **changes)[0]  # type: ignore[arg-type]
        words = member.contributions(parts, node=NODE, layer=LAYER, exchange=Exchange.QKV)
        return words[1].tobytes()

    assert sent() == sent()
    assert len({sent(), sent(epoch=1), sent(secret=bytes(32))}) == 3


@pytest.mark.parametrize("value", [2.0**MAX_BITS, -(2.0**MAX_BITS), math.inf, math.nan])
def test_value_that_the_ring_cannot_hold_is_an_error(value: float) -> None:
    member, parts = members(DENSE, (1, 1, 1))[1], parts_of(DENSE, (1, 1, 1), Exchange.DOWN, 2)[1]
    member.contributions(parts, node=NODE, layer=LAYER, exchange=Exchange.DOWN)
    parts[2][1, 3] = value
    with pytest.raises(BeyondRing):
        member.contributions(parts, node=NODE, layer=LAYER, exchange=Exchange.DOWN)


def test_squares_may_be_larger_than_other_values_and_have_a_bound_as_well() -> None:
    group, parts = members(DENSE, (1, 1, 1)), parts_of(DENSE, (1, 1, 1), Exchange.QKV, 1)
    for each in parts:
        for part in each:
            part[:, -1] = 2.0 ** (WORD_BITS - 1)
    for total in sums(group, parts, Exchange.QKV):
        assert float(total[0, -1]) == 3 * 2.0 ** (WORD_BITS - 1)
    parts[0][0][:, -1] = 2.0**WORD_BITS
    with pytest.raises(BeyondRing):
        sums(group, parts, Exchange.QKV)


def test_sixteen_of_the_largest_values_do_not_wrap() -> None:
    dims, weights = Dims(hidden=128, heads=16, kv_heads=16, head_dim=8, channels=128), (1,) * 16
    most = math.nextafter(2.0**MAX_BITS, 0) // 4 * 4
    for sign in (1.0, -1.0):
        parts = [[torch.full_like(part, sign * most) for part in each]
                 for each in parts_of(dims, weights, Exchange.DOWN, 1)]  # fmt: skip
        for total in sums(members(dims, weights), parts, Exchange.DOWN):
            assert torch.equal(total, torch.full_like(total, sign * 16 * most))


def test_masks_that_do_not_cancel_are_an_error_and_no_wrong_number() -> None:
    group, parts = members(DENSE, (1, 1, 1)), parts_of(DENSE, (1, 1, 1), Exchange.O, 1)
    group[1] = members(DENSE, (1, 1, 1), secret=bytes(32))[1]
    with pytest.raises(BeyondRing, match="do not add up"):
        sums(group, parts, Exchange.O)


def test_two_members_have_nobody_to_hide_behind() -> None:
    with pytest.raises(LocalProtocolError):
        members(DENSE, (1, 1))
    with pytest.raises(LocalProtocolError):
        MaskedSums(DENSE, split(DENSE, (1, 1, 1)), 0, keys=bytes(32), epoch=0)


def test_each_pair_has_a_key_of_its_own_and_both_have_the_same() -> None:
    keys = [keys_of(4, member) for member in range(4)]
    assert all(len(each) == 3 * 32 for each in keys)
    pair = {(i, j): keys[i][32 * (j - (j > i)) : 32 * (j - (j > i) + 1)] for i in range(4) for j in range(4) if i != j}
    assert all(pair[i, j] == pair[j, i] for i, j in pair)
    assert len(set(pair.values())) == 6
    others = [
        mask_keys(SECRET, session=SESSION, epoch=epoch, opening=opening, stage=stage, num_members=4, member=0)
        for epoch, opening, stage in ((0, 0, 1), (0, 1, 0), (1, 0, 0))
    ]
    assert len({keys[0], *others}) == 4


def test_words_of_a_row_are_as_many_as_everybody_reckons() -> None:
    for exchange in exchanges(EXPERTS):
        parts = parts_of(EXPERTS, (1, 1, 2), exchange, 2)[0]
        words = members(EXPERTS, (1, 1, 2))[0].contributions(parts, node=NODE, layer=LAYER, exchange=exchange)
        for owner, each in zip(split(EXPERTS, (1, 1, 2)), words, strict=True):
            assert each.shape == (2, masked_width(EXPERTS, owner, exchange))
