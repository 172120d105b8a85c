"""What is wrong with a guess costs the guess: the session goes on, over real servers, links and engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from fusion_node.client.drafting import Proposals, SharedNoise
from fusion_node.client.speculation import Drafts
from fusion_node.engine.drafts import Verified
from fusion_node.engine.session_log_core import MAX_LIVE_NODES
from p2p.messages import SessionFailed, TensorMeta
from tests.scenarios.swarm import MemorySwarm, step
from tests.scenarios.test_answer_repair import PROMPT, answering, nodes_of
from tests.scenarios.test_speculative_answer import GREEDY, NUM_TOKENS, Speculating, plain, speculating

VOCABULARY = 131


class FailsAfter:
    """Guesses something, and after some calls does what it must not."""

    name = "fails"

    def __init__(self, num_calls: int, fail: Callable[[Sequence[Sequence[int]]], Proposals]) -> None:
        self.num_calls = num_calls
        self._fail = fail

    def begin(self, prompt: Sequence[int], noise: SharedNoise | None = None) -> None:
        pass

    def extend(self, verified: Verified) -> None:
        pass

    def propose(self, paths: Sequence[Sequence[int]], width: int) -> Proposals:
        self.num_calls -= 1
        if self.num_calls < 0:
            return self._fail(paths)
        return [[(5 + len(path), 0.9), (77, 0.05)] for path in paths]

    def close(self) -> None:
        pass


def raises(paths: Sequence[Sequence[int]]) -> Proposals:
    raise RuntimeError("CUDA is out of luck")


def foreign(paths: Sequence[Sequence[int]]) -> Proposals:
    """Tokens of a larger vocabulary."""
    return [[(VOCABULARY, 0.9)] for _ in paths]


def not_a_number(paths: Sequence[Sequence[int]]) -> Proposals:
    return [[(7, math.nan)] for _ in paths]


def too_few(paths: Sequence[Sequence[int]]) -> Proposals:
    return []


@pytest.mark.parametrize("fail", [raises, foreign, not_a_number, too_few])
async def test_session_goes_on_without_a_drafter_that_fails(
    swarm: MemorySwarm, fail: Callable[[Sequence[Sequence[int]]], Proposals]
) -> None:
    await nodes_of(swarm, 1)
    expected = await plain(swarm, GREEDY)
    drafter = FailsAfter(3, fail)
    drafts = Drafts(VOCABULARY, [lambda _: drafter])
    drafting = drafts.begin(PROMPT, None, len(PROMPT) + NUM_TOKENS)
    try:
        user = Speculating(swarm, (await answering(swarm)).connection, guesses=drafting)  # type: ignore[arg-type]
        assert await user.run() == expected
    finally:
        drafting.close()
        drafts.close()
    assert drafter.num_calls == -1, "it is not asked again"
    assert user.num_sessions == 1
    assert not user.repairs


@pytest.mark.parametrize("has_rows", [True, False])
async def test_client_that_floods_a_stage_with_nodes_loses_its_session_and_nobody_else_does(
    swarm: MemorySwarm, has_rows: bool
) -> None:
    nodes = await nodes_of(swarm, 1)
    expected = await plain(swarm, GREEDY)
    user = await speculating(swarm, 0.8, expected)
    flooder, plan = await swarm.with_session(nodes)
    num_sent = 0

    def on_token(count: int) -> None:
        nonlocal num_sent
        if num_sent > MAX_LIVE_NODES // 40:
            return
        tensor, payload = swarm.rows([5] * 40)
        live = b""
        if not has_rows:
            tensor, payload, live = TensorMeta(tensor.dtype, 0, tensor.row_size), memoryview(b""), bytes(5)
        message = step(
            plan, tensor, num_sent, first_node=1 + 40 * num_sent, parent=0, parents=(0,) * 40, advance=0, want=(),
            live=live, num_nodes=0 if has_rows else 40,
        )  # fmt: skip
        num_sent += 1
        flooder.pool.send(nodes[0].peer, message, payload)

    user.on_token = on_token
    assert await user.run() == expected
    assert not user.repairs
    while num_sent <= MAX_LIVE_NODES // 40:
        on_token(0)
    failed = await flooder.get(SessionFailed)
    assert isinstance(failed, SessionFailed)
    assert (failed.code, failed.culprit, failed.is_kept) == (
        "overflow" if has_rows else "too-wide",
        flooder.peer,
        False,
    )
