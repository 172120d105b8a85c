"""Rows of layers while nodes fail: whatever comes is of the position that it is told for, and blames nobody."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from fusion_node.client.answer_core import PeerFailed
from fusion_node.client.speculation_core import StageCost
from fusion_node.client.taps_core import NodeTaps
from fusion_node.daemon.serving_core import ServedStep
from fusion_node.types import LayerRange, PeerId
from p2p.messages import AnyMessage, StageTiming, StepTaps
from scheduler.speculation import Mode
from tests.core import answer_world
from tests.core.answer_world import NUM_LAYERS, USER, Rows, embed, undisturbed
from tests.core.speculation_world import Guesser, Node, SpeculativeUser, SpeculativeWorld

PROMPT = (5, 6, 7, 8)
NUM_TOKENS = 60
LAYERS = (1, 4, 6)


class TappedNode(Node):
    """Sends what its layers have made of the rows that are asked for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        step_computed = self.serving.step_computed

        def with_taps(step: ServedStep, payload: Rows, timing: StageTiming, *, now: Any) -> None:
            layers, rows = ((), ()) if step.tap is None else step.tap
            kv, first = self.trees[step.session].state, step.rows.first_slot
            taps = [(layer, tuple(kv[layer - 1][first + row] for row in rows)) for layer in layers]
            step_computed(step, payload, timing, now=now, taps=taps)

        self.serving.step_computed = with_taps  # type: ignore[method-assign, assignment]


class TappedWorld(SpeculativeWorld):
    """What nobody waits for comes late, or not at all."""

    lost_taps: float = 0.0

    def node(self, start: int, stop: int, **changes: Any) -> Node:
        peer = answer_world._IDS[len(self.nodes)]
        self.nodes[peer] = TappedNode(peer, LayerRange(start, stop), self, **changes)
        return self.nodes[peer]  # type: ignore[return-value]

    def _carry(self, sender: PeerId, receiver: PeerId, message: AnyMessage, rows: Rows = ()) -> bool:
        if not isinstance(message, StepTaps):
            return super()._carry(sender, receiver, message, rows)
        assert receiver == USER
        if self.rng.random() >= self.lost_taps:
            carry = super()._carry
            self.after(self.rng.uniform(0.0, 0.06), lambda: carry(sender, receiver, message, rows))
        return True


class TappingUser(SpeculativeUser):
    """Notes for what position it chose a token from a row, and the taps of that."""

    taps = LAYERS

    def __init__(self, world: TappedWorld, drafter: Guesser, modes: Sequence[Mode]) -> None:
        super().__init__(world, PROMPT, NUM_TOKENS, None, drafter, modes, 400)
        self.told: list[tuple[int, NodeTaps | None]] = []

    def receive(self, peer: PeerId, message: AnyMessage, rows: Rows) -> None:
        if isinstance(message, StepTaps):
            self.core.receive_taps(message, rows, source=peer, now=self.world.now)
            self.pump()
        else:
            super().receive(peer, message, rows)

    def _returned(self, sequence: int, rows: list[tuple[int, Any]], timings: Sequence[StageTiming]) -> None:
        sender = self.core.places[-1].peer
        costs = [StageCost(t.compute_us / 1e6, t.price_us / 1e6) for t in timings]
        tagged = [(node, (row, sender, self.core.taps_of(node))) for node, row in rows]
        self.speculation.returned(sequence, tagged, costs=costs, now=self.world.now)

    def _chosen(self, position: int, tagged: tuple[Any, ...]) -> None:
        row, sender, taps = tagged
        self.told.append((position, taps))
        super()._chosen(position, (row, sender))


def rows_of_layers(ids: Sequence[int]) -> dict[int, list[int]]:
    """By layer what one machine has after it, per position."""
    layers = answer_world.Layers(LayerRange(0, NUM_LAYERS))
    layers.forward(0, embed(ids))
    return {layer: layers.state[layer - 1] for layer in LAYERS}


def strike(world: TappedWorld, user: SpeculativeUser) -> None:
    stage = world.rng.randrange(len(user.core.places))
    node = world.nodes[user.core.places[stage].peer]
    match world.rng.choice(("kill", "freeze", "cut", "drain")):
        case "kill" if node.is_up:
            world.kill(node)
        case "freeze":
            world.freeze(node)
            world.after(world.rng.uniform(0.1, 8.0), lambda: world.thaw(node) if node.is_up else None)
        case "cut" if stage:
            world.cut(user.core.places[stage - 1].peer, node.peer, for_good=False)
        case "drain":
            node.do(lambda: node.serving.drain(now=world.now, grace_s=20.0, reason="it leaves"))
        case _:
            pass


@pytest.mark.parametrize("modes", [(Mode.TREE,), (Mode.CHAIN,), tuple(Mode)])
@pytest.mark.parametrize("seed", range(6))
def test_taps_are_those_of_their_positions_whatever_fails(seed: int, modes: tuple[Mode, ...]) -> None:
    world = TappedWorld(seed)
    world.lost_taps = (0.0, 0.2)[seed % 2]
    num_stages = (1, 2, 3)[seed % 3]
    cuts = [NUM_LAYERS * index // num_stages for index in range(num_stages + 1)]
    for _ in range(5):
        for start, stop in itertools.pairwise(cuts):
            world.node(start, stop, retained_bytes=1 << 30 if seed % 4 else 0)
    text = undisturbed(PROMPT, NUM_TOKENS)
    user = world.user = TappingUser(world, Guesser((*PROMPT, *text), 0.8, random.Random(seed)), modes)
    at = {6 + seed % 12, 25, 40} if seed else set()

    def on_token(count: int) -> None:
        if count in at:
            at.discard(count)
            world.after(world.rng.uniform(0.0, 0.05), lambda: strike(world, user))

    user.on_token = on_token
    user.start()
    world.run(stop=lambda: user.is_done)
    assert user.error is None
    assert user.tokens == text
    expected = rows_of_layers([*PROMPT, *text])
    num_whole = 0
    for position, taps in user.told:
        if taps is not None:
            num_whole += taps.is_complete
            for layer, (rows, index) in taps.rows.items():
                assert rows[index] == expected[layer][position - 1]
    assert num_whole > NUM_TOKENS / 4
    blamed = [str(event.error) for event in user.events if isinstance(event, PeerFailed)]
    assert not any("rows of a layer" in reason or "rows of layers" in reason for reason in blamed)
