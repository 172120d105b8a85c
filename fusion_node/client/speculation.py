"""What a SwarmClient speculates with: drafters, what was learned of them, and the thread that they compute on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from fusion_node.client.drafters.recycling import RecyclingDrafter, RecyclingTable
from fusion_node.client.drafters.suffix import SuffixCorpus, SuffixDrafter
from fusion_node.client.drafting import Candidate, Drafter, MixedDrafter, SharedNoise
from fusion_node.client.speculation_core import SpeculationCore
from fusion_node.client.speculation_timeline import DepthCount, Timeline
from fusion_node.engine.device import prepare_thread
from fusion_node.engine.drafts import Verified
from fusion_node.errors import ConfigError, NoPeers
from scheduler.speculation import Calibration, Mode

OFF = "off"
MODES: dict[str, tuple[Mode, ...]] = {
    "auto": tuple(Mode),
    "tree": (Mode.TREE,),
    "chain": (Mode.CHAIN,),
}
"""What may be asked for, beside OFF, and the modes that are then chosen from by what each brings."""

TREE_POSITIONS = 256
"""KV that an answer reserves beyond its own positions, for what is on its way on a guess: as many rows as are in flight
at round trips of 100 ms. A short answer reserves no more than twice what it is long."""

T = TypeVar("T")

MakeDrafter = Callable[[int], Drafter]
"""Makes a drafter of one answer, which has at most so many positions with its prompt; called on the drafting thread."""


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """How an answer was speculated on.

    Attributes:
        mode: at its end.
        acceptance: of the tokens for which there were candidates, how many were the first of them; None without any.
        rows_per_token: that the nodes computed for a token.
        latency_s: of a frame through all stages; a running mean.
        price_s: by how much one more row delays all that wait, by the nodes' word and the wire.
        depth: of the tree below a token when it was chosen, as far as it was on its way or back; the mean.
        corrections: tokens that had not been sent when they were chosen.
        by_depth: of the first guesses, how many were right by how many tokens ahead they were made, from 1 on.
        timeline: the same over time.
    """

    mode: str
    acceptance: float | None
    rows_per_token: float
    latency_s: float
    price_s: float
    depth: float
    corrections: int
    by_depth: tuple[DepthCount, ...] = ()
    timeline: Timeline = field(default_factory=Timeline)

    @classmethod
    def of(cls, core: SpeculationCore) -> SpeculationReport:
        """What a core has to tell so far."""
        stats = core.stats
        return cls(
            mode=stats.mode.value,
            acceptance=stats.num_first / stats.num_candidates if stats.num_candidates else None,
            rows_per_token=stats.num_rows / max(1, stats.num_tokens),
            latency_s=stats.latency_s,
            price_s=stats.price_s,
            depth=stats.depths / max(1, stats.num_tokens),
            corrections=stats.num_corrections,
            by_depth=core.recorder.by_depth(),
            timeline=core.recorder.timeline(),
        )


def modes_of(name: str) -> tuple[Mode, ...] | None:
    """What may be chosen from; None: answers are not speculated on.

    Raises:
        ConfigError: there is no such choice.
    """
    if name == OFF:
        return None
    if name not in MODES:
        raise ConfigError(f"unknown speculation {name!r}: choose one of {', '.join((*MODES, OFF))}")
    return MODES[name]


class Drafts:
    """The drafters of a client's answers, on one thread.

    Args:
        vocabulary: ids of the target.
        drafters: how to make those of an answer, the fastest first; None: what needs no model.
        tap_layers: whose rows these read.
        remembers: whether answers are guessed from earlier ones too, and begin with what drafters were worth in them.
            What is guessed well comes sooner, so that one caller would learn what another has asked.

    Attributes:
        tap_layers: whose rows drafters read (``Verified.taps_TLD``), in ascending order: n is the row after n layers.
    """

    def __init__(
        self,
        vocabulary: int,
        drafters: Sequence[MakeDrafter] | None = None,
        *,
        tap_layers: Sequence[int] = (),
        remembers: bool = True,
    ) -> None:
        self._calibration = Calibration() if remembers else None
        self._vocabulary = vocabulary
        self.tap_layers = tuple(sorted(set(tap_layers)))
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="drafting", initializer=prepare_thread)
        self._makers: list[MakeDrafter] = list(drafters or ())
        if drafters is None:
            corpus, table = SuffixCorpus(), RecyclingTable(vocabulary)
            self._makers = [
                lambda _: SuffixDrafter(corpus if remembers else None),
                lambda _: RecyclingDrafter(table if remembers else RecyclingTable(vocabulary)),
            ]

    def add(self, drafter: MakeDrafter, *, tap_layers: Sequence[int] = ()) -> None:
        """One more, slower than those that are there.

        Args:
            tap_layers: whose rows it reads.
        """
        self._makers.append(drafter)
        self.tap_layers = tuple(sorted({*self.tap_layers, *tap_layers}))

    def begin(self, prompt: Sequence[int], noise: SharedNoise | None, num_positions: int) -> AnswerDrafts:
        """For one answer."""
        mixed = MixedDrafter((), self._calibration or Calibration(), vocabulary=self._vocabulary)
        makers = [partial(make, num_positions) for make in self._makers]
        return AnswerDrafts(self._executor, mixed, makers, list(prompt), noise)

    def close(self) -> None:
        """Nothing is drafted any more."""
        self._executor.shutdown(wait=False, cancel_futures=True)


_Found = list[list[Candidate]] | None


class Proposed:
    """Candidates that were asked for, once awaited: a coroutine would only ask then.

    Args:
        handed: comes when the thread was told, with what it will have found; None: the client was closed.
    """

    def __init__(self, handed: asyncio.Future[Future[_Found] | None]) -> None:
        self._handed = handed

    def __await__(self) -> Generator[Any, None, _Found]:
        return self._wait().__await__()

    async def _wait(self) -> _Found:
        future = await self._handed
        if future is None:
            raise NoPeers("the client was closed while it answered")
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise NoPeers("the client was closed while it answered") from error  # with what it had not begun


class AnswerDrafts:
    """The drafters of one answer (fusion_node.client.speculative_answer.Drafting).

    What they are to do is handed to their thread when the event loop has finished what it is at: a thread that wakes
    takes the interpreter from the one that is about to send a frame. Use from the event loop.
    """

    def __init__(
        self,
        executor: ThreadPoolExecutor,
        mixed: MixedDrafter,
        makers: Sequence[Callable[[], Drafter]],
        prompt: Sequence[int],
        noise: SharedNoise | None,
    ) -> None:
        self._executor = executor
        self._mixed = mixed
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Callable[[], object]] = []
        """Each hands something to the thread."""
        for make in makers:
            self._submit(partial(mixed.add, make))
        self._submit(partial(mixed.begin, prompt, noise))

    def extend(self, verified: Verified) -> None:
        """See Drafting."""
        self._put_off(partial(self._submit, partial(self._mixed.extend, verified)))

    def propose(self, paths: Sequence[Sequence[int]], width: int) -> Proposed:
        """See Drafting."""
        handed: asyncio.Future[Future[_Found] | None] = self._loop.create_future()

        def hand() -> None:
            future = self._submit(partial(self._propose, paths, width))
            if not handed.done():
                handed.set_result(future)

        self._put_off(hand)
        return Proposed(handed)

    def close(self) -> None:
        """The answer is over."""
        self._hand_over()
        self._submit(self._mixed.close)

    def _propose(self, paths: Sequence[Sequence[int]], width: int) -> _Found:
        found = self._mixed.propose(paths, width)
        return found if self._mixed.names else None

    def _put_off(self, hand: Callable[[], object]) -> None:
        self._waiting.append(hand)
        if len(self._waiting) == 1:
            self._loop.call_soon(self._hand_over)

    def _hand_over(self) -> None:
        waiting, self._waiting = self._waiting, []
        for hand in waiting:
            hand()

    def _submit(self, work: Callable[[], T]) -> Future[T] | None:
        try:
            return self._executor.submit(work)
        except RuntimeError:
            return None  # the client was closed: nobody asks for a draft any more
