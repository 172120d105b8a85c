"""The library as a script uses it: only names of ``fusion_node``, asynchronous and plain."""

from __future__ import annotations

from pathlib import Path

import pytest

import fusion_node
from fusion_node.cli.local_swarm import LocalSwarm, split_evenly
from fusion_node.store import StoredModel

pytestmark = pytest.mark.live


def test_every_public_name_exists() -> None:
    assert [name for name in fusion_node.__all__ if not hasattr(fusion_node, name)] == []
    with pytest.raises(AttributeError):
        _ = fusion_node.no_such_name


async def test_library_asynchronous_and_plain_give_the_same_answer(
    builtin_model: StoredModel, test_home: Path, tmp_path: Path
) -> None:
    from asyncio import to_thread

    params = fusion_node.SamplingParams(max_tokens=12)
    async with LocalSwarm(builtin_model.name, folder=tmp_path, home=test_home, threads=1, numerics="fp32") as local:
        await local.start(split_evenly(30, 1))
        await local.wait_ready()
        peers = list(local.nodes[0].addresses)
        async with fusion_node.SwarmClient(builtin_model.name, peers=peers, home=test_home, mdns=False) as swarm:
            answer = swarm.generate("What is the capital of France?", params)
            pieces = [piece async for piece in answer]
        assert "Paris" in "".join(pieces)
        assert len(pieces) > 3
        assert answer.stats.finish_reason == "stop"

        def plain() -> tuple[str, int]:
            with fusion_node.SyncSwarmClient(builtin_model.name, peers=peers, home=test_home, mdns=False) as swarm:
                answer = swarm.generate("What is the capital of France?", params)
                text = answer.text()
                left_early = swarm.generate("Count to one hundred.", params)
                for _ in left_early:
                    break
                again = swarm.chat([{"role": "user", "content": "What is the capital of France?"}], params).text()
                assert again == text
                return text, answer.stats.completion_tokens

        text, num_tokens = await to_thread(plain)
    assert text == "".join(pieces)
    assert num_tokens == answer.stats.completion_tokens
