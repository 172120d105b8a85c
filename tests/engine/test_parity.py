"""Stages against the whole model: mixed packed batches of prefill, decode and tree steps over uneven ranges."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from fusion_node.engine.boundary import Boundary
from fusion_node.engine.device import prepare_thread
from fusion_node.engine.kv_cache import SessionKV
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.session_log_core import SessionLog, StepRows
from fusion_node.engine.stage import Stage, StepInput
from fusion_node.engine.weights import SUPPORTED_ARCHITECTURES
from fusion_node.errors import ConfigError, InvalidLayers, StoreCorrupted
from fusion_node.types import LayerRange
from tests.engine.tiny import TinyModel, tiny_model

CPU = torch.device("cpu")
FP32 = numerics_class("fp32")


@dataclass
class Sequence:
    """One session over all stages, each with its own log and KV, as on separate nodes."""

    logs: list[SessionLog]
    kvs: list[SessionKV]
    ids: dict[int, int] = field(default_factory=dict)
    parents: dict[int, int] = field(default_factory=dict)
    sequence: int = 0

    def path(self, node: int) -> list[int]:
        ids: list[int] = []
        while node:
            ids.append(self.ids[node])
            node = self.parents[node]
        return ids[::-1]


class Pipeline:
    def __init__(self, model: TinyModel, cuts: tuple[int, ...] = (0, 1, 5, 7)) -> None:
        self.model = model
        self.boundary = Boundary.load(model, numerics=FP32, device=CPU)
        ranges = [LayerRange(a, b) for a, b in itertools.pairwise(cuts)]
        self.stages = [Stage.load(model, layers, numerics=FP32, device=CPU) for layers in ranges]

    def session(self, max_positions: int = 200) -> Sequence:
        return Sequence(
            [SessionLog(max_positions) for _ in self.stages], [s.new_kv(max_positions) for s in self.stages]
        )

    def step(self, *work: tuple[Sequence, list[int], list[int], int]) -> list[np.ndarray]:
        """Each work item: session, token ids, parents, advance. Returns logits of the live rows per session."""
        rows = [self.boundary.embed(ids) for _, ids, _, _ in work]
        for seq, ids, parents, _ in work:
            first = max(seq.ids, default=0) + 1
            for i, (token, parent) in enumerate(zip(ids, parents, strict=True)):
                seq.ids[first + i], seq.parents[first + i] = token, parent
        for index, stage in enumerate(self.stages):
            batch = []
            for (seq, ids, parents, advance), r in zip(work, rows, strict=True):
                step = seq.logs[index].apply(
                    seq.sequence,
                    first_node=max(seq.ids) - len(ids) + 1,
                    num_rows=len(ids),
                    parent=parents[0],
                    parents=tuple(parents),
                    advance=advance,
                )
                assert isinstance(step, StepRows)
                live = r if len(r) == len(step.live_rows) else r[list(step.live_rows)]
                batch.append(StepInput(seq.kvs[index], step, live))
            rows = stage.forward(batch)
        for seq, *_ in work:
            seq.sequence += 1
        return [self.boundary.logits(r) for r in rows]

    def reference(self, ids: list[int]) -> np.ndarray:
        with torch.inference_mode():
            return self.model.whole(input_ids=torch.tensor([ids])).logits[0, -1].numpy()  # type: ignore[operator]


def close(ours: np.ndarray, reference: np.ndarray) -> None:
    assert np.abs(ours - reference).max() <= 1e-5 * np.abs(reference).max()


@pytest.mark.parametrize("model_type", SUPPORTED_ARCHITECTURES)
def test_mixed_packed_batches_over_uneven_stages_equal_the_whole_model(model_type: str) -> None:
    pipe = Pipeline(tiny_model(model_type))
    rng = np.random.default_rng(7)

    def tokens(n: int) -> list[int]:
        return [int(t) for t in rng.integers(3, 131, n)]

    a, b, c = pipe.session(), pipe.session(), pipe.session()
    chain = lambda first, n: [first - 1 + i for i in range(n)]  # noqa: E731
    (la,) = pipe.step((a, tokens(9), chain(1, 9), 9))
    close(la[-1], pipe.reference(a.path(9)))
    # prefill chunk of b, decode of a, in one call
    lb, la = pipe.step((b, tokens(17), chain(1, 17), 0), (a, tokens(1), [9], 10))
    close(la[-1], pipe.reference(a.path(10)))
    close(lb[-1], pipe.reference(b.path(17)))
    # a tree on a, a second prefill chunk on b, a first prefill of c
    tree = [10, 10, 11, 11, 12, 13]
    la, lb, lc = pipe.step((a, tokens(6), tree, 0), (b, tokens(5), chain(18, 5), 22), (c, tokens(30), chain(1, 30), 30))
    for i in range(6):
        close(la[i], pipe.reference(a.path(11 + i)))
    close(lb[-1], pipe.reference(b.path(22)))
    close(lc[-1], pipe.reference(c.path(30)))
    # a keeps the branch 12 → 15 (its KV moves), and goes on from there
    la, lb = pipe.step((a, tokens(2), [15, 17], 15), (b, tokens(1), [22], 23))
    close(la[-1], pipe.reference(a.path(18)))
    close(lb[-1], pipe.reference(b.path(23)))


def test_kv_grows_beyond_its_first_capacity_and_stays_exact() -> None:
    pipe = Pipeline(tiny_model("llama", max_position_embeddings=1024))
    seq = pipe.session(max_positions=700)
    ids = [int(t) for t in np.random.default_rng(3).integers(3, 131, 640)]
    node = 0
    for start in range(0, 640, 128):
        (logits,) = pipe.step((seq, ids[start : start + 128], list(range(node, node + 128)), node + 128))
        node += 128
    close(logits[-1], pipe.reference(ids))


def test_layers_outside_the_model_are_refused() -> None:
    with pytest.raises(InvalidLayers, match="has 7 layers"):
        Stage.load(tiny_model("llama"), LayerRange(3, 8), numerics=FP32, device=CPU)


def test_unsupported_architecture_is_refused_before_any_weight_with_the_list() -> None:
    model = tiny_model("llama")
    other = TinyModel(model.path, model.name, {**model.config, "model_type": "gpt2"}, torch.nn.Module())
    with pytest.raises(ConfigError, match="llama, mistral"):
        Stage.load(other, LayerRange(0, 1), numerics=FP32, device=CPU)


def test_a_part_of_a_stage_computes_only_its_layers() -> None:
    model = tiny_model("qwen3")
    pipe = Pipeline(model, cuts=(0, 2, 7))
    whole = Stage.load(model, LayerRange(0, 7), numerics=FP32, device=CPU)
    pipe.stages = [
        whole.part(LayerRange(0, 3)),
        whole.part(LayerRange(3, 7)).part(LayerRange(3, 6)),
        pipe.stages[1].part(LayerRange(6, 7)),
    ]
    seq = pipe.session()
    pipe.step((seq, [5, 6, 7], [0, 1, 2], 3))
    (logits,) = pipe.step((seq, [9], [3], 4))
    close(logits[-1], pipe.reference([5, 6, 7, 9]))
    with pytest.raises(InvalidLayers, match="not within"):
        pipe.stages[1].part(LayerRange(2, 5))


def test_a_checkpoint_without_a_tensor_is_refused_by_its_name() -> None:
    model = tiny_model("llama")
    short = TinyModel(model.path, model.name, {**model.config, "num_hidden_layers": 8}, model.whole)
    with pytest.raises(StoreCorrupted, match=r"lacks model\.layers\.7\."):
        Stage.load(short, LayerRange(6, 8), numerics=FP32, device=CPU)


def test_first_step_on_a_new_thread_has_the_bits_of_all_later_ones() -> None:
    stage = Stage.load(tiny_model("llama"), LayerRange(0, 7), numerics=FP32, device=CPU)
    rows = torch.randn((9, 48), generator=torch.Generator().manual_seed(1))

    def bits() -> bytes:
        step = SessionLog(16).apply(0, first_node=1, num_rows=9, parent=0)
        assert isinstance(step, StepRows)
        return stage.forward([StepInput(stage.new_kv(16), step, rows)])[0].numpy().tobytes()

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
    close(alive[-1], pipe.reference([5, 6, 7]))
    (logits,) = pipe.step((seq, [10], [4], 6))
    close(logits[-1], pipe.reference([5, 6, 8, 10]))
