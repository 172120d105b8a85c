"""Speculation over real servers, links and engine: the tokens are those of plain decode, whatever fails on the way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from fusion_node.client.answer import Returned
from fusion_node.client.answer_core import Opened, Prefix, RepairKind
from fusion_node.client.drafting import Candidate
from fusion_node.client.sampling import SamplingParams, choose_token
from fusion_node.client.speculation_core import SpeculationCore, SpeculationStats
from fusion_node.client.speculative_answer import Chosen, ReturnedRow, SpeculativeShell
from fusion_node.engine.drafts import Verified
from scheduler.speculation import Mode, ModePolicy
from tests.scenarios.swarm import MemorySwarm
from tests.scenarios.test_answer_repair import PROMPT, Answering, Doing, answering, nodes_of, once, rows_of

NUM_TOKENS = 24
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95)
SEED = 11


@dataclass
class Guessing:
    """Right about the next token in some share of the cases, and as sure of it as chance will have it."""

    text: Sequence[int]
    share: float
    chance: random.Random
    extended: list[int] = field(default_factory=list)

    def extend(self, verified: Verified) -> None:
        self.extended += verified.tokens

    def propose(self, paths: Sequence[Sequence[int]], width: int) -> asyncio.Future[list[list[Candidate]] | None]:
        found: asyncio.Future[list[list[Candidate]] | None] = asyncio.get_running_loop().create_future()
        found.set_result([self._candidates(path, width) for path in paths])
        return found

    def _candidates(self, path: Sequence[int], width: int) -> list[Candidate]:
        chance, at = self.chance, len(self.extended)
        tokens = chance.sample(range(120), chance.randrange(min(width, 5)))
        end = at + len(path)
        if end < len(self.text) and list(self.text[at:end]) == list(path) and chance.random() < self.share:
            tokens = [self.text[end], *(token for token in tokens if token != self.text[end])]
        return [Candidate(token, chance.choice((0.9, 0.5, 0.2, 0.02)), "guess") for token in tokens]


@dataclass
class Speculating(Answering):
    """The same user, who guesses."""

    params: SamplingParams = GREEDY
    modes: tuple[Mode, ...] = (Mode.TREE,)
    make_policy: Callable[[tuple[Mode, ...]], ModePolicy] = ModePolicy
    guesses: Guessing = field(default_factory=lambda: Guessing((), 0.0, random.Random(0)))
    taps: tuple[int, ...] = ()
    decode_tap: Callable[[Returned, int], npt.NDArray[np.float32] | None] | None = None
    num_frames: int = 0
    num_rows: int = 0
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    num_with_taps: int = 0

    async def choose(self, position: int, row: ReturnedRow, ahead: Sequence[ReturnedRow]) -> Chosen:
        await asyncio.sleep(0)
        rows_TD = rows_of(row.of.tensor, row.of.payload)
        logits_V = self.swarm.boundary.logits(rows_TD[row.index : row.index + 1])[0]
        seen = self.ids
        assert len(seen) == position
        return Chosen(Verified([choose_token(logits_V, self.params, seed=SEED, position=position, seen=seen)]))

    async def run(self, num_tokens: int = NUM_TOKENS) -> list[int]:
        num_positions = len(self.prompt) + num_tokens
        speculation = SpeculationCore(
            last_token=self.prompt[-1],
            num_prompt=len(self.prompt),
            stop_position=num_positions,
            stop_tokens=frozenset(),
            max_positions=num_positions + 64,
            next_sequence=0,
            policy=self.make_policy(self.modes),
            wants_taps=bool(self.taps),
        )

        def commit(token: int) -> None:
            self.tokens.append(token)
            self.on_token(len(self.tokens))

        shell = SpeculativeShell(
            self.connection,
            self.core(num_positions + 64, speculation, self.taps),
            self,
            embed=self.embed,
            on_compute=self.on_compute,
            on_event=self.note,
            speculation=speculation,
            chooser=self,
            drafting=self.guesses,
            embed_tokens=self.swarm.rows,
            on_commit=commit,
            decode_tap=self.decode_tap,
        )
        shell.retain = self.retain
        async with asyncio.timeout(60.0), shell:
            out = [await shell.next_token() for _ in range(num_tokens)]
        assert out == self.tokens
        self.stats, self.num_with_taps = speculation.stats, shell.text.num_with_taps
        self.num_frames, self.num_rows = speculation.stats.num_frames, speculation.stats.num_rows
        return out


async def speculating(swarm: MemorySwarm, share: float, text: Sequence[int], **changes: object) -> Speculating:
    user = (await answering(swarm)).connection
    guesses = Guessing(text, share, random.Random(7))
    return Speculating(swarm, user, guesses=guesses, **changes)  # type: ignore[arg-type]


async def plain(swarm: MemorySwarm, params: SamplingParams) -> list[int]:
    """The tokens without a guess."""
    user = await speculating(swarm, 0.0, (), params=params, modes=(Mode.PLAIN,))
    tokens = await user.run()
    assert user.num_rows == NUM_TOKENS - 1
    return tokens


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
async def test_tokens_are_those_of_plain_decode(swarm: MemorySwarm, params: SamplingParams, share: float) -> None:
    await nodes_of(swarm, 1)
    expected = await plain(swarm, params)
    if params is GREEDY:
        assert expected == await (await answering(swarm)).run(NUM_TOKENS)
    user = await speculating(swarm, share, expected, params=params)
    assert await user.run() == expected
    assert user.num_rows > NUM_TOKENS


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("fault", ["kill", "freeze", "leave"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
async def test_lost_stage_is_replaced_and_the_tokens_stay_the_same(
    swarm: MemorySwarm, params: SamplingParams, fault: str, stage: int
) -> None:
    nodes = await nodes_of(swarm)
    expected = await plain(swarm, params)
    user, doing = await speculating(swarm, 0.8, expected, params=params), Doing()

    def strike() -> None:
        doing.befall(nodes[stage], fault, swarm)

    user.on_token = once(lambda count: count == 8, strike)
    assert await user.run() == expected
    assert user.num_sessions == 1
    (repair,) = user.repairs
    assert (repair.kind, repair.stage, repair.peer) == (RepairKind.PATCHED, stage, nodes[stage].peer)
    await asyncio.gather(*doing.tasks)


async def test_kv_of_a_speculated_answer_is_the_beginning_of_the_next(swarm: MemorySwarm) -> None:
    await nodes_of(swarm, 1)
    expected = await plain(swarm, GREEDY)
    first = await speculating(swarm, 0.8, expected, retain=True)
    await first.run()
    session, num_kept = next(event.session for event in first.events if isinstance(event, Opened)), 96
    prompt = [*PROMPT, *expected, 5, 6]
    fresh = Answering(swarm, first.connection, prompt)
    tokens = await fresh.run(6)
    again = Answering(swarm, first.connection, prompt)
    again.prefix = Prefix(session, num_kept)
    assert await again.run(6) == tokens
    opened = [event for event in again.events if isinstance(event, Opened)]
    assert opened[0].reused_positions == num_kept
