"""Rows that travel in another form: compressed they are the same to the bit, as int8 nearly, and only where agreed."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import numpy as np
import pytest
import torch

from fusion_node.client.connection import SwarmConnection
from fusion_node.engine.tensor_codec import decode_rows
from fusion_node.errors import PeerRefused
from p2p.compression import FEATURE, Compressor
from p2p.messages import INT8, ZSTD, SessionFailed, SessionOpened, SessionRefused, StepResult, TensorMeta
from p2p.tensor_wire import compress
from tests.engine.tiny import TinyModel, tiny_model
from tests.scenarios.swarm import MemorySwarm, Node, step

PROMPT = [7 + 13 * n % 120 for n in range(24)]
HIDDEN = 160
"""Large enough that one row is worth compressing."""


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model("llama", hidden_size=HIDDEN)


@pytest.fixture
async def nodes(swarm: MemorySwarm) -> AsyncIterator[list[Node]]:
    made = await swarm.pipeline()
    yield made
    for node in made:
        node.admission.check_integrity()


def for_a_thin_line(*, large_bytes: int = 1 << 20) -> Compressor:
    """So thin that whatever shrinks is compressed, however slow this machine is just now."""
    return Compressor(rate_Bps=lambda peer: 100.0, features=lambda peer: {FEATURE}, large_bytes=large_bytes)


def on_thin_lines(user: SwarmConnection, nodes: list[Node], *, large_bytes: int = 1 << 20) -> list[Compressor]:
    compressors = [for_a_thin_line(large_bytes=large_bytes) for _ in range(1 + len(nodes))]
    user.compressor = compressors[0]
    for node, compressor in zip(nodes, compressors[1:], strict=True):
        node.server.attach(node.pool, compressor=compressor)
    return compressors


@pytest.mark.parametrize("large_bytes", [1 << 20, 600], ids=["on-the-loop", "on-threads"])
@pytest.mark.parametrize("wire", ["", INT8])
async def test_compressed_rows_give_the_same_answer_to_the_bit(
    swarm: MemorySwarm, nodes: list[Node], wire: str, large_bytes: int
) -> None:
    plain = await swarm.answer(await swarm.user(), nodes, PROMPT, wire=wire)
    user = await swarm.user()
    compressors = on_thin_lines(user, nodes, large_bytes=large_bytes)
    for _ in range(2):  # what the first answer tries, the second one knows
        assert await swarm.answer(user, nodes, PROMPT, wire=wire) == plain
    if wire:  # of a model whose weights are noise, int8 rows are too
        assert compressors[0].report()["compression.trials"] > 0
        return
    for compressor in compressors:
        report = compressor.report()
        assert report["compression.tensors"] > 0
        assert report["compression.bytes_after"] < report["compression.bytes_before"]
    (measured, *_) = (await swarm.measured(user)).values()
    assert "compression.trials" in await user.status_of(measured)


async def test_nodes_and_users_announce_that_they_take_compressed_rows(swarm: MemorySwarm, nodes: list[Node]) -> None:
    user = await swarm.user()
    await swarm.answer(user, nodes, PROMPT)
    for node in nodes:
        assert FEATURE in user.links.features(node.peer)
        assert FEATURE in node.pool.features(user.identity.peer_id)
    for before, after in itertools.pairwise(nodes):
        assert FEATURE in before.pool.features(after.peer)


async def test_rows_behind_large_ones_do_not_overtake_them(swarm: MemorySwarm, nodes: list[Node]) -> None:
    """Prefill chunks in flight, of which every second one goes through a thread at every hop."""
    chunks = [PROMPT[:9], PROMPT[9:10], PROMPT[10:22], PROMPT[22:23], PROMPT[23:]]
    user = await swarm.user()
    answers = []
    for is_thin in (False, True, True):
        if is_thin:
            on_thin_lines(user, nodes, large_bytes=2000)
        async with await swarm.session(user, nodes) as session:
            for index, ids in enumerate(chunks):
                tensor, payload = swarm.rows(ids)
                packing = session.packing(tensor, payload)
                is_last = index == len(chunks) - 1
                if packing is None:
                    session.send(tensor, payload, want_last=is_last)
                else:
                    session.send_packed(packing.run(), want_last=is_last)
            for _ in chunks:
                _, meta, row = await session.next_done()
            answers.append(decode_rows(meta, row))
    for answer in answers[1:]:  # not to the bit: what waits together is computed together
        assert torch.allclose(answer, answers[0], rtol=0, atol=1e-5 * float(answers[0].abs().max()))


async def test_int8_rows_are_near_the_exact_ones_and_a_quarter_as_long(swarm: MemorySwarm, nodes: list[Node]) -> None:
    user = await swarm.user()
    exact = await swarm.answer(user, nodes, PROMPT)
    for wire in (INT8, ""):
        answer = await swarm.answer(user, nodes, PROMPT, wire=wire)
        if not wire:
            assert answer == exact  # what others do with int8 changes nothing
            continue
        assert {len(row) for row in answer.rows} == {HIDDEN + 2 * HIDDEN // 32}
        ours = decode_rows(TensorMeta(INT8, 1, HIDDEN), memoryview(answer.rows[0])).numpy()
        theirs = np.frombuffer(exact.rows[0], dtype=np.float32)
        error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        assert 1e-4 < error < 0.05  # four roundings of half a percent


async def test_node_checks_that_rows_come_in_the_encoding_of_the_plan(swarm: MemorySwarm, nodes: list[Node]) -> None:
    for wire, sent in (("", INT8), (INT8, "f32"), (INT8, "f16")):
        stranger = swarm.stranger()
        plan = swarm.plan(stranger.peer, nodes, wire=wire)
        await stranger.open(plan, nodes)
        for _ in nodes:
            await stranger.get(SessionOpened)
        tensor, payload = swarm.rows([5, 6], sent)
        stranger.pool.send(nodes[0].peer, step(plan, tensor), payload)
        failed = await stranger.get(SessionFailed)
        assert isinstance(failed, SessionFailed)
        assert (failed.code, failed.culprit) == ("bad-shape", stranger.peer)


async def test_node_refuses_a_plan_in_an_encoding_that_it_does_not_know(swarm: MemorySwarm, nodes: list[Node]) -> None:
    stranger = swarm.stranger()
    await stranger.open(swarm.plan(stranger.peer, nodes[:1], wire="i4"), nodes[:1])
    refused = await stranger.get(SessionRefused)
    assert isinstance(refused, SessionRefused)
    assert refused.code == "bad-plan"
    with pytest.raises(PeerRefused, match="encoding"):
        async with await swarm.session(await swarm.user(), nodes, wire="i4"):
            pass


def broken_payloads(payload: bytes) -> list[bytes]:
    stored = compress(payload, "f32", level=1)
    longer = compress(payload + payload, "f32", level=1)
    nan = compress(b"\0\0\xc0\x7f" * (len(payload) // 4), "f32", level=1)
    return [stored[:-1], stored + b"\0", longer, stored[:40] + bytes(len(stored) - 40), payload[: len(stored)], nan * 8]


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("large_bytes", [1 << 20, 600], ids=["on-the-loop", "on-threads"])
async def test_payload_that_does_not_decompress_ends_only_its_own_session(
    swarm: MemorySwarm, nodes: list[Node], index: int, large_bytes: int
) -> None:
    on_thin_lines(await swarm.user(), nodes, large_bytes=large_bytes)
    stranger = swarm.stranger()
    plans = [swarm.plan(stranger.peer, nodes) for _ in range(2)]
    for plan in plans:
        await stranger.open(plan, nodes)
        for _ in nodes:
            await stranger.get(SessionOpened)
    _, payload = swarm.rows(PROMPT)
    compressed = TensorMeta("f32", len(PROMPT), HIDDEN, ZSTD)
    stranger.pool.send(nodes[0].peer, step(plans[0], compressed), broken_payloads(bytes(payload))[index])
    failed = await stranger.get(SessionFailed)
    assert isinstance(failed, SessionFailed)
    assert (failed.session, failed.code, failed.culprit) == (plans[0].session, "bad-rows", stranger.peer)
    # The other one goes on, and may be compressed or not as it likes.
    stranger.pool.send(nodes[0].peer, step(plans[1], compressed), compress(payload, "f32", level=3))
    assert isinstance(await stranger.get(StepResult), StepResult)


async def test_session_that_ends_while_its_rows_are_decompressed_leaves_nothing_behind(
    swarm: MemorySwarm, nodes: list[Node]
) -> None:
    on_thin_lines(await swarm.user(), nodes, large_bytes=600)
    stranger = swarm.stranger()
    _, payload = swarm.rows(PROMPT)
    stored = compress(payload, "f32", level=1)
    for _ in range(5):
        plan = swarm.plan(stranger.peer, nodes[:1])
        await stranger.open(plan, nodes[:1])
        await stranger.get(SessionOpened)
        for sequence in range(2):
            message = step(plan, TensorMeta("f32", len(PROMPT), HIDDEN, ZSTD), sequence, first_node=1 + 24 * sequence)
            stranger.pool.send(nodes[0].peer, message, stored)
        # It ends in the middle of it, for a step that is seen to be wrong at once.
        wrong = step(plan, TensorMeta("f32", 1, HIDDEN + 1), 2)
        stranger.pool.send(nodes[0].peer, wrong, bytes(4 * (HIDDEN + 1)))
        failed = await stranger.get(SessionFailed)
        assert isinstance(failed, SessionFailed)
        assert failed.code == "bad-shape"
        assert nodes[0].num_sessions == 0
    await nodes[0].server.drain(timeout_s=5.0)
    assert nodes[0].server.status().num_waiting_rows == 0


async def test_prefix_in_another_encoding_is_not_begun_with(swarm: MemorySwarm, nodes: list[Node]) -> None:
    admission, stranger = nodes[0].admission, swarm.stranger()
    first = swarm.plan(stranger.peer, nodes[:1], wire=INT8)
    await stranger.open(first, nodes[:1])
    await stranger.get(SessionOpened)
    tensor, payload = swarm.rows(PROMPT, INT8)
    stranger.pool.send(nodes[0].peer, step(first, tensor), payload)
    await stranger.get(StepResult)
    layers = nodes[0].engine.layers
    assert admission._num_sharable(first.session, stranger.peer, layers, INT8) == len(PROMPT)
    assert admission._num_sharable(first.session, stranger.peer, layers, "") == 0
    admission.close(first.session, epoch=0, source=stranger.peer, now=nodes[0].server._now(), retain=True)
    assert admission._num_sharable(first.session, stranger.peer, layers, INT8) > 0
    assert admission._num_sharable(first.session, stranger.peer, layers, "") == 0
