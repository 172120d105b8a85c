"""Stages against the whole model: mixed packed batches of prefill, decode and tree steps over uneven ranges.

``python -m tests.engine.test_parity`` writes the table of docs/architectures.md anew, from what it measures.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fusion_node.engine.architectures import ARCHITECTURES, SUPPORTED_ARCHITECTURES, load_config, max_positions
from fusion_node.engine.attention import Group
from fusion_node.engine.block_manager_core import SlotMove
from fusion_node.engine.boundary import Boundary
from fusion_node.engine.device import prepare_thread
from fusion_node.engine.fusion_group import FusionGroup
from fusion_node.engine.kv_cache import KVLayout, KVPool
from fusion_node.engine.latent_attention import is_cheaper_absorbed
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.session_log_core import SessionLog, StepRows
from fusion_node.engine.stage import Stage, StepInput
from fusion_node.errors import ConfigError, InvalidLayers
from fusion_node.types import LayerRange
from tests.engine.tiny import TINY, TinyModel, tiny_model

CPU = torch.device("cpu")
FP32 = numerics_class("fp32")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "architectures.md"
MAX_ERROR = 1e-5
"""Relative to the largest logit: float32's noise over seven layers, with a margin of ten."""

BLOCK_SLOTS = 8
NUM_SESSIONS = 3
"""Blocks of the pool are dealt out in turn, so that no session's slots lie side by side for more than a block."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that share so little work mostly wait for one another, the longer the busier the machine is."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Sequence:
    """One session over all stages, each with its own log, as on separate nodes."""

    index: int
    logs: list[SessionLog]
    ids: dict[int, int] = field(default_factory=dict)
    parents: dict[int, int] = field(default_factory=dict)
    sequence: int = 0

    def path(self, node: int) -> list[int]:
        ids: list[int] = []
        while node:
            ids.append(self.ids[node])
            node = self.parents[node]
        return ids[::-1]

    def place(self, slot: int) -> int:
        """Where in the pool a slot of this session lies."""
        block, offset = divmod(slot, BLOCK_SLOTS)
        return (block * NUM_SESSIONS + self.index) * BLOCK_SLOTS + offset

    def runs(self, num_slots: int) -> tuple[range, ...]:
        firsts = range(0, num_slots, BLOCK_SLOTS)
        return tuple(range(self.place(s), self.place(s) + min(BLOCK_SLOTS, num_slots - s)) for s in firsts)


class Pipeline:
    def __init__(self, model: TinyModel, cuts: tuple[int, ...] = (0, 1, 5, 7), max_positions: int = 200) -> None:
        self.model = model
        self.max_positions = max_positions
        self.boundary = Boundary.load(model, numerics=FP32, device=CPU)
        ranges = [LayerRange(a, b) for a, b in itertools.pairwise(cuts)]
        self.stages = [Stage.load(model, layers, numerics=FP32, device=CPU) for layers in ranges]
        self.pools = self.new_pools()
        self._num_sessions = 0

    def new_pools(self) -> list[KVPool]:
        return [stage.new_pool(NUM_SESSIONS * (self.max_positions + BLOCK_SLOTS)) for stage in self.stages]

    def session(self) -> Sequence:
        self._num_sessions += 1
        assert self._num_sessions <= NUM_SESSIONS
        return Sequence(self._num_sessions - 1, [SessionLog(self.max_positions) for _ in self.stages])

    def step(self, *work: tuple[Sequence, list[int], list[int], int]) -> list[npt.NDArray[np.float32]]:
        """Each work item: session, token ids, parents, advance. Returns logits of the live rows per session."""
        rows = [self.boundary.embed(ids) for _, ids, _, _ in work]
        for seq, ids, parents, _ in work:
            first = max(seq.ids, default=0) + 1
            for i, (token, parent) in enumerate(zip(ids, parents, strict=True)):
                seq.ids[first + i], seq.parents[first + i] = token, parent
        for index, (stage, pool) in enumerate(zip(self.stages, self.pools, strict=True)):
            steps = [self._apply(index, *item) for item in work]
            batch = []
            for (seq, *_), step, r in zip(work, steps, rows, strict=True):
                if step.move is not None:
                    first, sources = step.move.first_slot, step.move.sources
                    targets = [seq.place(first + i) for i in range(len(sources))]
                    pool.move(SlotMove(tuple(map(seq.place, sources)), tuple(targets)))
                if step.live_rows:
                    live = r if len(r) == len(step.live_rows) else r[list(step.live_rows)]
                    batch.append(StepInput(step, live, seq.runs(step.first_slot + len(live))))
            outputs = iter(stage.forward(batch, pool))
            rows = [next(outputs) if step.live_rows else r[:0] for step, r in zip(steps, rows, strict=True)]
        for seq, *_ in work:
            seq.sequence += 1
        return [self.boundary.logits(r) for r in rows]

    def _apply(self, index: int, seq: Sequence, ids: list[int], parents: list[int], advance: int) -> StepRows:
        step = seq.logs[index].apply(
            seq.sequence,
            first_node=max(seq.ids) - len(ids) + 1,
            num_rows=len(ids),
            parent=parents[0],
            parents=tuple(parents),
            advance=advance,
        )
        assert isinstance(step, StepRows)
        return step

    def largest_error(self, rows: list[tuple[npt.NDArray[np.float32], list[int]]]) -> float:
        """Largest difference of a row from the whole model's after these tokens, relative to its largest logit."""
        references: dict[tuple[int, ...], npt.NDArray[np.float32]] = {}
        # The longest first: the whole model says in one call what comes after each of its beginnings.
        for ids in sorted((ids for _, ids in rows), key=len, reverse=True):
            if tuple(ids) not in references:
                with torch.inference_mode():
                    logits_TV = self.model.whole(input_ids=torch.tensor([ids])).logits[0].numpy()
                references |= {tuple(ids[: n + 1]): logits for n, logits in enumerate(logits_TV)}
        pairs = [(row, references[tuple(ids)]) for row, ids in rows]
        return max(float(np.abs(row - reference).max() / np.abs(reference).max()) for row, reference in pairs)


def chain(first: int, n: int) -> list[int]:
    return list(range(first - 1, first - 1 + n))


def run_mixed_batches(pipe: Pipeline) -> float:
    """Prefill chunks, decodes and a tree of three sessions; returns the largest error of all rows that were checked."""
    rng = np.random.default_rng(7)

    def tokens(n: int) -> list[int]:
        return [int(t) for t in rng.integers(3, 131, n)]

    a, b, c = pipe.session(), pipe.session(), pipe.session()
    rows = []
    (la,) = pipe.step((a, tokens(9), chain(1, 9), 9))
    rows.append((la[-1], a.path(9)))
    # prefill chunk of b, decode of a, in one call
    lb, la = pipe.step((b, tokens(17), chain(1, 17), 0), (a, tokens(1), [9], 10))
    rows += [(la[-1], a.path(10)), (lb[-1], b.path(17))]
    # a tree on a, a second prefill chunk on b, a first prefill of c
    tree = [10, 10, 11, 11, 12, 13]
    la, lb, lc = pipe.step((a, tokens(6), tree, 0), (b, tokens(5), chain(18, 5), 22), (c, tokens(30), chain(1, 30), 30))
    rows += [(la[i], a.path(11 + i)) for i in range(6)]
    rows += [(lb[-1], b.path(22)), (lc[-1], c.path(30))]
    # a keeps the branch 12 → 15 (its KV moves), and goes on from there; b and c decode beside it
    la, lb, lc = pipe.step((a, tokens(2), [15, 17], 15), (b, tokens(1), [22], 23), (c, tokens(1), [30], 31))
    rows += [(la[-1], a.path(18)), (lb[-1], b.path(23)), (lc[-1], c.path(31))]
    return pipe.largest_error(rows)


YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {"rope_parameters": LLAMA3, "attention_bias": True}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}}),
        ("qwen3", {"rope_parameters": YARN}),
        ("mistral", {"sliding_window": None, "head_dim": 20}),
        ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}, "q_lora_rank": None}),
        ("deepseek_v3", {"rope_interleave": False, "first_k_dense_replace": 0, "kv_lora_rank": 128}),
        ("glm_moe_dsa", {"indexer_types": ["full"] * 7, "index_topk": 12}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_settings_within_a_family_make_no_difference(model_type: str, settings: dict[str, object]) -> None:
    assert run_mixed_batches(Pipeline(tiny_model(model_type, **settings))) <= MAX_ERROR


ORDINARY = {
    "sliding_window": 250, "sliding_window_pattern": 1, "max_window_layers": 7, "attn_logit_softcapping": None,
    "final_logit_softcapping": None, "no_rope_layer_interval": 8, "partial_rotary_factor": 1.0, "logit_scale": 1.0,
    "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0,
    "index_topk": 250, "topk_group": 2, "norm_topk_prob": False, "clip_qkv": None, "rotary_dim": 16,
}  # fmt: skip
"""What a setting of the tiny models would be in a model without it."""


@pytest.mark.parametrize(
    ("model_type", "key"), [(name, key) for name, settings in TINY.items() for key in settings if key in ORDINARY]
)
def test_what_is_particular_about_a_tiny_model_shows_in_its_logits(model_type: str, key: str) -> None:
    model, ordinary = tiny_model(model_type), tiny_model(model_type, **{key: ORDINARY[key]})
    ordinary.whole.load_state_dict(model.whole.state_dict())
    ids = torch.arange(3, 33)[None]
    with torch.inference_mode():
        ours, theirs = model.whole(input_ids=ids).logits, ordinary.whole(input_ids=ids).logits
    assert (ours - theirs).abs().max() > 1000 * MAX_ERROR * ours.abs().max()


# The table of architectures.


@dataclass(frozen=True)
class Row:
    """One line of the table: everything in it is the same on every machine."""

    model_type: str
    kv: str
    max_error: float
    fused_error: float | None
    """Of a fusion group; None for a family that does not fuse."""

    def __str__(self) -> str:
        family = ARCHITECTURES[self.model_type]
        wrapped = f", in `{family.wrapped_by}`" if family.wrapped_by else ""
        features = ", ".join(family.features) or "—"
        fused = "—" if self.fused_error is None else bound_above(self.fused_error)
        return f"| `{self.model_type}`{wrapped} | {features} | {self.kv} | {bound_above(self.max_error)} | {fused} |"


def bound_above(error: float) -> str:
    """A power of ten above it, and not below what is asked for: the digits differ from machine to machine."""
    return f"{10 ** math.ceil(math.log10(max(error, MAX_ERROR))):.0e}"


LAYERS_ALIKE: dict[str, dict[str, object]] = {"qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": []}}
"""What differs from the tiny models where a fusion group serves them: all layers or none have experts."""


class Fused:
    """A fusion group of three members in the place of a stage and of its pool."""

    def __init__(self, model: TinyModel, num_slots: int) -> None:
        self.group = FusionGroup.load(model, LayerRange(0, 7), (2, 1, 1), numerics=FP32, num_slots=num_slots)

    def forward(self, batch: list[StepInput], pool: object) -> list[torch.Tensor]:
        return self.group.forward(batch)

    def move(self, move: SlotMove) -> None:
        self.group.move(move)


@cache
def measured_fused(model_type: str) -> float | None:
    if not ARCHITECTURES[model_type].fuses:
        return None
    model = tiny_model(model_type, **LAYERS_ALIKE.get(model_type, {}))
    pipe = Pipeline(model, cuts=(0,))
    fused = Fused(model, NUM_SESSIONS * (pipe.max_positions + BLOCK_SLOTS))
    pipe.stages, pipe.pools = [fused], [fused]  # type: ignore[list-item]
    return run_mixed_batches(pipe)


@cache
def measured(model_type: str) -> Row:
    pipe = Pipeline(tiny_model(model_type))
    layouts = {layout for stage in pipe.stages for layout in stage.kv_layouts}
    heads = [f"{k.num_heads} × ({k.key_dim} + {k.value_dim})" for k in sorted(layouts, key=lambda k: k.value_dim)]
    return Row(model_type, ", ".join(heads), run_mixed_batches(pipe), measured_fused(model_type))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_mixed_packed_batches_over_uneven_stages_equal_the_whole_model(model_type: str) -> None:
    assert measured(model_type).max_error <= MAX_ERROR


def test_what_is_said_to_fuse_equals_the_whole_model_as_a_group() -> None:
    errors = [measured_fused(name) for name, family in ARCHITECTURES.items() if family.fuses]
    assert len(errors) >= 5
    assert all(error is not None and error <= MAX_ERROR for error in errors)


def table() -> str:
    head = (
        "| `model_type` | beside the plain form | KV per position and layer | largest error below | in a fusion group |"
    )
    return "\n".join([head, "| --- | --- | --- | --- | --- |", *(str(measured(name)) for name in ARCHITECTURES)])


def page_as_it_should_be() -> str:
    marked = re.compile(r"(<!-- table -->\n).*?(<!-- end -->)", re.DOTALL)
    text, count = marked.subn(lambda found: f"{found[1]}\n{table()}\n\n{found[2]}", PAGE.read_text(encoding="utf-8"))
    assert count == 1, f"{PAGE.name} has {count} places for the table"
    return text


def test_the_page_has_the_table_that_was_measured() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page_as_it_should_be(), "run python -m tests.engine.test_parity"


# Ranges of layers.


def test_a_long_prompt_in_chunks_is_exact() -> None:
    pipe = Pipeline(tiny_model("llama", max_position_embeddings=1024), max_positions=700)
    seq = pipe.session()
    ids = [int(t) for t in np.random.default_rng(3).integers(3, 131, 640)]
    node = 0
    for start in range(0, 640, 128):
        (logits,) = pipe.step((seq, ids[start : start + 128], list(range(node, node + 128)), node + 128))
        node += 128
    assert pipe.largest_error([(logits[-1], ids)]) <= MAX_ERROR


def test_a_long_sequence_does_not_change_the_rotary_frequencies_of_another() -> None:
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 32, **factors}
    model = tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=32)
    assert max_positions(load_config(model)) == 32
    pipe = Pipeline(model)
    short, long = pipe.session(), pipe.session()
    ids = [int(t) for t in np.random.default_rng(3).integers(3, 131, 60)]
    pipe.step((short, ids[:20], chain(1, 20), 20))
    _, logits = pipe.step((long, ids, chain(1, 60), 60), (short, [9], [20], 21))
    assert pipe.largest_error([(logits[-1], [*ids[:20], 9])]) <= MAX_ERROR


def test_a_range_that_needs_the_choice_of_a_layer_before_it_is_refused() -> None:
    model = tiny_model("glm_moe_dsa")
    with pytest.raises(InvalidLayers, match="begins at one of the layers 0, 1, 2, 5"):
        Stage.load(model, LayerRange(3, 7), numerics=FP32, device=CPU)
    assert model.read == []
    stage = Stage.load(model, LayerRange(1, 7), numerics=FP32, device=CPU)
    with pytest.raises(InvalidLayers, match="layer 4 attends"):
        stage.part(LayerRange(4, 6))
    # Only a layer that chooses keeps keys to choose by.
    assert [k.value_dim for k in stage.part(LayerRange(2, 5)).kv_layouts] == [12, 0, 0]


def test_few_tokens_attend_to_latents_as_they_are_and_many_expand_them() -> None:
    stage = Stage.load(tiny_model("deepseek_v3"), LayerRange(2, 4), numerics=FP32, device=CPU)
    # One head whose key is latent and rotary part together, and no value beside it.
    assert set(stage.kv_layouts) == {KVLayout(1, 16 + 8, 0)}
    module = stage._model.get_submodule("layers.3.self_attn")
    assert is_cheaper_absorbed(module, Group(slice(0, 1), slice(0, 40)), 1)
    assert is_cheaper_absorbed(module, Group(torch.arange(3), torch.arange(120), num_sequences=3), 3)
    assert not is_cheaper_absorbed(module, Group(slice(0, 40), slice(0, 40)), 40)


def test_layers_outside_the_model_are_refused() -> None:
    with pytest.raises(InvalidLayers, match="has 7 layers"):
        Stage.load(tiny_model("llama"), LayerRange(3, 8), numerics=FP32, device=CPU)


def test_unsupported_architecture_is_refused_before_any_weight_with_the_list() -> None:
    model = tiny_model("llama")
    other = replace(model, config={**model.config, "model_type": "gpt2"})
    with pytest.raises(ConfigError, match="'gpt2'") as refused:
        Stage.load(other, LayerRange(0, 1), numerics=FP32, device=CPU)
    assert all(name in str(refused.value) for name in SUPPORTED_ARCHITECTURES)
    assert other.read == []


def test_a_model_whose_tokens_see_later_ones_is_refused() -> None:
    model = tiny_model("gemma3_text", use_bidirectional_attention=True)
    with pytest.raises(ConfigError, match="not a decoder"):
        Stage.load(model, LayerRange(0, 1), numerics=FP32, device=CPU)


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text", "qwen3_moe"])
def test_a_part_of_a_stage_computes_only_its_layers(model_type: str) -> None:
    model = tiny_model(model_type)
    pipe = Pipeline(model, cuts=(0, 2, 7))
    whole = Stage.load(model, LayerRange(0, 7), numerics=FP32, device=CPU)
    tail = pipe.stages[1]
    pipe.stages = [
        whole.part(LayerRange(0, 3)),
        whole.part(LayerRange(3, 7)).part(LayerRange(3, 6)),
        tail.part(LayerRange(6, 7)),
    ]
    # A part writes into the pool of the stage that it is a part of.
    num_slots = pipe.pools[0].num_slots
    pool = whole.new_pool(num_slots)
    pipe.pools = [pool, pool, tail.new_pool(num_slots)]
    seq = pipe.session()
    pipe.step((seq, [5, 6, 7], [0, 1, 2], 3))
    (logits,) = pipe.step((seq, [9], [3], 4))
    assert pipe.largest_error([(logits[-1], [5, 6, 7, 9])]) <= MAX_ERROR
    with pytest.raises(InvalidLayers, match="not within"):
        tail.part(LayerRange(1, 5))


def test_first_step_on_a_new_thread_has_the_bits_of_all_later_ones() -> None:
    stage = Stage.load(tiny_model("llama"), LayerRange(0, 7), numerics=FP32, device=CPU)
    rows = torch.randn((9, 48), generator=torch.Generator().manual_seed(1))

    def bits() -> bytes:
        step = SessionLog(16).apply(0, first_node=1, num_rows=9, parent=0)
        assert isinstance(step, StepRows)
        return stage.forward([StepInput(step, rows, (range(9),))], stage.new_pool(16))[0].numpy().tobytes()

    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        with ThreadPoolExecutor(1, initializer=prepare_thread) as device:
            assert len({device.submit(bits).result() for _ in range(3)}) == 1
    finally:
        torch.set_num_threads(before)


def test_step_whose_rows_are_all_dead_is_applied_and_computes_nothing() -> None:
    pipe = Pipeline(tiny_model("llama"))
    seq = pipe.session()
    pipe.step((seq, [5, 6], [0, 1], 2))
    pipe.step((seq, [7, 8], [2, 2], 0))
    # Its row hangs on node 3, and it advances to node 4: nothing of it lives. The other session computes as ever.
    other = pipe.session()
    dead, alive = pipe.step((seq, [9], [3], 4), (other, [5, 6, 7], [0, 1, 2], 3))
    assert len(dead) == 0
    assert pipe.largest_error([(alive[-1], [5, 6, 7])]) <= MAX_ERROR
    (logits,) = pipe.step((seq, [10], [4], 6))
    assert pipe.largest_error([(logits[-1], [5, 6, 8, 10])]) <= MAX_ERROR


if __name__ == "__main__":
    PAGE.write_text(page_as_it_should_be(), encoding="utf-8")
