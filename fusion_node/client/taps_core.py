"""Rows of layers that stages send beside the results (*taps*), matched with the nodes that they were asked for.

Guarantees: a row is taken only from the stage whose layer it is, once, for a node of that very step whose row of that
layer was asked for; what is held is bounded by MAX_AWAITED nodes. What a stage alone can have made wrong is told; all
else that does not fit is ignored, because stages before it may have made it so, and nothing but guesses depends on it.

Assumes: one caller; the form of messages was checked (p2p.messages). Payloads are opaque.

States of a node: asked for, complete, forgotten. No timers: nobody waits for taps. Source: docs/protocol-data-plane.md,
"Taps".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from p2p.messages import StepTaps, TensorMeta
from p2p.records import Plan

MAX_AWAITED = 128
"""Nodes of which rows are awaited or held, the latest; a round trip has some dozens under way that are probable enough
to be asked for. Three layers of a hidden size of 8,192 are 6 MiB of them in fp16."""


class NodeTaps:
    """What has come of the layers of one node.

    Attributes:
        rows: by layer, the message's rows and the index of the node's among them.
    """

    __slots__ = ("layers", "rows", "sequence")

    def __init__(self, sequence: int, layers: tuple[int, ...]) -> None:
        self.sequence = sequence
        self.layers = layers
        self.rows: dict[int, tuple[Any, int]] = {}

    @property
    def is_complete(self) -> bool:
        """All of them are there."""
        return len(self.rows) == len(self.layers)


class SessionTaps:
    """The taps of one session.

    Args:
        layers: that are wanted, in ascending order; none: nothing is ever asked for.
        tensor: form of one row.
    """

    def __init__(self, layers: Sequence[int], tensor: TensorMeta) -> None:
        self._layers = tuple(layers)
        self._tensor = tensor
        self._of_stage: list[tuple[int, ...]] = []
        self._granted: set[int] = set()
        self._awaited: dict[int, NodeTaps] = {}

    def begin(self, plan: Plan) -> None:
        """Another plan is in force: of what was under way nothing counts any more."""
        self._of_stage = [
            tuple(layer for layer in self._layers if stage.start < layer <= stage.stop) for stage in plan.stages
        ]
        self._granted.clear()
        self._awaited.clear()

    def of_stage(self, stage: int) -> tuple[int, ...]:
        """What this stage is to be asked for when it opens the session."""
        return self._of_stage[stage]

    def opened(self, stage: int, layers: Sequence[int]) -> bool:
        """A stage has opened the session and says what it will send. False: that is more than it was asked for."""
        if not set(layers) <= set(self._of_stage[stage]):
            return False
        self._granted.update(layers)
        return True

    @property
    def are_sent(self) -> bool:
        """There are layers that are wanted, and stages will send those of all."""
        return bool(self._layers) and len(self._granted) == len(self._layers)

    def ask(self, sequence: int, first_node: int, num_nodes: int, nodes: Sequence[int]) -> bytes:
        """These nodes of a step are to be tapped: what the step says for it."""
        if not nodes or not self.are_sent:
            return b""
        for node in nodes:
            self._awaited[node] = NodeTaps(sequence, self._layers)
        while len(self._awaited) > MAX_AWAITED:
            del self._awaited[next(iter(self._awaited))]
        return sum(1 << (node - first_node) for node in nodes).to_bytes(-(-num_nodes // 8), "little")

    def of(self, node: int) -> NodeTaps | None:
        """What has come and will come of a node; None: it was not asked for, or long ago."""
        return self._awaited.get(node)

    def receive(self, message: StepTaps, rows: Any, stage: int) -> str | None:
        """Takes a message of the plan in force. What is wrong with it, if that is its sender's fault.

        Args:
            rows: what it brings.
        """
        if message.layer not in self._of_stage[stage]:
            return "sent rows of a layer that it was not asked for"
        expected = TensorMeta(self._tensor.dtype, len(message.nodes), self._tensor.row_size)
        if message.tensor.uncompressed != expected:
            return "sent rows of a layer in another form than the session's"
        awaited = [self._awaited.get(node) for node in message.nodes]
        if all(
            taps is not None and taps.sequence == message.sequence and message.layer not in taps.rows
            for taps in awaited
        ):
            # All or none: a payload is held whole for any of its rows.
            for index, taps in enumerate(awaited):
                if taps is not None:
                    taps.rows[message.layer] = (rows, index)
        return None
