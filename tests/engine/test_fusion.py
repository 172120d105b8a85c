"""Fusion groups against the stage of whole layers: what members compute together is what one node computes.

``python -m tests.engine.test_fusion HOME`` loads a slice of the built-in model and prints how much memory it took.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from fusion_node.engine.architectures import ARCHITECTURES
from fusion_node.engine.block_manager_core import BLOCK_SLOTS
from fusion_node.engine.boundary import Boundary
from fusion_node.engine.fusion_group import FusionGroup, Sent
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.session_log_core import SessionLog, StepRows
from fusion_node.engine.shard_engine import PlannedBatch
from fusion_node.engine.slice_engine import SliceEngine
from fusion_node.engine.sliced_stage import FusedStep, SlicedStage
from fusion_node.engine.stage import Stage, StepInput
from fusion_node.engine.taps import Tapped
from fusion_node.errors import ConfigError, InvalidLayers, LocalProtocolError, ResourceExhausted, StoreCorrupted
from fusion_node.slices import Exchange, ModelSlice
from fusion_node.store import ModelStore, StoredModel
from fusion_node.types import LayerRange
from tests.engine.test_parity import FP32, LAYERS_ALIKE, LLAMA3, MAX_ERROR, YARN, Pipeline, run_mixed_batches
from tests.engine.test_shard_engine import Server, close_to
from tests.engine.tiny import TinyModel, tiny_model

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
F16R32 = numerics_class("f16r32")
WHOLE = LayerRange(0, 7)

FAMILIES = [name for name, family in ARCHITECTURES.items() if family.fuses]

GROUPS = [(1,), (5, 2), (1, 1, 1), (3, 1, 2, 1)]
"""Of two KV heads with two query heads each: from three members on KV heads are held twice, and four have a query head
each."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that share so little work mostly wait for one another, the longer the busier the machine is."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def whole(model_type: str) -> tuple[TinyModel, Stage]:
    """A model, and all of its layers."""
    model = fusing_model(model_type)
    return model, Stage.load(model, WHOLE, numerics=FP32, device=CPU)


def fusing_model(model_type: str, **overrides: Any) -> TinyModel:
    model = tiny_model(model_type, **{**LAYERS_ALIKE.get(model_type, {}), **overrides})
    with torch.no_grad():
        for name, tensor in model.whole.named_parameters():
            if name.endswith("norm.weight"):  # else all ones, of which any slice would do
                tensor.uniform_(0.5, 1.5)
    return model


def row_errors(ours_TD: torch.Tensor, theirs_TD: torch.Tensor) -> torch.Tensor:
    """Of each row the length of the difference, relative to the row's."""
    return (ours_TD - theirs_TD).norm(dim=1) / theirs_TD.norm(dim=1)


class Twins:
    """A stage and a group that are given the same steps, and compared after every layer.

    It stands in for a Stage and for its pool.
    """

    def __init__(self, stage: Stage, group: FusionGroup, num_slots: int) -> None:
        self.stage, self.group, self.pool = stage, group, stage.new_pool(num_slots)
        self.largest_errors: dict[int, float] = {}
        self._rows: dict[int, torch.Tensor] = {}
        group.on_layer = self._note

    @classmethod
    def load(
        cls,
        model: Any,
        weights: tuple[int, ...],
        *,
        numerics: str = "fp32",
        layers: LayerRange = WHOLE,
        slots: int = 700,
    ) -> Twins:
        of = numerics_class(numerics)
        stage = Stage.load(model, layers, numerics=of, device=CPU)
        return cls(stage, FusionGroup.load(model, layers, weights, numerics=of, num_slots=slots), slots)

    def _note(self, layer: int, rows: list[torch.Tensor]) -> None:
        self._rows[layer] = torch.cat(rows)

    def both(self, batch: Sequence[StepInput]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        own = range(self.stage.layers.start, self.stage.layers.stop)
        tapped = [Tapped(tuple(n + 1 for n in own), tuple(range(len(item.rows_TD)))) for item in batch]
        theirs = self.stage.forward(
            [replace(item, tapped=taps) for item, taps in zip(batch, tapped, strict=True)], self.pool
        )
        ours = self.group.forward(batch)
        for layer in own:
            of_stage = torch.cat([taps.found[layer + 1] for taps in tapped])
            error = float(row_errors(self._rows[layer], of_stage).max())
            self.largest_errors[layer] = max(error, self.largest_errors.get(layer, 0.0))
        return ours, theirs

    def forward(self, batch: Sequence[StepInput], pool: Any) -> list[torch.Tensor]:
        ours, _ = self.both(batch)
        return ours

    def move(self, move: Any) -> None:
        self.pool.move(move)
        self.group.move(move)


def piped(model: TinyModel, twins: Twins) -> Pipeline:
    """Sessions with prefill chunks, decodes and trees over the twins, whose slots lie in turn."""
    pipe = Pipeline(model, (0,))
    pipe.stages, pipe.pools = [twins], [twins]  # type: ignore[list-item]
    return pipe


def chain_step(rows_TD: torch.Tensor, first: int, run: range) -> StepInput:
    """Rows at the positions from ``first`` on, of a session whose slots are ``run``."""
    nodes = tuple(range(first + 1, first + len(rows_TD) + 1))
    step = StepRows(
        live_rows=tuple(range(len(rows_TD))),
        nodes=nodes,
        positions=tuple(node - 1 for node in nodes),
        first_slot=first,
        is_chain=True,
        visible=(),
        num_committed=0,
        move=None,
    )
    return StepInput(step, rows_TD, (run[: first + len(rows_TD)],))


def some_rows(count: int, seed: int = 5) -> torch.Tensor:
    return torch.randn((count, 48), generator=torch.Generator().manual_seed(seed))


# Results.


@pytest.mark.parametrize("weights", GROUPS, ids=str)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_after_every_layer_a_group_has_what_a_stage_has(model_type: str, weights: tuple[int, ...]) -> None:
    model, stage = whole(model_type)
    twins = Twins(stage, FusionGroup.load(model, WHOLE, weights, numerics=FP32, num_slots=700), 700)
    assert run_mixed_batches(piped(model, twins)) <= MAX_ERROR
    assert set(twins.largest_errors) == set(range(7))
    assert max(twins.largest_errors.values()) <= MAX_ERROR, twins.largest_errors


@pytest.mark.parametrize(
    ("model_type", "settings", "weights"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}, (2, 1, 1)),
        ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}, (1, 1, 1, 1)),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 8}, (3, 2, 1)),
        ("llama", {"hidden_size": 52, "intermediate_size": 97, "head_dim": 12}, (1, 2)),
        ("qwen2", {"num_attention_heads": 12, "hidden_size": 96, "num_key_value_heads": 2}, (1, 1, 1, 1, 1)),
        ("qwen3", {"rope_parameters": YARN}, (1, 3)),
        ("mistral", {"sliding_window": None, "head_dim": 20}, (1, 1)),
        ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}, (1, 1)),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, (dict, tuple)) else value,
)
def test_settings_within_a_family_make_no_difference(
    model_type: str, settings: dict[str, Any], weights: tuple[int, ...]
) -> None:
    model = fusing_model(model_type, **settings)
    twins = Twins.load(model, weights)
    assert run_mixed_batches(piped(model, twins)) <= MAX_ERROR
    assert max(twins.largest_errors.values()) <= MAX_ERROR, twins.largest_errors


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5])
def test_in_f16r32_a_group_is_as_near_to_float32_as_a_stage(model_type: str, scale: float) -> None:
    """And they are as near to each other as honest nodes are (docs/numerics.md), also with rows that no fp16 holds."""
    model, exact = whole(model_type)
    rows_TD = some_rows(40) * scale
    batch = [chain_step(rows_TD, 0, range(40))]
    (truth_TD,) = exact.forward(batch, exact.new_pool(40))
    (ours_TD,), (theirs_TD,) = Twins.load(model, (2, 1, 1), numerics="f16r32").both(batch)

    def distance(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(((a - b).norm(dim=1) / (truth_TD - rows_TD).norm(dim=1)).median())

    assert 1e-5 < distance(ours_TD, truth_TD) < 1.5 * distance(theirs_TD, truth_TD)
    # Two roundings that are independent of each other.
    assert distance(ours_TD, theirs_TD) < 2 * distance(theirs_TD, truth_TD)
    assert distance(theirs_TD, truth_TD) < 5e-3


def test_steps_that_pass_different_layers_meet_where_they_are_at_the_same_place() -> None:
    model, stage = whole("qwen3")
    group = FusionGroup.load(model, WHOLE, (1, 1), numerics=FP32, num_slots=90)
    ranges = [WHOLE, LayerRange(2, 5), LayerRange(4, 7), LayerRange(6, 7)]
    items = [chain_step(some_rows(9, seed), 0, range(9 * seed, 9 * seed + 9)) for seed in range(len(ranges))]
    met = dict.fromkeys(range(7), 0)
    group.on_layer = lambda layer, rows: met.update({layer: len(rows)})
    of_member: list[list[FusedStep]] = [[], []]
    for item, layers in zip(items, ranges, strict=True):
        for k, rows_Td in enumerate(group.cut(item.rows_TD)):
            of_member[k] += group.members[k].begin([replace(item, rows_TD=rows_Td)], layers)
    group.run(of_member)
    assert met == {0: 1, 1: 1, 2: 2, 3: 2, 4: 3, 5: 2, 6: 3}
    for i, (item, layers) in enumerate(zip(items, ranges, strict=True)):
        ours_TD = torch.cat([steps[i].rows_TD for steps in of_member], dim=1)
        (theirs_TD,) = stage.part(layers).forward([item], stage.new_pool(90))
        assert row_errors(ours_TD, theirs_TD).max() <= MAX_ERROR
        assert of_member[0][i].is_done


@pytest.mark.parametrize(
    ("model_type", "weights"), [("llama", (1, 1)), ("mistral", (2, 1, 1)), ("qwen3_moe", (1, 1, 1))]
)
def test_any_schedule_of_many_sessions_equals_the_whole_model(model_type: str, weights: tuple[int, ...]) -> None:
    """Through block managers: prefills cut into parts, decodes, trees, commits, and sessions that come and go."""
    model, rng = fusing_model(model_type), random.Random(len(weights))
    server = Server(model, num_blocks=12, max_rows=9)
    server.engine = GroupEngine.load(model, weights, num_blocks=12)  # type: ignore[assignment]
    chats = [server.open(50) for _ in range(4)]
    checked = 0
    for turn in range(14):
        for chat in chats:
            if chat is None or rng.random() < 0.3:
                continue
            first, room = max(chat.ids, default=0) + 1, chat.log.max_positions - chat.log.num_slots
            if room < 6:
                continue
            ids = [rng.randint(3, 130) for _ in range(20 if turn == 0 else 6)]
            hooks = [n for n in chat.live() if n >= chat.root] or [0]
            if turn == 0:
                parents = list(range(first - 1, first - 1 + len(ids)))
                advance = first + len(ids) - 1
            else:
                parents = [rng.choice([*hooks, *range(first, first + i)]) for i in range(len(ids))]
                advance = rng.choice([*hooks, first + rng.randrange(len(ids))])
            server.send(chat, ids, parents, advance)
        if turn == 8 and chats[0] is not None:
            server.close(chats[0])
            chats[0] = server.open(50)
        while server.waits():
            for chat, node, logits in server.run():
                if rng.random() < 0.6:
                    close_to(logits, server.reference(chat.path(node)))
                    checked += 1
    assert checked > 40


@dataclass
class GroupEngine:
    """The engines of all members in the place of one ShardEngine."""

    engines: list[SliceEngine]
    num_devices: int = 1

    @classmethod
    def load(cls, model: TinyModel, weights: tuple[int, ...], *, num_blocks: int) -> GroupEngine:
        engines = []
        for index in range(len(weights)):
            stage = SlicedStage.load(model, WHOLE, ModelSlice(index, weights), numerics=FP32, device=CPU)
            engines.append(SliceEngine(stage, kv_budget_bytes=num_blocks * BLOCK_SLOTS * stage.kv_bytes_per_position))
        return cls(engines)

    @property
    def blocks(self) -> GroupEngine:
        return self

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            first, *others = [getattr(engine.blocks, name)(*args, **kwargs) for engine in self.engines]
            assert all(each == first for each in others)
            return first

        return call

    def plan(self, layers: LayerRange, work: Any) -> list[PlannedBatch]:
        return [engine.plan(layers, work) for engine in self.engines]

    def change_kv(self, planned: list[PlannedBatch], *, device: int) -> None:
        for engine, batch in zip(self.engines, planned, strict=True):
            engine.change_kv(batch)

    def run(self, planned: list[PlannedBatch], rows: list[torch.Tensor], *, device: int) -> list[torch.Tensor]:
        """Rows are whole; an entry of the log may leave none alive."""
        has_rows = [index for index, x_TD in enumerate(rows) if len(x_TD)]
        group = _EngineGroup([engine.stages[0] for engine in self.engines])
        group.engines = self.engines
        of_member = []
        for engine, batch in zip(self.engines, planned, strict=True):
            columns = engine.columns
            kept = PlannedBatch(batch.layers, tuple(batch.items[i] for i in has_rows), ())
            own = [rows[i][:, columns.start : columns.stop] for i in has_rows]
            of_member.append(engine.begin(kept, own))
        group.run(of_member)
        out = list(rows)
        for place, index in enumerate(has_rows):
            out[index] = torch.cat([steps[place].rows_TD for steps in of_member], dim=1)
        return out


class _EngineGroup(FusionGroup):
    engines: list[SliceEngine]

    def compute(
        self, k: int, steps: Sequence[FusedStep], received: Sequence[Sequence[torch.Tensor]] | None
    ) -> list[list[torch.Tensor]] | None:
        return self.engines[k].phase(steps, received)


def test_rows_do_not_depend_on_what_they_are_computed_with_beyond_noise() -> None:
    group = FusionGroup.load(fusing_model("mixtral"), WHOLE, (1, 1, 1), numerics=FP32, num_slots=60)
    items = [chain_step(some_rows(count, count), 0, range(20 * n, 20 * n + 20)) for n, count in enumerate((1, 17, 5))]
    together = group.forward(items)
    for item, ours_TD in zip(items, together, strict=True):
        (alone_TD,) = group.forward([item])
        assert row_errors(ours_TD, alone_TD).max() <= MAX_ERROR


# What a member is sent, holds and keeps.


@pytest.mark.parametrize("model_type", ["qwen2", "mixtral"])
def test_contributions_are_as_wide_as_announced_and_sums_are_what_their_owner_needs(model_type: str) -> None:
    group = FusionGroup.load(fusing_model(model_type), WHOLE, (2, 1, 1), numerics=FP32, num_slots=40)
    sent: list[Sent] = []
    group.on_sent = sent.append
    items = [chain_step(some_rows(4), 0, range(20)), chain_step(some_rows(1), 0, range(20, 40))]
    group.forward(items)
    member = group.members[0]
    assert [(s.layer, s.exchange) for s in sent[:: 3 * 3]] == list(itertools.product(range(7), member.exchanges))
    assert {(s.exchange, s.owner): s.values_TW.shape for s in sent} == {
        (exchange, owner): (5, member.width(exchange, owner)) for exchange in member.exchanges for owner in range(3)
    }
    # The sum of squares that rides along with the first exchange is that of the rows.
    first = [s.values_TW[:, -1] for s in sent if s.layer == 0 and s.exchange is Exchange.QKV and s.owner == 1]
    rows_TD = torch.cat([item.rows_TD for item in items])
    torch.testing.assert_close(sum(first), rows_TD.square().sum(dim=1))


@pytest.mark.parametrize("weights", [(1, 1), (5, 2), (1, 1, 1, 1)], ids=str)
def test_keys_and_values_are_kept_by_their_owners_alone(weights: tuple[int, ...]) -> None:
    twins = Twins.load(fusing_model("qwen3"), weights, slots=20)
    twins.both([chain_step(some_rows(20), 0, range(20))])
    for member, pool in zip(twins.group.members, twins.group.pools, strict=True):
        heads = list(member.own.kv_heads)
        assert [layout.num_heads for layout in pool.layouts] == [len(heads)] * 7
        assert pool.bytes_per_slot == member.kv_bytes_per_position == 7 * len(heads) * 2 * 24 * 4
        for layer in range(7):
            ours, theirs = (p.read(layer, slice(0, 20), torch.float32) for p in (pool, twins.pool))
            for our_KSH, their_KSH in zip(ours, theirs, strict=True):
                torch.testing.assert_close(our_KSH, their_KSH[heads], rtol=1e-4, atol=1e-5)
    held = [set(member.own.kv_heads) for member in twins.group.members]
    if len(weights) <= 2:
        assert held == [{0}, {1}]


class Metered:
    """A source that hands out copies, and counts the bytes of those that are alive."""

    def __init__(self, model: TinyModel) -> None:
        self.model = model
        self.alive_bytes = self.peak_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def open_tensors(self, names: Iterable[str]) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
        for name, dtype, shape, data in self.model.open_tensors(names):
            copied = np.array(data)
            self.alive_bytes += copied.nbytes
            self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
            weakref.finalize(copied, self._freed, copied.nbytes)
            view = copied.data
            del copied
            yield name, dtype, shape, view
            del view

    def _freed(self, num_bytes: int) -> None:
        self.alive_bytes -= num_bytes


@pytest.mark.parametrize(
    ("model_type", "as_in_module"), [*((name, False) for name in FAMILIES), ("qwen3_moe", True), ("mixtral", True)]
)
def test_a_member_holds_its_share_of_the_weights_and_never_two_tensors_of_the_others(
    model_type: str, as_in_module: bool
) -> None:
    model = fusing_model(model_type, hidden_size=96, num_hidden_layers=5, as_in_module=as_in_module)
    layers = LayerRange(2, 4)
    all_bytes = Stage.load(model, layers, numerics=FP32, device=CPU).num_weight_bytes
    shares = []
    for index in range(4):
        source = Metered(model)
        read: list[tuple[str, int]] = []
        member = SlicedStage.load(
            source, layers, ModelSlice(index, (1,) * 4), numerics=FP32, device=CPU,  # type: ignore[arg-type]
            on_tensor=lambda name, num_bytes, read=read: read.append((name, num_bytes)),  # type: ignore[misc]
        )  # fmt: skip
        largest = max(t.nbytes for name, t in model.stored.items() if ".layers." in name)
        assert source.peak_bytes == largest
        assert source.alive_bytes == 0
        resident = sum(p.nbytes for layer in member._layers.values() for p in layer.parameters())
        assert resident == member.num_weight_bytes == sum(num_bytes for _, num_bytes in read)
        shares.append(resident / all_bytes)
    assert {int(name.split(".")[1]) for name, _ in read} == {2, 3}
    # Each KV head is held by two of the four, and the norms of heads by all.
    assert 1 <= sum(shares) < 1.25
    assert max(shares) < 0.32


# What is refused.


def load(model: TinyModel, weights: tuple[int, ...] = (1, 1), *, numerics: str = "fp32") -> SlicedStage:
    return SlicedStage.load(model, WHOLE, ModelSlice(0, weights), numerics=numerics_class(numerics), device=CPU)


@pytest.mark.parametrize("model_type", ["gemma2", "olmo2", "cohere2", "deepseek_v3", "gpt_oss"])
def test_a_family_that_does_not_fuse_is_refused_with_those_that_do(model_type: str) -> None:
    model = tiny_model(model_type)
    with pytest.raises(
        ConfigError, match=f"a {model_type} model cannot .*: llama, mistral, qwen2, qwen3, qwen3_moe, mix"
    ):
        load(model)
    assert model.read == []


def test_a_model_with_experts_in_some_layers_only_is_refused() -> None:
    with pytest.raises(ConfigError, match="only some layers of this model have experts"):
        load(tiny_model("qwen3_moe"))


@pytest.mark.parametrize("numerics", ["bf16", "fp16", "bf16+kv8"])
def test_a_class_without_float32_sums_is_refused(numerics: str) -> None:
    with pytest.raises(ConfigError, match=rf"in float32, which {re.escape(numerics)} has not: use fp32, f16r32"):
        load(tiny_model("llama"), numerics=numerics)


def test_quantised_weights_are_refused() -> None:
    model = tiny_model("llama")
    model = replace(model, config={**model.config, "quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(ConfigError, match=r"quantised \(fp8.*\): .* no fusion group can serve it"):
        load(model)


def test_more_members_than_query_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 query heads cannot be split among 5 members"):
        load(tiny_model("llama"), (1,) * 5)


def test_a_tensor_of_another_shape_is_refused() -> None:
    model = tiny_model("llama")
    name = "model.layers.3.mlp.down_proj.weight"
    changed = replace(model)
    changed.__dict__["stored"] = {**model.stored, name: torch.zeros(48, 95)}
    with pytest.raises(StoreCorrupted, match=r"layers\.3\.mlp\.down_proj\.weight .*\(48, 95\)"):
        load(changed)


def test_a_weight_beyond_fp16_is_refused_in_f16r32() -> None:
    model = fusing_model("mixtral")
    experts = model.whole.get_submodule("model.layers.6.mlp.experts")
    with torch.no_grad():
        experts.gate_up_proj[3, 5, 7] = 70_000.0  # type: ignore[index, operator]
    with pytest.raises(ConfigError, match="beyond the range of f16r32"):
        load(model, numerics="f16r32")


def test_kv_of_a_member_may_rest_in_int8() -> None:
    (model, exact), batch = whole("llama"), [chain_step(some_rows(30), 0, range(30))]
    (truth_TD,) = exact.forward(batch, exact.new_pool(30))
    (ours_TD,), (theirs_TD,) = Twins.load(model, (1, 1), numerics="fp32+kv8").both(batch)
    assert 0.5 < (ours_TD - truth_TD).norm() / (theirs_TD - truth_TD).norm() < 1.5


def test_layers_that_are_not_held_are_refused() -> None:
    member = load(tiny_model("llama"))
    item = chain_step(some_rows(1)[:, :24], 0, range(1))
    with pytest.raises(InvalidLayers, match="are not within"):
        member.begin([item], LayerRange(3, 8))


def test_rows_of_another_width_are_our_fault() -> None:
    with pytest.raises(LocalProtocolError, match="24 columns"):
        load(tiny_model("llama")).begin([chain_step(some_rows(1), 0, range(1))])


def waiting_step(group: FusionGroup) -> tuple[FusedStep, list[list[torch.Tensor]]]:
    """A step with the first member that waits for its first sums, and what came for it."""
    rows = group.cut(some_rows(3))
    steps = [m.begin([chain_step(r, 0, range(3))])[0] for m, r in zip(group.members, rows, strict=True)]
    sent = [group.compute(k, [step], None) for k, step in enumerate(steps)]
    assert all(out is not None for out in sent)
    return steps[0], [[out[0][0] for out in sent if out is not None]]


def test_contributions_of_too_few_members_or_of_another_width_are_our_fault() -> None:
    group = FusionGroup.load(fusing_model("llama"), WHOLE, (1, 1), numerics=FP32, num_slots=3)
    step, received = waiting_step(group)
    with pytest.raises(LocalProtocolError, match="1 members of 2"):
        group.compute(0, [step], [received[0][:1]])
    with pytest.raises(LocalProtocolError, match=r"contributions torch.float32 of \(3, 48\)"):
        group.compute(0, [step], [[part[:, 1:] for part in received[0]]])
    with pytest.raises(LocalProtocolError, match=r"contributions torch.float16"):
        group.compute(0, [step], [[part.half() for part in received[0]]])
    with pytest.raises(LocalProtocolError, match="different exchanges"):
        group.compute(0, [step], None)
    assert group.compute(0, [step], received) is not None
    assert step.position == (0, Exchange.O)


def test_a_phase_that_runs_out_of_memory_can_be_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    group = FusionGroup.load(fusing_model("llama"), WHOLE, (1, 1), numerics=FP32, num_slots=3)
    step, received = waiting_step(group)
    with monkeypatch.context() as full:

        def fails(*args: Any) -> None:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        full.setattr(group.pools[0], "write", fails)
        with pytest.raises(ResourceExhausted, match="no memory left on cpu"):
            group.compute(0, [step], received)
    assert step.position == (0, Exchange.QKV)
    again = group.compute(0, [step], received)
    other, same = waiting_step(FusionGroup.load(fusing_model("llama"), WHOLE, (1, 1), numerics=FP32, num_slots=3))
    expected = group.compute(0, [other], same)
    assert again is not None
    assert expected is not None
    for a, b in zip(again[0], expected[0], strict=True):
        assert torch.equal(a, b)


# Experts.


def test_members_choose_the_same_experts_when_scores_are_equal() -> None:
    member = load(fusing_model("mixtral"))
    layer = member._layers[0]
    sums_TW = torch.tensor([[2.0, 3.0, 3.0, 3.0, 48.0], [1.0, 1.0, 1.0, 1.0, 48.0], [-1.0, 5.0, 5.0, 9.0, 48.0]])
    routing = layer.route(sums_TW)
    assert routing.experts_Tk.tolist() == [[1, 2], [0, 1], [3, 1]]
    torch.testing.assert_close(routing.weights_Tk.sum(dim=1), torch.ones(3))
    torch.testing.assert_close(routing.weights_Tk[:2], torch.full((2, 2), 0.5))


# Memory and time.


def test_a_step_is_timed_for_a_member_alone() -> None:
    member = load(fusing_model("mixtral"), (1, 1, 1))
    assert 0 < member.measure_seconds(3, rounds=1) < 60


def test_what_is_kept_for_steps_goes_with_the_kv() -> None:
    model = fusing_model("llama")
    engine = GroupEngine.load(model, (1,), num_blocks=2).engines[0]
    assert engine.blocks.open("a", owner="someone", max_slots=8) == 0
    step = SessionLog(8).apply(0, first_node=1, num_rows=3, parent=0, advance=3)
    assert isinstance(step, StepRows)
    planned = engine.plan(WHOLE, [("a", step, 0, 3, True)])
    (fused,) = engine.begin(planned, [some_rows(3)])
    sent = engine.phase([fused], None)
    assert sent is not None
    assert engine.phase([fused], [sent[0]]) is not None
    pool = weakref.ref(engine._pool(0))
    assert not engine.release_kv()
    engine.blocks.close("a")
    assert engine.release_kv()
    assert pool() is None


# The built-in model.


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("weights", [(1, 1), (1, 1, 1), (1, 1, 1, 1)], ids=len)
def test_a_group_of_the_built_in_model_says_what_the_pipeline_says(
    weights: tuple[int, ...], builtin_model: StoredModel
) -> None:
    boundary = Boundary.load(builtin_model, numerics=FP32, device=CPU)
    layers = LayerRange(0, builtin_model.num_layers)
    stage = Stage.load(builtin_model, layers, numerics=FP32, device=CPU)
    twins = Twins(stage, FusionGroup.load(builtin_model, layers, weights, numerics=FP32, num_slots=128), 128)
    texts = ["The capital of France is", "def fibonacci(n):\n    "]
    tokenizer = Tokenizer.from_file(str(builtin_model.path / "tokenizer.json"))
    said: list[tuple[list[int], list[int]]] = [(tokenizer.encode(t).ids, tokenizer.encode(t).ids) for t in texts]
    for turn in range(32):
        batch = []
        for n, (ours, theirs) in enumerate(said):
            assert ours == theirs
            first = 0 if turn == 0 else len(ours) - 1
            batch.append(chain_step(boundary.embed(ours[first:]), first, range(64 * n, 64 * n + 64)))
        for which, result in enumerate(twins.both(batch)):
            for n, rows_TD in enumerate(result):
                said[n][which].append(int(boundary.logits(rows_TD[-1:])[0].argmax()))
    assert all(ours == theirs for ours, theirs in said)
    errors = " ".join(f"{error:.1e}" for _, error in sorted(twins.largest_errors.items()))
    print(f"\n{len(weights)} members, largest relative error of a row after each layer: {errors}")
    print([tokenizer.decode(ours) for ours, _ in said])
    assert max(twins.largest_errors.values()) <= MAX_ERROR


@pytest.mark.slow
def test_peak_memory_while_a_slice_is_loaded_is_little_more_than_the_slice(model_home: Path) -> None:
    ModelStore(model_home).pull("smollm2-135m")
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.test_fusion", str(model_home)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    took = json.loads(done.stdout)
    print(took)
    assert took["slice"] < 0.27 * took["whole"]
    # What the store's verifier reads ahead, and what torch itself takes.
    assert took["peak"] < took["slice"] + 64 * 2**20, took
    assert took["peak"] < 0.5 * took["whole"], took


def _print_memory(home: Path) -> None:
    model = ModelStore(home).find("smollm2-135m")
    layers = LayerRange(0, model.num_layers)
    # What is loaded once in a process is loaded before.
    SlicedStage.load(model, LayerRange(0, 1), ModelSlice(0, (1,) * 3), numerics=FP32, device=CPU)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on

    def resident(field: str) -> int:
        found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024

    before = resident("VmRSS")
    member = SlicedStage.load(model, layers, ModelSlice(3, (1,) * 4), numerics=FP32, device=CPU)
    peak = resident("VmHWM") - before
    whole = Stage.load(model, layers, numerics=FP32, device=CPU)
    print(json.dumps({"slice": member.num_weight_bytes, "peak": peak, "whole": whole.num_weight_bytes}))


if __name__ == "__main__":
    _print_memory(Path(sys.argv[1]))
