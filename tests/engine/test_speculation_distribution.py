"""Seeded answers that are speculated on are distributed exactly as the model says: against enumerated probabilities.

What is run is the production loop, drafters merged by calibration, session log, and sampler; only the model is a
table of logits by path, small enough that the probability of every answer of four tokens is known. Rows, candidates and
choices come in any order that a shell may bring them in.

False alarms: were the seeds drawn at random, a test of this file would fail with probability 1e-6 for each table that
it compares, of which there are 24. They are fixed, so it passes or fails for good; each control shows what the same
comparison rejects.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fusion_node.client.drafting import GumbelNoise, MixedDrafter, Proposals, SharedNoise, Verified
from fusion_node.client.sampling import SamplingParams, choose_token, gumbel_noise
from fusion_node.client.speculation_core import Choose, Commit, Expand, Frame, SpeculationCore, StageCost
from fusion_node.engine.session_log_core import SessionLog, StepRows
from fusion_node.types import MonotonicS
from scheduler.speculation import Calibration, Mode, ModePolicy

Tokens: TypeAlias = tuple[int, ...]

VOCABULARY = 4
NUM_TOKENS = 4
NUM_JOINT = 3
"""Tokens whose joint distribution is compared; that of all four would have too few answers in a cell."""
PROMPT = (3, 1)
NUM_ANSWERS = 600
NUM_WRONG = 400
"""Of each control; they are wrong enough for that."""
FALSE_ALARM = 1e-6
MIN_EXPECTED = 5.0
"""Answers in a cell, below which cells are counted as one (Cochran's rule)."""

PATHS: list[Tokens] = [
    path for length in range(NUM_TOKENS) for path in itertools.product(range(VOCABULARY), repeat=length)
]
ROW_OF = {path: index for index, path in enumerate(PATHS)}
LOGITS: npt.NDArray[np.float32] = np.random.Generator(np.random.Philox(key=[8, 7])).normal(
    0.0, 1.2, (len(PATHS), VOCABULARY)
).astype(np.float32)  # fmt: skip

SETTINGS = {
    "temperature": SamplingParams(temperature=1.0),
    "top_p": SamplingParams(temperature=0.8, top_p=0.8),
    "top_k": SamplingParams(temperature=1.3, top_k=3),
    "min_p": SamplingParams(temperature=1.2, min_p=0.2),
    "penalty": SamplingParams(temperature=1.0, repetition_penalty=3.0),
    "all": SamplingParams(temperature=1.2, top_p=0.95, top_k=3, min_p=0.03, repetition_penalty=1.3),
}


# what is exactly right, written from the definitions and not from the code


def exact_next(params: SamplingParams, path: Tokens) -> list[float]:
    scores = [float(score) for score in LOGITS[ROW_OF[path]]]
    for token in {*PROMPT, *path}:
        factor = params.repetition_penalty
        scores[token] = scores[token] * factor if scores[token] < 0 else scores[token] / factor
    order = sorted(range(VOCABULARY), key=lambda token: -scores[token])[: params.top_k or VOCABULARY]
    weights = {token: math.exp(scores[token] / params.temperature) for token in order}
    kept, total, before = {}, sum(weights.values()), 0.0
    for token in order:
        if before / total < params.top_p:
            kept[token] = weights[token]
        before += weights[token]
    kept = {token: weight for token, weight in kept.items() if weight >= params.min_p * kept[order[0]]}
    return [kept.get(token, 0.0) / sum(kept.values()) for token in range(VOCABULARY)]


def exact(params: SamplingParams) -> dict[Tokens, float]:
    """The probability of every answer."""
    found: dict[Tokens, float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        found = {(*path, token): p * q for path, p in found.items() for token, q in enumerate(exact_next(params, path))}
    return found


def p_value(answers: Sequence[Tokens], probabilities: dict[Tokens, float], part: slice) -> float:
    """Of Pearson's chi-square test that these parts of answers come from these probabilities."""
    cells: dict[Tokens, float] = {}
    for answer, probability in probabilities.items():
        cells[answer[part]] = cells.get(answer[part], 0.0) + probability * len(answers)
    counts = Counter(answer[part] for answer in answers)
    if any(not cells[cell] for cell in counts):
        return 0.0
    large = {cell: n for cell, n in cells.items() if n >= MIN_EXPECTED}
    pairs = [(n, float(counts[cell])) for cell, n in large.items()]
    if rest := sum(n for cell, n in cells.items() if cell not in large):
        pairs.append((rest, float(sum(n for cell, n in counts.items() if cell not in large))))
    statistic = sum((count - n) ** 2 / n for n, count in pairs)
    half = torch.tensor([(len(pairs) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


PARTS = (slice(0, 1), slice(NUM_JOINT, NUM_JOINT + 1), slice(1, 3), slice(0, NUM_JOINT))


def p_values(answers: Sequence[Tokens], params: SamplingParams) -> list[float]:
    """Of the first and the last token, of the two between, and of the first three together."""
    probabilities = exact(params)
    return [p_value(answers, probabilities, part) for part in PARTS]


# a shell in which everything comes in any order


class Stage:
    """All layers: what a row is goes by the tokens that the session's log has it see."""

    def __init__(self) -> None:
        self._log = SessionLog(64)
        self._slots: dict[int, int] = {}
        (self.prompt_row,) = self.compute(Frame(0, 1, PROMPT, (0, 1), (0, 1), 2, (2,))).values()

    def compute(self, frame: Frame) -> dict[int, int]:
        """Rows by node."""
        step = self._log.apply(
            frame.sequence, first_node=frame.first_node, num_rows=len(frame.tokens), parent=0,
            parents=frame.parents, advance=frame.advance,
        )  # fmt: skip
        assert isinstance(step, StepRows)
        if step.move is not None:
            moved = [self._slots[slot] for slot in step.move.sources]
            self._slots.update(enumerate(moved, step.move.first_slot))
        out: dict[int, int] = {}
        for index, (node, live) in enumerate(zip(step.nodes, step.live_rows, strict=True)):
            own = step.first_slot + index
            self._slots[own] = frame.tokens[live]
            seen = list(range(own + 1))
            if not step.is_chain:
                mask = step.visible[index]
                above = [step.num_committed + bit for bit in range(mask.bit_length()) if mask >> bit & 1]
                seen = [*range(step.num_committed), *above]
            path = tuple(self._slots[slot] for slot in seen)
            assert len(path) == step.positions[index] + 1
            if node in frame.want:
                out[node] = ROW_OF[path[len(PROMPT) :]]
        return out


class Skewed:
    """Draws what it proposes, low ids above all, and how sure it is of it."""

    name = "skewed"

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def begin(self, prompt: Sequence[int], noise: SharedNoise | None = None) -> None:
        pass

    def extend(self, verified: Verified) -> None:
        pass

    def propose(self, paths: Sequence[Sequence[int]], width: int) -> Proposals:
        chance = self._chance
        return [
            [(token, chance.uniform(0.05, 0.9)) for token in range(VOCABULARY) if chance.random() < 0.8 / (token + 1)]
            for _ in paths
        ]

    def close(self) -> None:
        pass


OWN_SCORES = np.array((0.0, 0.5, -0.5, 0.2))


class KnowsNoise(Skewed):
    """Adds the noise of the position to scores of its own, so that its guesses go with what will be chosen."""

    name = "knows-noise"

    def begin(self, prompt: Sequence[int], noise: SharedNoise | None = None) -> None:
        self._noise, self._position = noise, len(prompt)

    def extend(self, verified: Verified) -> None:
        self._position += len(verified.tokens)

    def propose(self, paths: Sequence[Sequence[int]], width: int) -> Proposals:
        assert self._noise is not None
        found: Proposals = []
        for path in paths:
            scores = self._noise.at(self._position + len(path)) + OWN_SCORES
            best = [int(token) for token in np.argsort(-scores)[: self._chance.randrange(4)]]
            found.append([(token, 0.6 / rank) for rank, token in enumerate(best, start=1)])
        return found


class Run:
    """One answer."""

    def __init__(
        self,
        seed: int,
        params: SamplingParams,
        calibration: Calibration,
        choice: Choice,
        drafters: tuple[type[Skewed], ...] = (Skewed, KnowsNoise),
    ) -> None:
        chance = self._chance = random.Random(seed)
        self.seed, self.params, self._choice = seed, params, choice
        self.ids = list(PROMPT)
        num_positions = len(PROMPT) + NUM_TOKENS
        modes = chance.choice(((Mode.TREE,), (Mode.TREE,), (Mode.CHAIN,), tuple(Mode)))
        self.core = SpeculationCore(
            last_token=PROMPT[-1], num_prompt=len(PROMPT), stop_position=num_positions, stop_tokens=frozenset(),
            max_positions=num_positions + 50, next_sequence=1, policy=ModePolicy(modes),
        )  # fmt: skip
        self.drafter = MixedDrafter([make(chance) for make in drafters], calibration, vocabulary=VOCABULARY)
        self.drafter.begin(PROMPT, GumbelNoise(seed=seed, temperature=params.temperature, vocabulary=VOCABULARY))
        self._stage = Stage()
        self._now = 0.0
        self._results: deque[tuple[int, dict[int, int]]] = deque([(0, {2: self._stage.prompt_row})])
        self._doing: list[Callable[[], None]] = []
        """Drafting and choosing, which are at most two things."""

    @property
    def at(self) -> MonotonicS:
        return MonotonicS(self._now)

    def tokens(self) -> Tokens:
        core, chance = self.core, self._chance
        core.start(now=self.at)
        while True:
            while (event := core.next_event()) is not None:
                self._follow(event)
            if core.is_over:
                return tuple(self.ids[len(PROMPT) :])
            self._now += 0.02 * chance.random()
            options = [*self._doing]
            if self._results:
                options.append(self._return)
            if core.get_timer() is not None:
                options.append(self._ring)
            do = chance.choice(options)
            if do in self._doing:
                self._doing.remove(do)
            do()

    def _follow(self, event: object) -> None:
        match event:
            case Frame():
                self._results.append((event.sequence, self._stage.compute(event)))
            case Expand(number, _, paths, width):
                found = self.drafter.propose(paths, width)
                self._doing.append(lambda: self.core.drafted(number, found, now=self.at))
            case Choose():
                self._doing.append(lambda: self._choose(event))
            case Commit(token):
                self.ids.append(token)
                self.drafter.extend(Verified([token]))

    def _ring(self) -> None:
        self._now = max(self._now, self.core.get_timer() or 0.0)
        self.core.handle_timer(now=self.at)

    def _return(self) -> None:
        sequence, rows = self._results.popleft()
        self.core.returned(sequence, list(rows.items()), costs=[StageCost(0.01, 0.0001)], now=self.at)

    def _choose(self, event: Choose) -> None:
        logits_V = LOGITS[event.row]
        token = choose_token(logits_V, self.params, seed=self.seed, position=event.position, seen=self.ids)
        self.core.chosen(event.position, self._choice(self, event.position, token), now=self.at)

    # what only a sampler that does it wrong would ask

    @property
    def logits_V(self) -> npt.NDArray[np.float32]:
        """From which the next token is chosen."""
        return LOGITS[ROW_OF[tuple(self.ids[len(PROMPT) :])]]

    @property
    def drafted(self) -> list[int]:
        """Tokens that stand in the tree for what is chosen now, the most probable first."""
        return [token for token, _ in self.core._tree.root.candidates]


Choice: TypeAlias = Callable[[Run, int, int], int]


def as_chosen(run: Run, position: int, token: int) -> int:
    return token


def answers(params: SamplingParams) -> list[Tokens]:
    calibration = Calibration()
    return [Run(seed, params, calibration, as_chosen).tokens() for seed in range(NUM_ANSWERS)]


def wrong_answers(params: SamplingParams, choice: Choice, num: int = NUM_WRONG) -> list[Tokens]:
    """With a drafter that knows nothing: one that knows the noise hides what depends on guesses being wrong."""
    calibration = Calibration()
    return [Run(seed, params, calibration, choice, (Skewed,)).tokens() for seed in range(num)]


def plain(seed: int, params: SamplingParams) -> Tokens:
    """Plain decode of the same seed."""
    ids = list(PROMPT)
    for position in range(len(PROMPT), len(PROMPT) + NUM_TOKENS):
        logits_V = LOGITS[ROW_OF[tuple(ids[len(PROMPT) :])]]
        ids.append(choose_token(logits_V, params, seed=seed, position=position, seen=ids))
    return tuple(ids[len(PROMPT) :])


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_are_those_of_plain_decode_and_distributed_as_the_model_says(name: str) -> None:
    params = SETTINGS[name]
    found = answers(params)
    assert found == [plain(seed, params) for seed in range(NUM_ANSWERS)]
    assert min(p_values(found, params)) > FALSE_ALARM


# controls: the same comparison rejects what is done wrong


def eager(run: Run, position: int, token: int) -> int:
    """Takes what was drafted where the model finds it good enough."""
    probabilities = exact_next(run.params, tuple(run.ids[len(PROMPT) :]))
    return next((guess for guess in run.drafted[:1] if probabilities[guess] > 0.05), token)


def near_enough(run: Run, position: int, token: int) -> int:
    """Takes what was drafted where its score, noise and all, is nearly the best."""
    scores = run.logits_V + gumbel_noise(run.seed, position, VOCABULARY)
    return max(
        (guess for guess in run.drafted if scores[guess] > scores.max() - 2.5), key=run.drafted.index, default=token
    )


def same_noise(run: Run, position: int, token: int) -> int:
    """Of one position for all of them: every token alone is right, and what goes together is not."""
    return choose_token(run.logits_V, run.params, seed=run.seed, position=0, seen=run.ids)


def noise_of_the_one_before(run: Run, position: int, token: int) -> int:
    """Of two positions in turn."""
    return choose_token(run.logits_V, run.params, seed=run.seed, position=position // 2, seen=run.ids)


def penalises_guesses(run: Run, position: int, token: int) -> int:
    """Counts what is only drafted as seen."""
    return choose_token(run.logits_V, run.params, seed=run.seed, position=position, seen=[*run.ids, *run.drafted])


def without_filter(run: Run, position: int, token: int) -> int:
    """Looks for the token in the tree before the filters have their say."""
    scores = run.logits_V / run.params.temperature + gumbel_noise(run.seed, position, VOCABULARY)
    best = int(scores.argmax())
    return best if best in run.drafted else token


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        (eager, "temperature"),
        (near_enough, "temperature"),
        (same_noise, "temperature"),
        (noise_of_the_one_before, "temperature"),
        (penalises_guesses, "penalty"),
        (without_filter, "top_p"),
        (without_filter, "min_p"),
    ],
)
def test_what_is_chosen_wrongly_is_found(choice: Choice, name: str) -> None:
    assert min(p_values(wrong_answers(SETTINGS[name], choice), SETTINGS[name])) < FALSE_ALARM / 1e3


def test_noise_that_is_used_again_shows_only_in_tokens_together() -> None:
    params = SETTINGS["temperature"]
    first, _, _, joint = p_values(wrong_answers(params, same_noise), params)
    assert first > FALSE_ALARM > joint


def test_noise_by_node_in_the_place_of_position_is_found_by_the_text_that_depends_on_the_drafter() -> None:
    """Its distribution may be right, as every node has noise of its own; but one seed has many texts then."""
    params = SETTINGS["temperature"]

    def by_node(run: Run, position: int, token: int) -> int:
        node_id = run.core._tree.root.id
        return choose_token(run.logits_V, params, seed=run.seed, position=node_id, seen=run.ids)

    found = wrong_answers(params, by_node, 100)
    assert found != [plain(seed, params) for seed in range(100)]


def test_drafted_tokens_are_taken_and_left() -> None:
    """So that what is proved above is proved of answers in which both happen."""
    calibration, num_corrections = Calibration(), 0
    for seed in range(200):
        run = Run(seed, SETTINGS["temperature"], calibration, as_chosen)
        run.tokens()
        num_corrections += run.core.stats.num_corrections
    assert 0.3 < num_corrections / (200 * NUM_TOKENS) < 0.9
