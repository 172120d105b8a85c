"""Answers under an ownership file: who serves, and who is let go when the file changes in the midst of an answer.

Servers, links and engine are real, as in test_fusion.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from fusion_node.client.generation import GenerationStats
from fusion_node.client.swarm import SwarmClient
from fusion_node.errors import ConfigError, NoRoute
from tests.scenarios.swarm import until
from tests.scenarios.test_fusion import (
    GREEDY,
    PROMPT,
    Fusion,
    Member,
    answer,
    boundary,
    by_pipeline,
    fusion,
    home,
    ids,
    model,
    peers,
)

__all__ = ["boundary", "fusion", "home", "model"]
"""Fixtures: the same model and store."""


def one_each(nodes: list[Member], *, but: Member | None = None) -> str:
    """Each node may hold the slice of its number."""
    rules = [
        f'[[may_hold]]\nwho = "{node.peer}"\nslices = "{k}/{len(nodes)}"\n'
        for k, node in enumerate(nodes)
        if node is not but
    ]
    return "\n".join(['default = "deny"', *rules])


async def answer_with_a_change(
    client: SwarmClient, change: Callable[[], object], is_done: Callable[[], bool]
) -> GenerationStats:
    """Whoever reads the answer waits after some pieces, until a change has had its effect."""
    generation = client.generate(PROMPT, GREEDY, raw=True)
    async with asyncio.timeout(60.0):
        count = 0
        async for _ in generation:
            count += 1
            if count == 5:
                change()
                await until(is_done)
    return generation.stats


def is_free(node: Member) -> Callable[[], bool]:
    return lambda: not node.admission.sessions


async def test_only_those_serve_who_may_hold_their_slice(fusion: Fusion, tmp_path: Path) -> None:
    [expected] = await by_pipeline(fusion, GREEDY)
    near = await fusion.group("0:4", "0/3", "1/3", "2/3")
    far = await fusion.group("0:4", "0/3", "1/3", "2/3", ms=5.0)
    path = tmp_path / "own.toml"
    path.write_text(one_each(far))
    stats = await answer(await fusion.client(ownership=path))
    assert stats.token_ids == expected
    assert peers(stats) == [ids(far)]
    assert peers(await answer(await fusion.client())) == [ids(near)], "without the file"


async def test_whom_a_change_of_the_file_excludes_is_revoked_at_once_and_the_answer_is_the_same(
    fusion: Fusion, tmp_path: Path
) -> None:
    [expected] = await by_pipeline(fusion, GREEDY)
    nodes = await fusion.group("0:4", "0/3", "1/3", "2/3")
    spare = await fusion.node("0:4", "1/3", ms=5.0)
    path = tmp_path / "own.toml"
    path.write_text('default = "allow"')
    client = await fusion.client(ownership=path)
    denied = f'default = "allow"\n[[never_hold]]\nwho = "{nodes[1].peer}"\n'
    stats = await answer_with_a_change(client, lambda: path.write_text(denied), is_free(nodes[1]))
    assert stats.token_ids == expected
    assert peers(stats) == [ids([nodes[0], spare, nodes[2]])]
    assert [(repair.cause, repair.peer) for repair in stats.repairs] == [("revoked", nodes[1].peer)]
    path.write_text('default = "allow"')
    await until(lambda: client._watching is None)
    client._router._avoid.clear()
    other = await answer(client, prompt="Of something else, that no node has kept.")
    assert peers(other) == [ids(nodes)], "it may again"


async def test_whoever_may_not_be_beside_another_any_more_is_revoked(fusion: Fusion, tmp_path: Path) -> None:
    [expected] = await by_pipeline(fusion, GREEDY)
    first, second = await fusion.group("0:4", "0/2", "1/2")
    spare = await fusion.node("0:4", "1/2", ms=5.0)
    path = tmp_path / "own.toml"
    path.write_text('default = "allow"')
    client = await fusion.client(ownership=path)
    apart = f'default = "allow"\n[[never_adjacent]]\nwho = ["{first.peer}", "{second.peer}"]\n'
    stats = await answer_with_a_change(client, lambda: path.write_text(apart), is_free(second))
    assert stats.token_ids == expected
    assert peers(stats) == [ids([first, spare])]


async def test_without_another_the_answer_ends_with_the_rule_and_the_slice(fusion: Fusion, tmp_path: Path) -> None:
    nodes = await fusion.group("0:4", "0/3", "1/3", "2/3")
    path = tmp_path / "own.toml"
    path.write_text(one_each(nodes))
    client = await fusion.client(ownership=path)
    with pytest.raises(NoRoute) as told:
        await answer_with_a_change(client, lambda: path.write_text(one_each(nodes, but=nodes[2])), is_free(nodes[2]))
    assert f"node …{nodes[2].peer[-8:]} is revoked: ownership line 1: no rule says that it may hold" in str(told.value)
    assert "slice 2/3 of layers 0:4 is held by nobody whom your rules allow (1 × ownership line 1: " in str(told.value)


async def test_file_that_becomes_wrong_changes_no_running_answer_and_lets_no_other_begin(
    fusion: Fusion, tmp_path: Path
) -> None:
    nodes = await fusion.group("0:4", "0/2", "1/2")
    path = tmp_path / "own.toml"
    path.write_text(one_each(nodes))
    client = await fusion.client(ownership=path)
    file = client._ownership_file
    assert file is not None
    stats = await answer_with_a_change(client, lambda: path.write_text(""), lambda: file.problem is not None)
    assert peers(stats) == [ids(nodes)]
    assert not stats.repairs
    with pytest.raises(ConfigError, match="line 1: default: is missing"):
        await answer(client)


async def test_change_that_a_look_found_whom_nobody_waited_for_any_more_holds_all_the_same(
    fusion: Fusion, tmp_path: Path
) -> None:
    """An answer that ends takes the watch over the file with it, which may be in the midst of a look then."""
    path = tmp_path / "own.toml"
    path.write_text('default = "allow"')
    client = await fusion.client(ownership=path)
    file = client._ownership_file
    assert file is not None
    path.write_text('default = "deny"')
    assert file.refresh()
    await client._read_ownership()
    assert client._router.rules.ownership == file.rules
    assert not client._router.rules.ownership.is_default_allow


async def test_what_nodes_are_asked_to_keep_while_the_file_forbids_it_they_are_told_to_drop(
    fusion: Fusion, tmp_path: Path
) -> None:
    nodes = await fusion.group("0:4", "0/2", "1/2")
    path = tmp_path / "own.toml"
    path.write_text('default = "allow"')
    client = await fusion.client(ownership=path)
    stats = await answer(client)
    assert not any(report.is_ended for report in stats.grants)
    prefixes = client._prefixes
    assert prefixes is not None
    [kept] = prefixes.entries
    prefixes.forget(kept)
    kept.ended_at = None
    with client._remembered(prefixes, kept):  # as while its session is being closed
        path.write_text(one_each(nodes, but=nodes[1]))
        await client._read_ownership()
        assert not any(report.is_ended for report in stats.grants)
    assert not prefixes.entries
    assert all(report.is_ended for report in stats.grants)


async def test_rules_in_a_form_that_is_not_known_are_refused_and_never_left_out(fusion: Fusion, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('default = "deny"')
    with pytest.raises(ConfigError, match=r"ownership is a str: .* pathlib.Path"):
        await fusion.client(ownership=str(path))
