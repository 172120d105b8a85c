"""What `generate` tells of an answer."""

from __future__ import annotations

import json

from fusion_node.cli.talk import describe, summary
from fusion_node.client.generation import GenerationStats, RepairReport, StageReport
from fusion_node.types import LayerRange, PeerId

STATS = GenerationStats(
    completion_tokens=3,
    time_to_first_token_s=0.5,
    decode_s=1.0,
    stages=(StageReport(PeerId("12D3KooWabcdefgh"), LayerRange(0, 4), "cpu", 0.01, 7, 0.07, 0.0),),
    repairs=(RepairReport("patched", 0, PeerId("12D3KooWstuvwxyz"), "silent", 1.25, 40, 5760),),
)


def test_statistics_name_each_repair_on_a_line_of_its_own() -> None:
    first, second = summary(STATS).split("\n")
    assert first == "3 tokens, 2.0 tokens/s, first token after 0.50 s, over …abcdefgh [0:4]"
    assert second == ("patched: stage 1 …stuvwxyz (silent), stood still for 1.25 s, 40 positions computed again")


def test_machines_are_told_all_of_a_repair() -> None:
    (repair,) = json.loads(json.dumps(describe(STATS)))["repairs"]
    assert repair == {
        "kind": "patched",
        "stage": 0,
        "peer": "12D3KooWstuvwxyz",
        "cause": "silent",
        "stall_s": 1.25,
        "replayed_positions": 40,
        "replayed_bytes": 5760,
    }
    assert STATS.replayed_positions == 40
