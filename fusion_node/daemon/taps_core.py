"""Which rows of which layers a stage sends its user beside the results: its *taps*.

Guarantees: rows are tapped only of layers of the session's own range, which its user has named when it was opened, and
of live nodes that the user asks for; they go to the user and to nobody else. What one step can ask for is bounded by
MAX_TAPS and MAX_TAPPED_NODES, and nothing is sent while MAX_TAP_BACKLOG_BYTES wait for that user.

Assumes: p2p.messages has checked the form of both wishes.

No states, no timers. Source: docs/protocol-data-plane.md, "Taps".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fusion_node.engine.session_log_core import StepRows
from fusion_node.types import LayerRange
from p2p.messages import Step

MAX_TAP_BACKLOG_BYTES = 1024 * 1024
"""That may wait for a user before its taps are left out: they are of use for as long as the tree that they are of. Of
the built-in model that is more than 400 rows, of one with a hidden size of 8,192 in fp16 64."""


class Tap(NamedTuple):
    """What of a step is tapped.

    Attributes:
        layers: n is the row after n layers of the model.
        rows: indices into its live rows, ascending.
    """

    layers: tuple[int, ...]
    rows: tuple[int, ...]


def problem_with_taps(taps: Sequence[int], layers: LayerRange) -> str | None:
    """Why a stage of these layers cannot send the rows of those; None: it can."""
    if all(layers.start < layer <= layers.stop for layer in taps):
        return None
    return f"layers {layers} have the rows after {layers.start + 1} to {layers.stop} layers, and others were asked for"


def tap_of(taps: tuple[int, ...], message: Step, rows: StepRows) -> Tap | None:
    """What is tapped of a step; None: nothing.

    Args:
        taps: of the session.
        rows: what is computed of the step.
    """
    if not taps or not message.tap:
        return None
    bits = int.from_bytes(message.tap, "little")
    wanted = tuple(row for row, node in enumerate(rows.nodes) if bits >> (node - message.first_node) & 1)
    return Tap(taps, wanted) if wanted else None
