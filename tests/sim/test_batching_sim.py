"""A device in simulated time: what users see of one another, measured on the batching core's own decisions.

The device takes FIXED_S + ROW_S per row, some per cent more or less. Users send their next step one round trip after
the last one's end. Everything is drawn from the seed that a failure prints.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from fusion_node.engine.batching_core import Batch, BatchingCore, Priority, Work

FIXED_S, ROW_S, NOISE = 0.020, 0.001, 0.03
"""A small device: a forward of twenty rows takes twice as long as one without."""

SEEDS = (0, 9)
"""9: a step that came just after a forward had begun, as none did in the run without a prefill."""


@dataclass
class Simulation:
    """One device behind a core; users are callbacks."""

    seed: int
    now: float = 0.0
    core: BatchingCore = field(default_factory=BatchingCore)
    ended: dict[str, list[tuple[float, float, int]]] = field(default_factory=lambda: defaultdict(list))
    """By session: arrival, end and rows of its works."""
    served_rows: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """By user."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._is_busy = False
        self._on_end: dict[str, Callable[[], None]] = {}
        # What a node does before it announces itself: a few forwards teach what they cost.
        for num_rows in (1, 8, 64):
            self.core.learn("layers", num_rows, self.seconds_of(num_rows))

    def seconds_of(self, num_rows: int) -> float:
        return (FIXED_S + ROW_S * num_rows) * self.random.uniform(1 - NOISE, 1 + NOISE)

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, action))

    def send(
        self,
        session: str,
        user: str,
        num_rows: int,
        priority: Priority = Priority.INTERACTIVE,
        *,
        is_tree: bool = False,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_end[session] = on_end
        work = Work(session, user, num_rows, "layers", priority, is_tree=is_tree, arrived=self.now)
        assert self.core.add(work, now=self.now) is None

    def run(self, until: float) -> None:
        while True:
            if not self._is_busy:
                batch = self.core.next_batch(now=self.now)
                if batch is not None:
                    self._is_busy = True
                    seconds = self.seconds_of(batch.num_rows)
                    self.at(self.now + seconds, lambda batch=batch, seconds=seconds: self._done(batch, seconds))
            timer = self.core.get_timer() if not self._is_busy else None
            times = [time for time in (timer, self._events[0][0] if self._events else None) if time is not None]
            if not times or min(times) > until:
                self.now = until
                return
            self.now = max(self.now, min(times))
            if self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            assert self.core.handle_timer(now=self.now) == []

    def _done(self, batch: Batch, seconds: float) -> None:
        self._is_busy = False
        for piece in batch.pieces:
            self.served_rows[piece.work.user] += piece.stop - piece.start
        for work in self.core.done(batch, seconds=seconds, now=self.now):
            session = str(work.session)
            self.ended[session].append((work.arrived, self.now, work.num_rows))
            self._on_end[session]()

    def decoder(
        self, name: str, *, round_trip_s: float, user: str | None = None, num_rows: int = 1, is_tree: bool = False
    ) -> None:
        """A session that sends a step, waits for it, and sends the next about a round trip later."""

        def ended() -> None:
            self.at(self.now + round_trip_s * self.random.uniform(0.8, 1.2), step)

        def step() -> None:
            self.send(name, user or name, num_rows, is_tree=is_tree, on_end=ended)

        self.at(self.now + self.random.uniform(0, round_trip_s), step)

    def flood(self, user: str, num_sessions: int, num_rows: int, priority: Priority = Priority.INTERACTIVE) -> None:
        """Sessions that have always something waiting."""
        for number in range(num_sessions):
            name = f"{user}-{number}"

            def step(name: str = name) -> None:
                self.send(name, user, num_rows, priority, on_end=step)

            self.at(self.now, step)

    def gaps(self, session: str, *, since: float, until: float = math.inf) -> list[float]:
        """Seconds from token to token."""
        ends = [end for _, end, _ in self.ended[session] if since <= end <= until]
        return [later - earlier for earlier, later in pairwise(ends)]


PREFILL_ROWS = 8_000
WARM_S = 2.0

ROUND_TRIPS_S = {
    "one on this machine": [0.0005],
    "one across a continent": [0.030],
    "four anywhere": [0.001, 0.020, 0.050, 0.120],
    "sixteen in one region": [0.020] * 16,
}


def with_decoders(seed: int, round_trips_s: list[float]) -> Simulation:
    sim = Simulation(seed)
    for number, round_trip_s in enumerate(round_trips_s):
        sim.decoder(f"d{number}", round_trip_s=round_trip_s)
    return sim


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("round_trips_s", ROUND_TRIPS_S.values(), ids=ROUND_TRIPS_S)
def test_no_decoders_token_takes_twice_as_long_beside_a_long_prefill(round_trips_s: list[float], seed: int) -> None:
    alone, beside = with_decoders(seed, round_trips_s), with_decoders(seed, round_trips_s)
    beside.at(WARM_S, lambda: beside.send("prefill", "other", PREFILL_ROWS))
    alone.run(20.0)
    beside.run(60.0)
    ((began, ended, _),) = beside.ended["prefill"]
    # At least half of what the device could do for it alone.
    assert ended - began <= 2 * (PREFILL_ROWS * ROW_S + PREFILL_ROWS / 512 * FIXED_S) + len(round_trips_s)
    for number, round_trip_s in enumerate(round_trips_s):
        slowest = max(beside.gaps(f"d{number}", since=WARM_S, until=ended))
        # Without a prefill, too, a step may come just after a forward has begun, and wait for all of it.
        just_missed = 0.8 * round_trip_s + 2 * (1 - NOISE) * (FIXED_S + ROW_S)
        usual = alone.gaps(f"d{number}", since=WARM_S)
        bound = max(usual) if len(round_trips_s) == 1 else max(*usual, just_missed)
        assert slowest <= 2 * bound, f"d{number}, seed {seed}"


@pytest.mark.parametrize("seed", SEEDS)
def test_users_share_alike_whatever_the_number_of_their_sessions(seed: int) -> None:
    sim = Simulation(seed)
    sim.flood("flood", 64, 100)
    sim.flood("one", 1, 4_000)
    sim.at(10.0, lambda: sim.flood("late", 2, 2_000))
    sim.run(10.0)
    first = dict(sim.served_rows)
    assert first["one"] == pytest.approx(first["flood"], rel=0.15)
    sim.run(40.0)
    late = {user: rows - first.get(user, 0) for user, rows in sim.served_rows.items()}
    assert late["one"] == pytest.approx(late["flood"], rel=0.15)
    assert late["late"] == pytest.approx(late["flood"], rel=0.15)


@pytest.mark.parametrize("seed", SEEDS)
def test_flood_of_one_user_leaves_anothers_tokens_alone(seed: int) -> None:
    alone, beside = with_decoders(seed, [0.030]), with_decoders(seed, [0.030])
    for number in range(64):
        beside.decoder(f"f{number}", user="flood", round_trip_s=0.001)
    alone.run(6.0)
    beside.run(6.0)
    assert max(beside.gaps("d0", since=WARM_S)) <= 3 * max(alone.gaps("d0", since=WARM_S))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("round_trips_s", ROUND_TRIPS_S.values(), ids=ROUND_TRIPS_S)
def test_work_of_batch_priority_hardly_shows_to_the_others_and_gets_done(round_trips_s: list[float], seed: int) -> None:
    alone, beside = with_decoders(seed, round_trips_s), with_decoders(seed, round_trips_s)
    beside.flood("night", 8, 1_000, Priority.BATCH)
    alone.run(30.0)
    beside.run(30.0)
    assert beside.served_rows["night"] >= 8 * 20
    for number in range(len(round_trips_s)):
        usual, now = alone.gaps(f"d{number}", since=WARM_S), beside.gaps(f"d{number}", since=WARM_S)
        assert statistics.mean(now) <= 1.15 * statistics.mean(usual), f"d{number}, seed {seed}"
        assert max(now) <= 2 * max(usual), f"d{number}, seed {seed}"


def test_work_of_batch_priority_has_an_idle_device_to_itself() -> None:
    sim = Simulation(0)
    sim.flood("night", 8, 1_000, Priority.BATCH)
    sim.run(30.0)
    assert sim.served_rows["night"] >= 0.9 * 30.0 * 512 / (FIXED_S + ROW_S * 512)


@pytest.mark.parametrize("seed", SEEDS)
def test_wide_trees_and_decodes_survive_a_prefill_together(seed: int) -> None:
    def users(sim: Simulation) -> Simulation:
        sim.decoder("narrow", round_trip_s=0.030)
        sim.decoder("wide", round_trip_s=0.030, num_rows=40, is_tree=True)
        return sim

    alone, beside = users(Simulation(seed)), users(Simulation(seed))
    beside.at(WARM_S, lambda: beside.send("prefill", "other", PREFILL_ROWS))
    alone.run(20.0)
    beside.run(90.0)
    ((_, ended, _),) = beside.ended["prefill"]
    for name in ("narrow", "wide"):
        slowest = max(beside.gaps(name, since=WARM_S, until=ended))
        assert slowest <= 2 * max(alone.gaps(name, since=WARM_S)), f"{name}, seed {seed}"


def idler(sim: Simulation, name: str, *, num_quick: int, rest_s: float) -> None:
    """Steps a moment after one another, as many as told, then a rest; and again."""
    num_steps = 0

    def ended() -> None:
        nonlocal num_steps
        num_steps += 1
        sim.at(sim.now + (rest_s if num_steps % num_quick == 0 else 0.0005), step)

    def step() -> None:
        sim.send(name, name, 1, on_end=ended)

    sim.at(sim.random.uniform(0, rest_s), step)


@pytest.mark.parametrize("num_quick", [1, 2, 3, 6])
@pytest.mark.parametrize("num_idlers", [1, 4])
def test_users_who_hardly_decode_hardly_slow_a_prefill(num_idlers: int, num_quick: int) -> None:
    sim = Simulation(0)
    sim.flood("prefill", 1, 2_000)
    for number in range(num_idlers):
        idler(sim, f"idler{number}", num_quick=num_quick, rest_s=0.97)
    sim.run(20.0)
    # Alone it would get all of the time. Each step of an idler may cost it a small forward, and no more.
    num_steps = sum(rows for user, rows in sim.served_rows.items() if user != "prefill")
    assert num_steps >= 10 * num_idlers
    left_s = 20.0 - 3 * num_steps * (FIXED_S + ROW_S)
    assert sim.served_rows["prefill"] >= max(0.3 * 20.0, 0.9 * left_s) * 512 / (FIXED_S + ROW_S * 512)


def test_device_is_not_kept_idle_for_a_slow_step_because_of_a_fast_one() -> None:
    sim = Simulation(0)
    sim.flood("prefill", 1, 2_000)

    def pair() -> None:
        sim.send("first", "first", 1, on_end=again)
        sim.send("second", "second", 1)

    def once() -> None:
        sim.send("first", "first", 1, on_end=lambda: sim.at(sim.now + 0.001, pair))

    def again() -> None:
        sim.at(sim.now + 0.5, once)

    sim.at(0.0, once)
    sim.run(20.0)
    assert sim.served_rows["prefill"] >= 0.7 * 20.0 * 512 / (FIXED_S + ROW_S * 512)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_users", [1, 4, 8])
def test_prefill_cut_into_decodes_of_many_users_slows_a_decoder_as_one_does(num_users: int, seed: int) -> None:
    alone, beside = with_decoders(seed, [0.020]), with_decoders(seed, [0.020])
    for number in range(num_users):
        beside.at(WARM_S, lambda number=number: beside.flood(f"cut{number}", 1, 15))
    alone.run(20.0)
    beside.run(20.0)
    usual, now = (statistics.mean(sim.gaps("d0", since=WARM_S)) for sim in (alone, beside))
    # One step shares the decoder's forward, and one forward goes on while its token is under way.
    assert now <= 2.5 * usual
    assert min(beside.served_rows[f"cut{number}"] for number in range(num_users)) >= 2_000 / num_users
