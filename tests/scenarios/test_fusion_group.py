"""Groups of real servers in one process: what they compute together, and what they do when one of them errs or dies."""

from __future__ import annotations

import pytest
import torch

from fusion_node.types import LayerRange
from tests.scenarios.group_user import GroupUser, group
from tests.scenarios.swarm import MemorySwarm, Node, until

ALL = LayerRange(0, 7)
PROMPT = [5, 17, 99, 3, 42, 8]

Layout = tuple[tuple[LayerRange, tuple[int, ...]], ...]
"""Layer ranges with the weights of their members; a stage of one weight is a node of whole layers."""

LAYOUTS: dict[str, Layout] = {
    "two": ((ALL, (1, 1)),),
    "three, uneven": ((ALL, (3, 1, 2)),),
    "four": ((ALL, (1, 1, 1, 1)),),
    "node, then group": ((LayerRange(0, 3), (1,)), (LayerRange(3, 7), (1, 1))),
    "group, then node": ((LayerRange(0, 3), (1, 1)), (LayerRange(3, 7), (1,))),
    "groups of two and three": ((LayerRange(0, 4), (1, 1)), (LayerRange(4, 7), (2, 1, 1))),
}


async def stages_of(swarm: MemorySwarm, layout: Layout) -> list[list[Node]]:
    return [
        [await swarm.node(layers)] if len(weights) == 1 else await group(swarm, layers, weights)
        for layers, weights in layout
    ]


def near(rows_TD: torch.Tensor, whole_TD: torch.Tensor) -> bool:
    return bool((rows_TD - whole_TD).norm() <= 1e-5 * whole_TD.norm())


async def plain_and_tree(user: GroupUser) -> list[torch.Tensor]:
    """A prompt, some tokens, a tree of which a branch is kept, and more tokens."""
    out = [await user.step(user.embed(PROMPT)), await user.step(user.embed([7]))]
    # Two branches of the root: 8 - 10 - 11 and 9.
    first = user.last_node + 1
    out.append(
        await user.step(user.embed([1, 2, 3, 4]), parent=0, parents=(first - 1, first - 1, first, first + 2), advance=0)
    )
    # Keeps the first branch, which does not lie in order, and hangs a chain on its middle.
    out.append(await user.step(user.embed([9, 11]), parent=first + 2, advance=first + 2))
    second = first + 4
    out.append(await user.step(user.embed([6]), parent=second + 1, advance=second + 2))
    out.append(await user.step(user.embed([30])))
    return out


@pytest.mark.parametrize("name", LAYOUTS)
async def test_prompt_tokens_and_trees_come_out_as_of_the_whole_layers(swarm: MemorySwarm, name: str) -> None:
    whole = GroupUser.of(swarm, [[await swarm.node(ALL)]])
    user = GroupUser.of(swarm, await stages_of(swarm, LAYOUTS[name]))
    await whole.open()
    await user.open()
    expected = await plain_and_tree(whole)
    for ours, theirs in zip(await plain_and_tree(user), expected, strict=True):
        assert near(ours, theirs)
    user.close()
    await until(lambda: not any(node.num_sessions for nodes in user.stages for node in nodes))
    for node in (node for nodes in user.stages for node in nodes):
        node.admission.check_integrity()
        assert not node.server.is_busy
