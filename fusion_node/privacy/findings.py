"""What attacks found, as it is reported, and what gathers it over several prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from fusion_node.privacy.attacks import count_equal

NEAREST_EMBEDDING, MATCHING = "nearest embedding", "matching"


class Solved(msgspec.Struct, frozen=True):
    """What came of taking what was sent for equations in a state of another member.

    Attributes:
        unknowns: of the sender with most of them.
        error: relative, of the worst row of all senders and prompts.
        is_control: random numbers stood for what was sent.
        is_masked: it was one contribution under its masks.
    """

    sent: str
    state: str
    layer: int
    equations: int
    unknowns: int
    error: float
    is_control: bool = False
    is_masked: bool = False


class Read(msgspec.Struct, frozen=True):
    """How many tokens were told by one view of one layer, each among so many candidates.

    Attributes:
        is_control: the view was of other tokens, or of random numbers.
    """

    seen: str
    attack: str
    layer: int
    candidates: int
    found: int
    tried: int
    is_control: bool = False


class PromptRead(msgspec.Struct, frozen=True):
    """A prompt, and which tokens' embeddings are nearest to what the node has of the rows before layer 0."""

    prompt: str
    recovered: str
    num_tokens: int
    num_recovered: int


class Report(msgspec.Struct, frozen=True):
    """Everything of one run.

    Attributes:
        weights: of the members, or of the stages.
        member: the attacker; None: each stage of a pipeline.
        columns: that it is sent of the ``hidden`` ones of a state.
        sent_bytes: all frames that it was sent, of all prompts.
        candidates: among which matching looks, at each of ``positions`` positions.
        prior_found: positions whose token the language model alone guesses, without a view; of the candidates too.
        is_received: from the frames of real answers; the ``prompts`` are then what the own columns say.
    """

    model: str
    numerics: str
    topology: str
    weights: list[int]
    member: int | None
    columns: int
    hidden: int
    sent_bytes: int
    candidates: int
    positions: int
    prior_found: int
    solved: list[Solved]
    read: list[Read]
    prompts: list[PromptRead]
    conclusion: str
    is_received: bool = False


@dataclass(slots=True)
class Tally:
    """Gathers over prompts what one report says."""

    sent_bytes: int = 0
    num_positions: int = 0
    prior_found: int = 0
    _solved: dict[tuple[str, str, int], Solved] = field(default_factory=dict)
    _read: dict[tuple[str, str, int], Read] = field(default_factory=dict)

    @property
    def solved(self) -> list[Solved]:
        return list(self._solved.values())

    @property
    def read(self) -> list[Read]:
        return list(self._read.values())

    def note_solved(self, found: Solved) -> None:
        key = found.sent, found.state, found.layer
        before = self._solved.get(key, found)
        self._solved[key] = msgspec.structs.replace(
            before, error=max(found.error, before.error), unknowns=max(found.unknowns, before.unknowns)
        )

    def note_read(
        self,
        seen: str,
        attack: str,
        layer: int,
        candidates: int,
        found: Sequence[int],
        true: Sequence[int],
        *,
        is_control: bool = False,
    ) -> None:
        key = seen, attack, layer
        before = self._read.get(key, Read(seen, attack, layer, candidates, 0, 0, is_control))
        self._read[key] = msgspec.structs.replace(
            before, found=before.found + count_equal(found, true), tried=before.tried + len(true)
        )
