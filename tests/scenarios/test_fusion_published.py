"""A group of two over a model of the sizes of Qwen2.5-1.5B, all 28 layers: 250 decode steps, all of them closed.

The weights are drawn by lot, the vocabulary is that of the tests. Not in CI: 12 GB of memory, and minutes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fusion_node.client.sampling import SamplingParams
from fusion_node.engine.architectures import load_config
from fusion_node.engine.boundary import Boundary
from fusion_node.engine.sliced_layer import fusion_dims
from fusion_node.slices import Dims
from tests.engine.tiny import TinyModel, tiny_model
from tests.scenarios.swarm import memory_swarm
from tests.scenarios.test_fusion import PROMPT, boundary, home
from tests.scenarios.test_fusion_audit import Recorded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

__all__ = ["boundary", "home"]
"""Fixtures."""

NUM_TOKENS = 251
"""The first one comes of the prompt."""

SIZES = Dims(hidden=1536, heads=12, kv_heads=2, head_dim=128, channels=8960)


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model(
        "qwen2",
        num_hidden_layers=28,
        hidden_size=SIZES.hidden,
        intermediate_size=SIZES.channels,
        num_attention_heads=SIZES.heads,
        num_key_value_heads=SIZES.kv_heads,
        max_position_embeddings=512,
        use_sliding_window=False,
    )


async def test_all_steps_of_a_long_answer_close_over_the_published_sizes(
    model: TinyModel, boundary: Boundary, home: Path, tmp_path: Path
) -> None:
    async with memory_swarm(model, boundary) as swarm:
        fusion = Recorded(swarm, home, tmp_path)
        assert fusion_dims(load_config(fusion.stored)) == SIZES
        members = [node.peer for node in await fusion.group("0:28", "0/2", "1/2", ms=25.0)]
        client = await fusion.client()
        answer = client.generate(PROMPT, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True), raw=True)
        await answer.text()
        prompt = list(await client.encode(PROMPT, raw=True))
    report = fusion.judged()
    assert report.passed, report.findings
    # One of them, unless the machine was so slow that the group seemed to be stuck, and was begun anew.
    for session in report.sessions:
        assert session.num_layers == 28
        assert session.num_closed == session.num_steps
        assert {node.peer: node.largest_fraction for node in session.nodes} == dict.fromkeys(members, 0.5)
        print(f"{session.num_closed} of {session.num_steps} steps closed, each of {session.num_layers} layers")
    assert sum(session.num_closed for session in report.sessions) >= NUM_TOKENS

    with torch.inference_mode():
        ids = torch.tensor([prompt])
        expected = model.whole.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, min_new_tokens=24, do_sample=False
        )
    assert answer.stats.token_ids[:24] == expected[0, len(prompt) :].tolist()
