"""An answer that a draft head guesses for, over real servers, links and engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fusion_node.client.sampling import SamplingParams
from fusion_node.client.speculation import Drafts
from fusion_node.client.speculative_answer import Chosen, ReturnedRow
from fusion_node.engine.draft_head import DraftHead
from fusion_node.engine.drafts import Verified
from fusion_node.engine.tensor_codec import decode_rows
from fusion_node.engine.trained_head import HeadConfig, TrainedHead
from p2p.tensor_wire import decompress
from tests.scenarios.swarm import MemorySwarm
from tests.scenarios.test_answer_repair import PROMPT, answering, nodes_of
from tests.scenarios.test_speculative_answer import GREEDY, NUM_TOKENS, SAMPLED, Speculating, plain


@dataclass
class WithRows(Speculating):
    """Tells drafters the row that each token was chosen from, as SwarmClient does."""

    async def choose(self, position: int, row: ReturnedRow, ahead: Sequence[ReturnedRow]) -> Chosen:
        chosen = await super().choose(position, row, ahead)
        tensor, payload = row.of.tensor, row.of.payload
        rows_TD = decode_rows(tensor, decompress(payload, tensor) if tensor.codec else payload)
        return Chosen(Verified([chosen.token], rows_TD=rows_TD[row.index : row.index + 1].float().numpy()))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
async def test_rows_that_the_swarm_returns_are_what_a_head_guesses_from(
    swarm: MemorySwarm, params: SamplingParams, tmp_path: Path
) -> None:
    await nodes_of(swarm, 1)
    expected = await plain(swarm, params)
    torch.manual_seed(2)
    config = HeadConfig(
        hidden_size=48, vocab_size=131, draft_vocab_size=131, num_attention_heads=4, num_key_value_heads=2,
        head_dim=12, intermediate_size=64, feature_layers=(7,),
    )  # fmt: skip
    TrainedHead(config).save(tmp_path)
    head = DraftHead.load(tmp_path, swarm.boundary, hidden_size=48, vocabulary=131, num_layers=7)
    drafts = Drafts(131, [head.drafter])
    drafting = drafts.begin(PROMPT, None, len(PROMPT) + NUM_TOKENS)
    try:
        user = WithRows(swarm, (await answering(swarm)).connection, params=params, guesses=drafting)  # type: ignore[arg-type]
        assert await user.run() == expected
        # More than the answer's own: the head had something to say, with the rows of its tokens and none of the prompt.
        assert user.num_rows > NUM_TOKENS
    finally:
        drafting.close()
        drafts.close()
