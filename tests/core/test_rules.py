"""The user's rules about single nodes, each alone; those about whole routes are tested with the planner."""

from __future__ import annotations

import pytest

from fusion_node.types import PeerId
from scheduler.rules import Rules
from scheduler.topology import Candidate
from tests.planning import node

PEER, OTHER = PeerId("n"), PeerId("other")


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        (Rules(deny_peers=frozenset({PEER})), "you deny this peer"),
        (Rules(allow_peers=frozenset({OTHER})), "not among the peers that you allow"),
        (Rules(trusted_only=True, trusted_peers=frozenset({OTHER})), "not among the peers that you trust"),
        (Rules(trusted_only=True), "not among the peers that you trust"),
        (Rules(deny_operators=frozenset({"acme"})), "you deny operator acme"),
        (Rules(allow_operators=frozenset({"other"})), "not of an operator that you allow"),
        (Rules(deny_regions=frozenset({"eu"})), "you deny region eu"),
        (Rules(deny_regions=frozenset({"EU-West"})), "you deny region EU-West"),
        (Rules(allow_regions=frozenset({"us", "eu-west-2"})), "not in a region that you allow"),
        (Rules(max_price=1.5), "asks 2, more than 1.5"),
        (Rules(numerics="bf16"), "serves f16r32, not bf16"),
    ],
)
def test_a_rule_that_a_node_breaks_is_named(rules: Rules, why: str) -> None:
    assert rules.rejects(node("n", 0, 1, operator="acme", region="eu-west", price=2.0, numerics="f16r32")) == why


@pytest.mark.parametrize(
    "rules",
    [
        Rules(),
        Rules(allow_peers=frozenset({PEER}), deny_peers=frozenset({OTHER})),
        Rules(trusted_only=True, trusted_peers=frozenset({PEER})),
        Rules(allow_operators=frozenset({"acme"}), deny_operators=frozenset({"other"})),
        Rules(allow_regions=frozenset({"EU"})),
        Rules(allow_regions=frozenset({"us", "eu-west"}), deny_regions=frozenset({"eu-west-2", "e", "eu-w"})),
        Rules(max_price=2.0),
        Rules(numerics="f16r32"),
    ],
)
def test_rules_that_a_node_keeps_let_it_serve(rules: Rules) -> None:
    assert rules.rejects(node("n", 0, 1, operator="acme", region="eu-west", price=2.0, numerics="f16r32")) is None


def test_who_is_denied_is_denied_whoever_is_allowed() -> None:
    rules = Rules(allow_peers=frozenset({PEER}), deny_peers=frozenset({PEER}))
    assert rules.rejects(node("n", 0, 1)) == "you deny this peer"


@pytest.mark.parametrize(
    ("candidate", "rules", "why"),
    [
        (node("n", 0, 1), Rules(allow_regions=frozenset({"eu"})), "does not say in which region it is"),
        (node("n", 0, 1), Rules(allow_operators=frozenset({"acme"})), "not of an operator that you allow"),
        (node("n", 0, 1), Rules(deny_regions=frozenset({"eu", ""}), deny_operators=frozenset({""})), None),
        (node("n", 0, 1), Rules(numerics="bf16"), None),
    ],
)
def test_a_node_without_tags_is_allowed_where_nothing_is_demanded_of_them(
    candidate: Candidate, rules: Rules, why: str | None
) -> None:
    assert rules.rejects(candidate) == why
