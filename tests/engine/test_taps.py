"""Rows after some layers: those of the whole model, for the rows that were asked for, and nothing else changes."""

from __future__ import annotations

import itertools
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fusion_node.engine.block_manager_core import BLOCK_SLOTS
from fusion_node.engine.boundary import Boundary
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.session_log_core import SessionLog, StepRows
from fusion_node.engine.shard_engine import ShardEngine
from fusion_node.engine.stage import Stage
from fusion_node.engine.taps import Tapped, TapTensors, tapping
from fusion_node.engine.tensor_codec import decode_rows
from fusion_node.types import LayerRange
from p2p.messages import MAX_TAPPED_NODES, MAX_TAPS, TensorMeta
from tests.engine.tiny import TinyModel, tiny_model

CPU = torch.device("cpu")
FP32 = numerics_class("fp32")
IDS = list(range(3, 26))
MAX_ERROR = 1e-5


class Node:
    """A node with the layers of a range on one or several devices, without network or threads."""

    def __init__(self, model: TinyModel, cuts: tuple[int, ...]) -> None:
        stages = [Stage.load(model, LayerRange(a, b), numerics=FP32, device=CPU) for a, b in itertools.pairwise(cuts)]
        per_block = BLOCK_SLOTS * sum(stage.kv_bytes_per_position for stage in stages)
        self.engine = ShardEngine(stages, kv_budget_bytes=16 * per_block)
        self.logs: dict[str, SessionLog] = {}
        self.sequence: dict[str, int] = {}

    def run(self, *work: tuple[str, torch.Tensor, int, Tapped | None]) -> list[torch.Tensor]:
        """Per piece a session, its next rows, the position of the first, and what to tap."""
        planned = []
        for key, rows_TD, first, _ in work:
            if key not in self.logs:
                self.logs[key], self.sequence[key] = SessionLog(64), 0
                self.engine.blocks.open(key, owner=key, max_slots=64)
            last = first + len(rows_TD)
            rows = self.logs[key].apply(
                self.sequence[key], first_node=first + 1, num_rows=len(rows_TD), parent=first, parents=(), advance=last
            )
            assert isinstance(rows, StepRows)
            self.sequence[key] += 1
            planned.append((key, rows, 0, len(rows_TD), True))
        batch = self.engine.plan(self.engine.layers, planned)
        rows_of: list[torch.Tensor | None] = [rows_TD for _, rows_TD, _, _ in work]
        for device in range(self.engine.num_devices):
            self.engine.change_kv(batch, device=device)
            rows_of = self.engine.run(batch, rows_of, device=device, tapped=[tapped for *_, tapped in work])
        assert all(rows is not None for rows in rows_of)
        return [rows for rows in rows_of if rows is not None]


def hidden_states(model: TinyModel, ids: list[int]) -> list[torch.Tensor]:
    with torch.inference_mode():
        out = model.whole(input_ids=torch.tensor([ids]), output_hidden_states=True)
    return [state[0] for state in out.hidden_states]


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_moe", "granite", "olmo2", "deepseek_v3"])
def test_tapped_rows_are_the_hidden_states_of_the_whole_model(model_type: str) -> None:
    model = tiny_model(model_type)
    expected = hidden_states(model, IDS)
    first, second = Node(model, (0, 2, 4)), Node(model, (4, 7))
    rows_TD = Boundary.load(model, numerics=FP32, device=CPU).embed(IDS)
    low = [Tapped((1, 2, 3), (0, 5, 12)), Tapped((1, 2, 3, 4), (0, 9))]
    high = [Tapped((5, 6), (0, 5, 12)), Tapped((5,), (9,))]
    for start, stop, a, b in ((0, 13, low[0], high[0]), (13, 23, low[1], high[1])):
        (between_TD,) = first.run(("s", rows_TD[start:stop], start, a))
        second.run(("s", between_TD, start, b))
        for tapped in (a, b):
            assert set(tapped.found) == set(tapped.layers)
            for layer, found_TD in tapped.found.items():
                reference_TD = expected[layer][[start + row for row in tapped.rows]]
                assert (found_TD - reference_TD).abs().max() <= MAX_ERROR * reference_TD.abs().max()
    # The row after a stage's last layer is what it hands on.
    assert torch.equal(low[1].found[4], between_TD[[0, 9]])


def test_each_session_of_a_call_gets_its_own_rows_and_nothing_is_computed_otherwise() -> None:
    model = tiny_model("llama")
    boundary = Boundary.load(model, numerics=FP32, device=CPU)
    texts = {"a": IDS[:6], "b": IDS[6:15], "c": IDS[15:]}
    taps = {"a": Tapped((2, 6), (5,)), "b": None, "c": Tapped((3,), (0, 7))}
    plain, tapping = Node(model, (0, 3, 7)), Node(model, (0, 3, 7))
    expected = plain.run(*((key, boundary.embed(ids), 0, None) for key, ids in texts.items()))
    found = tapping.run(*((key, boundary.embed(ids), 0, taps[key]) for key, ids in texts.items()))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    for key, tapped in taps.items():
        if tapped is not None:
            assert set(tapped.found) == set(tapped.layers)
            for layer, rows_TD in tapped.found.items():
                reference_TD = hidden_states(model, texts[key])[layer][list(tapped.rows)]
                assert (rows_TD - reference_TD).abs().max() <= MAX_ERROR * reference_TD.abs().max()
    layers = [layer for stage in tapping.engine.stages for layer in stage._model.get_submodule("layers")]  # type: ignore[arg-type]
    assert not any(layer._forward_hooks for layer in layers), "nothing is left of it in the model"


def test_rows_are_put_together_from_several_calls_and_computed_anew_after_one_that_failed() -> None:
    rows_TD = torch.arange(40.0).view(10, 4)
    tensors = TapTensors((2, 5), (1, 6, 7), 4, "f32")
    assert tensors.of(2, 5) is None
    assert not tensors.payloads()
    for start, stop in ((0, 5), (5, 10), (5, 10)):
        tapped = tensors.of(start, stop)
        assert tapped is not None
        for layer in tapped.layers:
            tapped.found[layer] = rows_TD[[start + row for row in tapped.rows]] * layer
        tensors.keep(start, tapped)
    meta = TensorMeta("f32", 3, 4)
    assert [layer for layer, _ in tensors.payloads()] == [2, 5]
    for layer, payload in tensors.payloads():
        assert torch.equal(decode_rows(meta, payload), rows_TD[[1, 6, 7]] * layer)


def test_layer_that_the_encoding_cannot_hold_is_left_out_and_the_others_are_not() -> None:
    tensors = TapTensors((2, 5), (0,), 4, "f16")
    tapped = tensors.of(0, 1)
    assert tapped is not None
    tapped.found.update({2: torch.full((1, 4), 1e6), 5: torch.ones(1, 4)})
    tensors.keep(0, tapped)
    assert [layer for layer, _ in tensors.payloads()] == [5]


def test_step_that_waits_for_the_device_takes_no_memory_for_what_will_be_tapped() -> None:
    """Its user would have eight times as much kept here as it sends, and steps of thousands of rows may wait."""
    row_size = 8192
    tracemalloc.start()
    try:
        waiting = [TapTensors(range(1, MAX_TAPS + 1), range(MAX_TAPPED_NODES), row_size, "f16") for _ in range(4)]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(waiting) == 4
    assert held < MAX_TAPPED_NODES * 2 * row_size, "less than the rows of one layer of one of them"


def test_rows_of_a_call_on_another_thread_are_not_taken() -> None:
    """A forward that goes on when its node goes over to other layers shares modules with those that come after it."""
    layer, tapped = torch.nn.Identity(), Tapped((1,), (0, 2))
    ours_1TD = torch.arange(12.0).view(1, 3, 4)
    with tapping({1: layer}, [(tapped, 0)], (1,)), ThreadPoolExecutor(1) as other:
        layer(ours_1TD)
        other.submit(layer, -ours_1TD).result()
        other.submit(layer, torch.zeros(1, 1, 4)).result()
    assert torch.equal(tapped.found[1], ours_1TD[0, [0, 2]])


def test_rows_of_all_sessions_of_a_call_are_copied_at_once() -> None:
    """On a GPU each copy of indices waits for what is computed, and dozens of sessions may be tapped together."""
    layer, hidden_1TD = torch.nn.Identity(), torch.arange(28.0).view(1, 7, 4)
    wishes = [(Tapped((1,), (0, 2)), 0), (Tapped((1,), (1,)), 3), (Tapped((2,), (0,)), 5)]
    with tapping({1: layer}, wishes, (1,)):
        layer(hidden_1TD)
    first, second, other = (tapped.found for tapped, _ in wishes)
    assert torch.equal(first[1], hidden_1TD[0, [0, 2]])
    assert torch.equal(second[1], hidden_1TD[0, [4]])
    assert not other
    assert first[1].untyped_storage().data_ptr() == second[1].untyped_storage().data_ptr()
