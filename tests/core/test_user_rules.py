"""The user's rules: what may be written, and whom it means."""

from __future__ import annotations

import pytest

from fusion_node.client.user_rules import UserRules, objective_of
from fusion_node.errors import ConfigError
from fusion_node.types import LayerRange, PeerId
from p2p.identity import Identity
from scheduler.plans import Objective
from scheduler.topology import Candidate, Speed

ANNA, BERT, CLEO = (Identity.from_seed(bytes([number]) * 32).peer_id for number in range(3))


def candidate(peer: PeerId, *, operator: str = "", region: str = "", price: float = 0.0) -> Candidate:
    return Candidate(peer, LayerRange(0, 1), Speed(1e-3, 1e-3, 1e-3), 64, operator=operator, region=region, price=price)


def allowed(rules: UserRules, *among: Candidate) -> list[PeerId]:
    resolved = rules.resolve([each.peer for each in among])
    return [each.peer for each in among if resolved.rejects(each) is None]


@pytest.mark.parametrize("part", [ANNA, ANNA[-8:], "…" + ANNA[-8:], ANNA[:14]])
def test_peer_is_named_by_its_id_its_end_or_its_beginning(part: str) -> None:
    assert allowed(UserRules(allow=(part,)), candidate(ANNA), candidate(BERT)) == [ANNA]
    assert allowed(UserRules(deny=(part,)), candidate(ANNA), candidate(BERT)) == [BERT]


def test_allowing_a_peer_that_is_not_there_allows_nobody() -> None:
    assert allowed(UserRules(allow=(CLEO[-8:],)), candidate(ANNA), candidate(BERT)) == []


def test_of_each_kind_that_is_allowed_one_must_fit() -> None:
    rules = UserRules(allow=("operator:anna", "operator:bert", "region:eu"))
    nodes = (
        candidate(ANNA, operator="anna", region="eu-west"),
        candidate(BERT, operator="bert", region="us"),
        candidate(CLEO, operator="cleo", region="eu"),
    )
    assert allowed(rules, *nodes) == [ANNA]


def test_denied_wins_over_allowed() -> None:
    rules = UserRules(allow=("region:eu",), deny=("operator:bert", "region:eu-west"))
    nodes = (
        candidate(ANNA, operator="anna", region="eu-west"),
        candidate(BERT, operator="bert", region="eu"),
        candidate(CLEO, operator="", region="EU-north"),
    )
    assert allowed(rules, *nodes) == [CLEO]


def test_route_rules_are_handed_on() -> None:
    rules = UserRules(distinct_operators=True, max_price=2.5, max_stages=3)
    resolved = rules.resolve([])
    assert (resolved.one_shard_per_operator, resolved.max_price, resolved.max_stages) == (True, 2.5, 3)
    assert allowed(rules, candidate(ANNA, price=2.5), candidate(BERT, price=2.6)) == [ANNA]
    assert rules.in_words() == ("distinct operators", "price at most 2.5", "at most 3 stages")


@pytest.mark.parametrize(
    ("selector", "complaint"),
    [
        ("", "no part of a peer id"),
        ("…", "no part of a peer id"),
        ("operator:", "needs a name"),
        ("region: ", "needs a name"),
        ("region:" + "x" * 97, "needs a name"),
        ("country:de", "names nobody"),
        ("12D3KooW", "too short for a peer"),
        ("12D3", "too short for a peer"),
        ("12D3KooWabcde", "too short for a peer"),
        ("abcde", "too short for a peer"),
        ("0OIl00", "no part of a peer id"),
        ("/ip4/10.0.0.1/tcp/4600", "no part of a peer id"),
        ("x\x1b[31m", "no part of a peer id"),
        ("a" * 53, "no part of a peer id"),
    ],
)
def test_selector_that_makes_no_sense_is_refused(selector: str, complaint: str) -> None:
    for rules in ({"allow": (selector,)}, {"deny": (selector,)}):
        with pytest.raises(ConfigError, match=complaint) as refused:
            UserRules(**rules)  # type: ignore[arg-type]
        assert "\x1b" not in str(refused.value)


@pytest.mark.parametrize(
    "rules",
    [
        {"max_price": -1.0},
        {"max_price": float("nan")},
        {"max_price": float("inf")},
        {"max_stages": 0},
        {"max_stages": 129},
        {"deny": ("region:eu",) * 257},
    ],
)
def test_bound_that_makes_no_sense_is_refused(rules: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        UserRules(**rules)  # type: ignore[arg-type]


def test_objective_is_one_of_three() -> None:
    assert objective_of("first-token") is Objective.FIRST_TOKEN
    with pytest.raises(ConfigError, match="latency, throughput, first-token"):
        objective_of("cheap")
