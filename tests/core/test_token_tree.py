"""The user's tree of tokens."""

from __future__ import annotations

import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_node.client.token_tree import NodeState, TokenTree, TreeNode


def send(tree: TokenTree, least: float = 0.0) -> TreeNode:
    node = tree.pop_unsent(least)
    assert node is not None
    node.state = NodeState.SENT
    return node


def grow(tree: TokenTree, *candidates: tuple[int, float]) -> TreeNode:
    node = tree.pop_unexpanded(0.0)
    assert node is not None
    tree.expand(node, candidates)
    return node


def test_the_root_comes_first_and_then_the_most_probable() -> None:
    tree = TokenTree(7, 3)
    grow(tree, (1, 0.3), (2, 0.6))
    grow(tree, (5, 0.4))
    assert [send(tree).token for _ in range(4)] == [7, 2, 1, 5]
    assert tree.pop_unsent(0.0) is None


def test_a_sure_child_comes_after_its_parent_even_when_that_was_put_back() -> None:
    tree = TokenTree(7, 3)
    grow(tree, (1, 1.0))
    grow(tree, (2, 1.0))
    for _ in range(2):
        send(tree)
    tree.unsend_root()
    tree.unsend()
    assert [send(tree).token for _ in range(3)] == [7, 1, 2]


def test_what_is_too_improbable_stays_until_the_root_comes_nearer() -> None:
    tree = TokenTree(7, 3)
    send(tree)
    grow(tree, (1, 0.5), (2, 0.4))
    grow(tree, (3, 0.5))
    assert send(tree, 0.3).token == 1
    assert send(tree, 0.3).token == 2
    assert tree.pop_unsent(0.3) is None
    assert tree.has_unsent(0.24)
    assert not tree.has_unsent(0.26)
    tree.advance(1)
    assert send(tree, 0.3).token == 3


def test_a_known_token_becomes_the_root_with_what_is_below_it() -> None:
    tree = TokenTree(7, 3)
    root = grow(tree, (1, 0.5), (2, 0.4))
    below = grow(tree, (3, 0.9))
    other = grow(tree, (4, 0.9))
    assert (below.token, other.token, below.parent) == (1, 3, root)
    kept = tree.best_child(other)
    assert kept is not None
    assert tree.advance(1) is below
    assert tree.path(kept) == (3, 4)
    assert kept.is_live
    assert not root.is_live
    tree.check_integrity()


def test_an_unknown_token_becomes_a_root_without_anything_below() -> None:
    tree = TokenTree(7, 3)
    send(tree)
    grow(tree, (1, 0.5), (2, 0.4))
    child = send(tree)
    root = tree.advance(9)
    assert (root.token, root.position, root.children, tree.num_live) == (9, 4, {}, 1)
    assert not child.is_live
    assert send(tree) is root
    assert tree.pop_unexpanded(0.0) is root
    assert tree.pop_unsent(0.0) is None


def test_a_candidate_that_had_no_turn_yet_is_found_when_it_is_chosen() -> None:
    tree = TokenTree(7, 3)
    grow(tree, (1, 0.5), (2, 0.4))
    root = tree.advance(2)
    assert (root.token, root.state, root.is_expanded) == (2, NodeState.UNSENT, False)


def test_nodes_that_were_asked_in_vain_are_asked_again() -> None:
    tree = TokenTree(7, 3)
    node = tree.pop_unexpanded(0.0)
    assert node is tree.root
    assert tree.pop_unexpanded(0.0) is None
    tree.put_back_unexpanded(node)
    assert tree.pop_unexpanded(0.0) is node


def test_the_order_of_candidates_does_not_matter() -> None:
    tree = TokenTree(7, 3)
    grow(tree, (1, 0.1), (2, 0.6), (3, 0.3))
    assert [send(tree).token for _ in range(4)] == [7, 2, 3, 1]


def test_after_the_stages_have_dropped_all_everything_live_is_sent_again() -> None:
    tree = TokenTree(7, 3)
    grow(tree, (1, 0.5), (2, 0.4))
    sent = [send(tree) for _ in range(3)]
    sent[1].row = "row"
    tree.unsend()
    assert [node.state for node in sent] == [NodeState.SENT, NodeState.UNSENT, NodeState.UNSENT]
    assert sent[1].row is None
    assert [send(tree).token for _ in range(2)] == [1, 2]


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_any_order_of_calls_hands_out_every_live_node_in_order(seed: int) -> None:
    chance = random.Random(seed)
    tree = TokenTree(0, 0)
    for _ in range(60):
        match chance.randrange(5):
            case 0:
                node = tree.pop_unexpanded(chance.choice((0.0, 0.01, 0.3)))
                if node is not None:
                    tokens = chance.sample(range(6), chance.randint(0, 6))
                    tree.expand(node, [(token, chance.choice((1.0, 0.5, 0.1, 0.0))) for token in tokens])
            case 1:
                node = tree.pop_unsent(chance.choice((0.0, 0.01, 0.3)))
                if node is not None:
                    assert node.parent is None or node.parent.state is not NodeState.UNSENT
                    node.state = NodeState.SENT
            case 2:
                tree.advance(chance.randrange(6))
            case 3:
                tree.unsend()
                if chance.random() < 0.5:
                    tree.unsend_root()
                    tree.unsend()
            case 4:
                node = tree.pop_unexpanded(0.0)
                if node is not None:
                    tree.put_back_unexpanded(node)
        if tree.root.state is NodeState.UNSENT and chance.random() < 0.5:
            tree.unsend()
        tree.check_integrity()
    last = math.inf
    while (node := tree.pop_unsent(0.0)) is not None:
        assert node.is_live
        assert node.log_p <= last
        last, node.state = node.log_p, NodeState.SENT
    assert all(node.state is not NodeState.UNSENT for node in tree.live_nodes())


def test_what_is_just_worth_sending_is_handed_out_to_whoever_is_told_that_it_is_there() -> None:
    for denominator in range(2, 400):
        tree = TokenTree(0, 0)
        root = tree.pop_unsent(0.0)
        assert root is tree.root
        root.state = NodeState.SENT
        tree.expand(root, [(1, 0.5)])
        child = tree.pop_unsent(0.0)
        assert child is not None
        child.state = NodeState.SENT
        tree.expand(child, [(2, 1 / denominator)])
        least = 0.5 * (1 / denominator)
        assert tree.has_unsent(least) == (tree.pop_unsent(least) is not None)
