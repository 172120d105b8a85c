"""The engine's benchmark measures what it says, on a tiny model: its figures are there, and none of them is judged."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks.engine import breakdown, latency, speed, wide
from benchmarks.engine.node import Node
from benchmarks.engine.rig import Rig, interleaved, median_ratio
from benchmarks.report import Check
from tests.engine.tiny import tiny_model

CPU = torch.device("cpu")
TEXT = [(7 * position) % 120 + 3 for position in range(1_800)]


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig.load(tiny_model("llama", max_position_embeddings=2048), device=CPU, num_positions=8192)


class Partner:
    """In the place of transformers: the engine itself, so that the answers are equal."""

    def __init__(self, rig: Rig) -> None:
        self.greedy = rig.greedy
        self._rig = rig

    def prefill(self, ids: list[int]) -> int:
        return self._rig.greedy(ids, 1)[0][0]


def ids_of(result: tuple[list[Check], dict[str, Any]]) -> list[str]:
    checks, data = result
    assert all(math.isfinite(check.value) and check.value > 0 for check in checks)
    assert data
    return [check.id for check in checks]


def test_decoding_with_the_rig_equals_the_whole_model(rig: Rig) -> None:
    whole = tiny_model("llama", max_position_embeddings=2048).whole
    tokens, times = rig.greedy(TEXT[:20], 6)
    expected = list(TEXT[:20])
    for _ in range(6):
        expected.append(int(whole(torch.tensor([expected])).logits[0, -1].argmax()))
    assert tokens == expected[20:]
    assert times == sorted(times)


def test_sequences_that_decode_together_get_the_tokens_that_they_get_alone(rig: Rig) -> None:
    prompts = [TEXT[first : first + 20 + first] for first in range(4)]
    alone = [rig.greedy(prompt, 4)[0] for prompt in prompts]
    begun = [rig.begin(prompt, 64) for prompt in prompts]
    sessions, answers = [session for session, _ in begun], [[token for _, token in begun]]
    for _ in range(3):
        answers.append(rig.decode(sessions, answers[-1]))
    for session in sessions:
        rig.close(session)
    assert [list(answer) for answer in zip(*answers, strict=True)] == alone


def test_prompt_in_chunks_of_the_node_gives_the_rows_of_one_forward(rig: Rig) -> None:
    node, rows_TD = Node(rig), rig.boundary.embed(TEXT[:1100])
    session, other = rig.open(1100), rig.open(1100)
    in_chunks = node.answer(session, "user", session.step(1100), rows_TD)
    at_once = rig.forward([(other, other.step(1100), rows_TD)])[0]
    assert len(node.forwards) == 3
    torch.testing.assert_close(in_chunks, at_once)
    rig.close(session)
    rig.close(other)


def test_every_measurement_gives_its_checks(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "ROUND_TRIP_S", 0.001)
    partner: Any = Partner(rig)
    assert ids_of(speed.decode(rig, partner, [TEXT[:9], TEXT[:12]], rounds=2, num_tokens=4)) == [
        "decode",
        "decode-equal",
    ]
    assert ids_of(speed.together(rig, TEXT, rounds=2)) == ["decode-16"]
    assert ids_of(speed.steps(rig, TEXT, rounds=2, curve_rounds=1, curve=(1, 4))) == ["step-16", "tree-32"]
    assert ids_of(speed.prefill(rig, partner, TEXT, rounds=1, num_tokens=600)) == ["prefill-600"]
    assert ids_of(latency.measure(rig, TEXT, pairs=1, num_prefill=600, alone_s=0.2)) == ["latency", "latency-prefill"]


def test_layers_of_random_weights_are_measured_against_the_copy_of_memory() -> None:
    tiny = {**wide.LLAMA_7B, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
            "num_key_value_heads": 4, "vocab_size": 32}  # fmt: skip
    result = wide.measure(device=CPU, rounds=1, config=tiny, num_layers=2, context=32, copy_bytes=2**16)
    assert ids_of(result) == ["wide-decode", "wide-step-16"]


def test_breakdown_accounts_for_the_time_of_a_token(rig: Rig) -> None:
    found = breakdown.operators(rig, TEXT[:16], num_tokens=3)
    assert set(found["share"]) == {"linears", "attention", "other operators", "outside of operators"}
    assert found["share"]["linears"] > 0
    assert found["share"]["attention"] > 0


def test_interleaved_calls_all_in_each_round_and_leaves_the_first_out() -> None:
    calls: list[str] = []
    seconds = interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3)
    assert sorted(calls[:2]) == ["a", "b"]
    assert calls[2:] in (list("abbaab"), list("baabba"))
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}


def test_median_ratio_is_taken_within_rounds() -> None:
    assert median_ratio([2.0, 20.0, 300.0], [1.0, 10.0, 100.0]) == 2.0
