"""The shell of an answer that speculates: AnswerShell, with a SpeculationCore and what it asks for beside.

Tokens are chosen on one thread and drafted on another, so that neither waits for the other; frames are embedded on the
event loop, which takes some ten microseconds for their few rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fusion_node.client.answer import AnswerShell, EncodedRows, Returned
from fusion_node.client.answer_core import AnswerEvent, Failed, RowsWanted, StepDone, TreeRowsWanted, TreeStepDone
from fusion_node.client.drafting import Candidate
from fusion_node.client.held_text import Drafting, HeldText
from fusion_node.client.speculation_core import (
    CancelDead,
    Choose,
    Commit,
    Expand,
    Frame,
    SpeculationCore,
    StageCost,
)
from fusion_node.client.taps_core import NodeTaps
from fusion_node.engine.drafts import Verified
from fusion_node.types import PeerId
from p2p.messages import StageTiming

MAX_UNREAD = 32
"""Tokens that wait for their reader. Who reads slower than nodes compute keeps them busy no longer than for these."""


class RowUnfit(Exception):
    """A row that came back cannot be used: its sender's fault, unlike anything that goes wrong afterwards."""


@dataclass(frozen=True, slots=True)
class ReturnedRow:
    """One of them.

    Attributes:
        taps: what comes of other layers for the same node; None: nothing.
    """

    of: Returned
    index: int
    taps: NodeTaps | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The token that follows a row, and what drafters are told of it."""

    verified: Verified = field(repr=False)

    @property
    def token(self) -> int:
        return self.verified.tokens[0]


class Chooser(Protocol):
    """Chooses tokens."""

    async def choose(self, position: int, row: ReturnedRow, ahead: Sequence[ReturnedRow]) -> Chosen:
        """The token at this position.

        Raises:
            RowUnfit: the row is none to choose from.
        """
        ...


class SpeculativeShell(AnswerShell):
    """One answer. Its tokens come out of ``next_token``; ``next_row`` and ``append`` are not used.

    Args:
        speculation: as AnswerCore has it, not started.
        embed_tokens: encodes the rows of a few tokens.
        on_commit: is told of every token before it comes out.
        row_s: how long a row takes on the wire to this peer, as far as is known.
        decode_tap: see HeldText; None where no drafter reads rows of layers.
    """

    def __init__(
        self,
        *args: Any,
        speculation: SpeculationCore,
        chooser: Chooser,
        drafting: Drafting,
        embed_tokens: Callable[[Sequence[int]], EncodedRows],
        on_commit: Callable[[int], None],
        row_s: Callable[[PeerId], float] = lambda peer: 0.0,
        decode_tap: Callable[[Returned, int], npt.NDArray[np.float32] | None] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self.speculation = speculation
        self._chooser = chooser
        self.text = HeldText(drafting, decode_tap)
        self._embed_tokens = embed_tokens
        self._on_commit = on_commit
        self._row_s = row_s
        self._verified: tuple[Verified, NodeTaps | None] | None = None
        """Of the token that was chosen last."""
        self._put_off: Choose | None = None
        """What is chosen once the reader has taken some of what waits for it."""
        self._speculation_timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> SpeculativeShell:
        self.speculation.start(now=self._now())
        await super().__aenter__()
        return self

    async def __aexit__(self, *what: object) -> None:
        self.speculation.close()
        if self._speculation_timer is not None:
            self._speculation_timer.cancel()
        await super().__aexit__(*what)

    async def next_token(self) -> int:
        """The next token of the answer.

        Raises:
            FusionError: the answer cannot go on.
        """
        token: int = await self._next_result()
        if self._put_off is not None:
            put_off, self._put_off = self._put_off, None
            self._spawn(self._choose(put_off))
        return token

    def _end(self, error: BaseException) -> None:
        self.speculation.close()
        super()._end(error)

    # what the cores say

    def _pump(self) -> None:
        self._speculate()
        super()._pump()
        if self._speculation_timer is not None:
            self._speculation_timer.cancel()
            self._speculation_timer = None
        due = None if self._is_over else self.speculation.get_timer()
        if due is not None:
            self._speculation_timer = self._loop.call_at(due, self._on_speculation_timer)

    def _on_speculation_timer(self) -> None:
        self._guard(lambda: self.speculation.handle_timer(now=self._now()))

    def _follow(self, event: AnswerEvent) -> None:
        match event:
            case StepDone():
                if event.has_row and self._incoming is not None:
                    last = self._incoming[0].num_rows - 1
                    self._returned(event.sequence, ((event.num_computed, last),), event.timings)
            case TreeStepDone():
                self._returned(event.sequence, event.rows, event.timings)
            case Failed():
                self.speculation.close()
                super()._follow(event)
            case _:
                super()._follow(event)
        self._speculate()

    def _returned(self, sequence: int, rows: Sequence[tuple[int, int]], timings: Sequence[StageTiming]) -> None:
        if self._incoming is None:
            return
        last = self.core.places[-1].peer
        returned = Returned(*self._incoming, last)
        costs = [StageCost(each.compute_us / 1e6, each.price_us / 1e6) for each in timings]
        self.speculation.uplink_changed(self._row_s(self.core.places[0].peer))
        tagged = [(node, ReturnedRow(returned, index, self.core.taps_of(node))) for node, index in rows]
        self.speculation.returned(sequence, tagged, costs=costs, now=self._now())

    def _speculate(self) -> None:
        """Follows the speculation until it has nothing more to say."""
        while not self._is_over and (event := self.speculation.next_event()) is not None:
            match event:
                case Frame():
                    self.core.append_tree(event, now=self._now())
                case CancelDead(root):
                    self.core.cancel(root, now=self._now())
                case Expand():
                    # Asked here: what is committed meanwhile is not the text that the paths go on from.
                    self._spawn(self._draft(event, self.text.propose(event.paths, event.width)))
                case Choose() if self._results.qsize() >= MAX_UNREAD:
                    self._put_off = event
                    self.speculation.put_off()
                case Choose():
                    self._spawn(self._choose(event))
                case Commit(token):
                    self._on_commit(token)
                    if self._verified is not None:
                        self.text.extend(*self._verified, are_sent=self.core.are_taps_sent)
                        self._verified = None
                    self._results.put_nowait(token)

    async def _draft(self, event: Expand, candidates: Awaitable[list[list[Candidate]] | None]) -> None:
        found = await candidates
        if found is None:
            self.speculation.not_drafted(event.number, is_final=True, now=self._now())
        else:
            self.speculation.drafted(event.number, found, now=self._now())
        self._pump()

    async def _choose(self, event: Choose) -> None:
        row: ReturnedRow = event.row
        try:
            chosen = await self._chooser.choose(event.position, row, event.ahead)
        except RowUnfit as error:
            self.core.tree_row_unfit(event.position, row.of.sender, str(error), now=self._now())
        else:
            self._verified = chosen.verified, row.taps
            self.speculation.chosen(event.position, chosen.token, now=self._now())
        self._pump()

    def _rows_at_hand(self, wanted: RowsWanted | TreeRowsWanted) -> EncodedRows | None:
        if isinstance(wanted, TreeRowsWanted):
            return self._embed_tokens(wanted.frame.tokens)
        return None
