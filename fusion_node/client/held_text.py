"""The text as drafters are told of it where they read rows of layers (*taps*), which may come later than tokens do.

A token that is chosen before its taps are there is held back, and stands before the paths that drafters are asked for:
to them it is one more token that they guess beyond. When its taps come it is told with them. A later token whose taps
are there lets go of those before it, whose are then lost, since what a stage sends comes in order; and so does a number
of tokens that no drafter can guess beyond.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fusion_node.client.drafting import Candidate
from fusion_node.client.taps_core import NodeTaps
from fusion_node.engine.drafts import Verified

MAX_HELD = 6
"""Tokens that are held back. A head's guesses so far beyond what it knows are right once in three times at best."""


class Drafting(Protocol):
    """Drafts, on a thread of its own; what it is told is done in order."""

    def extend(self, verified: Verified) -> None:
        """The text has grown."""
        ...

    def propose(self, paths: Sequence[Sequence[int]], width: int) -> Awaitable[list[list[Candidate]] | None]:
        """Candidates for the text as it is at the call; None when there will never be any more."""
        ...


class HeldText:
    """Drafting that holds tokens back until their taps are there.

    Args:
        decode: a row of a message as numbers ``[D]``; None where it is none.

    Attributes:
        num_with_taps, num_without: tokens that were told with and without, where taps could be had.
    """

    def __init__(
        self, drafting: Drafting, decode: Callable[[Any, int], npt.NDArray[np.float32] | None] | None = None
    ) -> None:
        self._drafting = drafting
        self._decode = decode
        self._held: deque[tuple[Verified, NodeTaps | None]] = deque()
        self.num_with_taps = self.num_without = 0

    def extend(self, verified: Verified, taps: NodeTaps | None = None, *, are_sent: bool = False) -> None:
        """The text has grown by one token.

        Args:
            taps: of the row that it was chosen from; None: they were not asked for.
            are_sent: taps can be had in this session.
        """
        self._held.append((verified, taps))
        self._tell(len(self._held) if not are_sent or len(self._held) > MAX_HELD else self._num_ready())

    def propose(self, paths: Sequence[Sequence[int]], width: int) -> Awaitable[list[list[Candidate]] | None]:
        """See Drafting."""
        self._tell(self._num_ready())
        held = [token for verified, _ in self._held for token in verified.tokens]
        return self._drafting.propose([(*held, *path) for path in paths] if held else paths, width)

    def finish(self) -> None:
        """The answer is over: what is held back is told."""
        self._tell(len(self._held))

    def _num_ready(self) -> int:
        """Tokens up to the last whose taps are there."""
        ready = [index for index, (_, taps) in enumerate(self._held, 1) if taps is not None and taps.is_complete]
        return ready[-1] if ready else 0

    def _tell(self, num: int) -> None:
        for _ in range(num):
            verified, taps = self._held.popleft()
            found = None if taps is None else self._decoded(taps)
            if taps is not None and found is not None:
                verified = replace(verified, taps_TLD=found[None], tap_layers=taps.layers)
            self.num_with_taps += found is not None
            self.num_without += found is None
            self._drafting.extend(verified)

    def _decoded(self, taps: NodeTaps) -> npt.NDArray[np.float32] | None:
        if not taps.is_complete or self._decode is None:
            return None
        rows = []
        for layer in taps.layers:
            row_D = self._decode(*taps.rows[layer])
            if row_D is None:
                return None
            rows.append(row_D)
        return np.stack(rows)
