"""An answer that a head guesses for which reads rows of three layers, over real servers, links and engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fusion_node.client.answer_core import RepairKind
from fusion_node.client.drafting import GumbelNoise
from fusion_node.client.row_chooser import decode_tap
from fusion_node.client.sampling import SamplingParams
from fusion_node.client.speculation import Drafts
from fusion_node.engine.draft_head import DraftHead, DraftHeadDrafter
from fusion_node.engine.drafts import Verified
from fusion_node.engine.taps import TapTensors
from fusion_node.engine.trained_head import HeadConfig, TrainedHead, normed
from fusion_node.types import MonotonicS
from scheduler.speculation import Decision, Mode, ModePolicy
from tests.scenarios.swarm import MemorySwarm
from tests.scenarios.test_answer_repair import PROMPT, Doing, answering, nodes_of, once
from tests.scenarios.test_draft_head import WithRows
from tests.scenarios.test_speculative_answer import GREEDY, NUM_TOKENS, SAMPLED, SEED, plain

TAPS = (2, 4)
"""The first stage has the one, in its midst, and the second the other. The third layer is the last one."""


def true_rows(swarm: MemorySwarm, ids: Sequence[int]) -> torch.Tensor:
    """What the whole model has after the layers of TAPS and after all, ``[T, 3, D]``."""
    whole, kept = swarm.model.whole, list[torch.Tensor]()
    with torch.inference_mode():
        hook = whole.get_submodule("model.norm").register_forward_pre_hook(lambda _, rows: kept.append(rows[0][0]))
        out = whole(input_ids=torch.tensor([list(ids)]), output_hidden_states=True)
        hook.remove()
    return torch.stack([*(out.hidden_states[layer][0] for layer in TAPS), kept[0]], dim=1)


def knowing_head(swarm: MemorySwarm, text: Sequence[int], folder: Path, *, log_scale: float) -> DraftHead:
    """A head that guesses how this text goes on from its rows, and from no others; surer with a larger scale."""
    config = HeadConfig(
        hidden_size=48, vocab_size=131, draft_vocab_size=131, num_attention_heads=4, num_key_value_heads=2,
        head_dim=12, intermediate_size=64, feature_layers=(*TAPS, 7),
        log_scales=(log_scale,),
    )  # fmt: skip
    torch.manual_seed(2)
    head = TrainedHead(config).requires_grad_(False)
    for silent in (head.midlayer.self_attn.o_proj, head.midlayer.mlp.down_proj):
        silent.weight.zero_()
    rows_TkD = true_rows(swarm, text)
    embedded_TD = normed(swarm.boundary.embed(text))
    normed_TD = swarm.boundary.norm(rows_TkD[:, -1])
    steps = range(len(PROMPT) - 1, len(text) - 1)
    first = torch.stack([torch.cat((normed(rows_TkD[s]).flatten(), embedded_TD[s + 1])) for s in steps])
    later = torch.stack([torch.cat((normed(normed_TD[s]), embedded_TD[s + 1])) for s in steps])
    said = torch.stack([normed_TD[s + 1] for s in steps])
    for linear, inputs in ((head.fc, first), (head.fc_next, later)):
        linear.weight.copy_((torch.linalg.pinv(inputs) @ said).t())
        linear.bias.zero_()
    head.save(folder, dtype=torch.float32)
    loaded = DraftHead.load(folder, swarm.boundary, hidden_size=48, vocabulary=131, num_layers=7)
    assert loaded.tap_layers == TAPS
    return loaded


class AlwaysTree(ModePolicy):
    """Guesses also where that is slower, as it is on machines that do other things."""

    def decide(self, *, now: MonotonicS) -> Decision:
        return replace(super().decide(now=now), mode=Mode.TREE)


class Told(DraftHeadDrafter):
    """Notes what it is told."""

    def __init__(self, head: DraftHead, num_positions: int, told: list[Verified]) -> None:
        super().__init__(head, num_positions)
        self._told = told

    def extend(self, verified: Verified) -> None:
        self._told.append(verified)
        super().extend(verified)


@asynccontextmanager
async def guessing(
    swarm: MemorySwarm, folder: Path, text: Sequence[int], params: SamplingParams
) -> AsyncIterator[tuple[WithRows, list[Verified]]]:
    told: list[Verified] = []
    # Sampled, its scores have to be the model's own for the noise to say the same of both.
    head = knowing_head(swarm, [*PROMPT, *text], folder, log_scale=2.0 if params is GREEDY else 0.0)
    drafts = Drafts(131, [lambda num_positions: Told(head, num_positions, told)])
    noise = None
    if params.temperature > 0:
        noise = GumbelNoise(seed=SEED, temperature=params.temperature, vocabulary=131)
    drafting = drafts.begin(PROMPT, noise, len(PROMPT) + NUM_TOKENS)
    try:
        yield (
            WithRows(
                swarm,
                (await answering(swarm)).connection,
                params=params,
                guesses=drafting,  # type: ignore[arg-type]
                make_policy=AlwaysTree,
                taps=TAPS,
                decode_tap=partial(decode_tap, as_dtype="f32"),
            ),
            told,
        )
    finally:
        drafting.close()
        drafts.close()


def check_told(swarm: MemorySwarm, told: Sequence[Verified], text: Sequence[int]) -> None:
    """Every row that came is that of its own position and layer."""
    ids = [*PROMPT, *text]
    rows_TkD = true_rows(swarm, ids)
    assert [token for verified in told for token in verified.tokens] == list(text[: len(told)])
    for position, verified in enumerate(told, len(PROMPT) - 1):
        if verified.taps_TLD is not None:
            assert verified.tap_layers == TAPS
            np.testing.assert_allclose(verified.taps_TLD[0], rows_TkD[position, :-1].numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
async def test_head_of_three_layers_guesses_from_what_the_stages_send(
    swarm: MemorySwarm, params: SamplingParams, tmp_path: Path
) -> None:
    nodes = await nodes_of(swarm, 1)
    expected = await plain(swarm, params)
    async with guessing(swarm, tmp_path, expected, params) as (user, told):
        assert await user.run() == expected
    check_told(swarm, told, expected)
    assert user.num_with_taps > (NUM_TOKENS / 2 if params is GREEDY else 1)
    # It knows the text only by the rows of all three layers; chance would be right once in 131 times.
    assert user.stats.num_candidates > 0
    assert user.stats.num_first / user.stats.num_candidates > (0.9 if params is GREEDY else 0.5)
    counters = [node.server.counters["taps"] for node in nodes]
    assert counters[0] >= user.num_with_taps
    assert counters[1] >= user.num_with_taps
    assert counters[2] == 0


async def test_stage_that_takes_the_place_of_another_sends_them_too(swarm: MemorySwarm, tmp_path: Path) -> None:
    nodes = await nodes_of(swarm)
    expected = await plain(swarm, GREEDY)
    async with guessing(swarm, tmp_path, expected, GREEDY) as (user, told):
        doing = Doing()
        user.on_token = once(lambda count: count == 6, lambda: doing.kill(nodes[1]))
        assert await user.run() == expected
        await asyncio.gather(*doing.tasks)
    assert [repair.kind for repair in user.repairs] == [RepairKind.PATCHED]
    assert sum(node.server.counters["taps"] for node in nodes[2:]) > 0
    check_told(swarm, told, expected)


def junk(
    payloads: Callable[[TapTensors], list[tuple[int, memoryview]]], tensors: TapTensors
) -> list[tuple[int, memoryview]]:
    """Finite numbers, and wrong ones."""
    return [(layer, memoryview(bytes(len(payload)))) for layer, payload in payloads(tensors)]


def no_numbers(
    payloads: Callable[[TapTensors], list[tuple[int, memoryview]]], tensors: TapTensors
) -> list[tuple[int, memoryview]]:
    return [(layer, memoryview(b"\xff" * len(payload))) for layer, payload in payloads(tensors)]


@pytest.mark.parametrize("lie", [junk, no_numbers])
async def test_answer_does_not_depend_on_what_stages_send_beside_it(
    swarm: MemorySwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: Callable[..., object]
) -> None:
    await nodes_of(swarm, 1)
    expected = await plain(swarm, GREEDY)
    monkeypatch.setattr(TapTensors, "payloads", partialmethod_of(lie, TapTensors.payloads))
    async with guessing(swarm, tmp_path, expected, GREEDY) as (user, told):
        assert await user.run() == expected
    assert not user.repairs
    if lie is not junk:
        assert user.num_with_taps == 0
        assert all(verified.taps_TLD is None for verified in told)


def partialmethod_of(lie: Callable[..., object], payloads: object) -> Callable[[TapTensors], object]:
    return lambda tensors: lie(payloads, tensors)
