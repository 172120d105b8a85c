"""Stages that lie to a user who speculates: about what rows cost, and about whose rows they are."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import msgspec
import pytest

from fusion_node.client.answer_core import RepairKind
from fusion_node.client.speculation_core import MAX_IN_FLIGHT, MAX_PRICE_S
from fusion_node.types import PeerId
from p2p.messages import AnyMessage, StageTiming, Step, StepResult
from scheduler.speculation import Mode
from tests.core.answer_world import NUM_LAYERS, Rows, undisturbed
from tests.core.speculation_world import Guesser, SpeculativeUser, SpeculativeWorld
from tests.core.test_speculative_answer import PROMPT, Knows

NUM_TOKENS = 40
TEXT = undisturbed(PROMPT, NUM_TOKENS)
MOST_US = 2**32 - 1

Lie = Callable[[AnyMessage, Rows], tuple[AnyMessage, Rows]]


def answered(
    lie: Lie | None = None, *, stage: int = 2, after: int = 5, mode: Mode = Mode.TREE, is_sure: bool = True
) -> tuple[SpeculativeUser, float]:
    """An answer over three stages, with another node for each; and the seconds it took."""
    world = SpeculativeWorld(3)
    for index in (*range(3), *range(3)):
        world.node(NUM_LAYERS * index // 3, NUM_LAYERS * (index + 1) // 3, row_s=0.0002)
    liar: PeerId | None = None
    text = (*PROMPT, *TEXT)
    drafter = Knows(text) if is_sure else Guesser(text, 0.7, random.Random(1))
    user = world.speculate(PROMPT, NUM_TOKENS, drafter, modes=(mode,))
    send = world.send

    def lying(sender: PeerId, receiver: PeerId, message: AnyMessage, rows: Rows = ()) -> bool:
        nonlocal liar
        if lie is not None and not liar and user.core.places and len(user.tokens) >= after:
            liar = user.core.places[stage].peer
        if lie is not None and sender == liar:
            message, rows = lie(message, rows)
        return send(sender, receiver, message, rows)

    world.send = lying
    began = world.now
    world.run(stop=lambda: user.is_done)
    assert user.error is None
    assert user.tokens == TEXT
    return user, world.now - began


def says_price(price_us: int) -> Lie:
    def lie(message: AnyMessage, rows: Rows) -> tuple[AnyMessage, Rows]:
        if isinstance(message, Step | StepResult) and message.timings:
            *others, own = message.timings
            timings = (*others, msgspec.structs.replace(own, price_us=price_us))
            return msgspec.structs.replace(message, timings=timings), rows
        return message, rows

    return lie


@pytest.mark.parametrize("stage", [0, 2])
def test_a_stage_that_says_that_rows_cost_nothing_gets_no_more_than_may_be_in_flight(stage: int) -> None:
    user, _ = answered(says_price(0), stage=stage, is_sure=False)
    assert not user.repairs
    assert max(sample.in_flight for sample in user.speculation.recorder.timeline().samples) <= MAX_IN_FLIGHT


def test_a_stage_that_says_that_rows_cost_more_than_anything_makes_nobody_slower_than_plain_decode() -> None:
    _, plain_s = answered(mode=Mode.PLAIN)
    user, lied_to_s = answered(says_price(MOST_US), after=0)
    assert lied_to_s < 1.05 * plain_s
    assert 0.5 * MAX_PRICE_S < user.speculation.stats.price_s < 1.1 * MAX_PRICE_S
    assert not user.repairs


def test_a_price_is_a_number_of_microseconds_on_the_wire() -> None:
    for price in (math.nan, math.inf, -1, MOST_US + 1, 0.5, None):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode([1, 2, price]), type=StageTiming)


def of_others(message: AnyMessage, rows: Rows) -> tuple[AnyMessage, Rows]:
    """Of nodes that it was never sent."""
    if isinstance(message, StepResult) and message.nodes:
        return msgspec.structs.replace(message, nodes=tuple(node + 10_000 for node in message.nodes)), rows
    return message, rows


def swapped(message: AnyMessage, rows: Rows) -> tuple[AnyMessage, Rows]:
    """Out of order."""
    if isinstance(message, StepResult) and len(message.nodes) > 1:
        return msgspec.structs.replace(message, nodes=message.nodes[::-1]), rows
    return message, rows


def with_one_more(message: AnyMessage, rows: Rows) -> tuple[AnyMessage, Rows]:
    """Of a node that nobody wants a row of."""
    if isinstance(message, StepResult) and message.nodes:
        tensor = replace_rows(message, len(rows) + 1)
        nodes = (*message.nodes, message.nodes[-1] + 10_000)
        return msgspec.structs.replace(message, nodes=nodes, tensor=tensor), (*rows, rows[-1])
    return message, rows


def with_one_less(message: AnyMessage, rows: Rows) -> tuple[AnyMessage, Rows]:
    """Without the first row that it owes."""
    if isinstance(message, StepResult) and len(message.nodes) > 1:
        tensor = replace_rows(message, len(rows) - 1)
        return msgspec.structs.replace(message, nodes=message.nodes[1:], tensor=tensor), rows[1:]
    return message, rows


def replace_rows(message: StepResult, num_rows: int) -> object:
    return msgspec.structs.replace(message.tensor, num_rows=num_rows)


@pytest.mark.parametrize("lie", [of_others, swapped, with_one_more, with_one_less])
def test_a_stage_that_answers_for_other_nodes_than_it_was_sent_is_replaced(lie: Lie) -> None:
    user, _ = answered(lie, is_sure=False)
    (repair,) = user.repairs
    assert (repair.kind, repair.stage, repair.cause) == (RepairKind.PATCHED, 2, "garbage")
    assert repair.peer not in {place.peer for place in user.core.places}
