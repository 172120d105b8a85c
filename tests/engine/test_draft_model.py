"""The draft model's tree in one KV pool, against the whole model run anew for every path."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_node.engine import draft_model
from fusion_node.engine.draft_model import DraftModel, DraftModelDrafter
from fusion_node.engine.drafts import Verified
from fusion_node.engine.numerics import numerics_class
from fusion_node.errors import ConfigError, LocalProtocolError
from tests.engine.tiny import TinyModel, tiny_model

FP32, CPU = numerics_class("fp32"), torch.device("cpu")
VOCABULARY = 131


def load(tiny: TinyModel, vocabulary: int = VOCABULARY) -> DraftModel:
    return DraftModel.load(tiny, vocabulary=vocabulary, numerics=FP32, device=CPU)


@torch.inference_mode()
def alone(tiny: TinyModel, text: Sequence[int], path: Sequence[int]) -> npt.NDArray[np.float32]:
    """Probabilities ``[V]`` of what follows, by transformers, without any tree."""
    logits = tiny.whole(input_ids=torch.tensor([[*text, *path]])).logits[0, -1]
    return logits.float().softmax(dim=0).numpy()


def assert_as_alone(tiny: TinyModel, text: Sequence[int], path: Sequence[int], found: list[tuple[int, float]]) -> None:
    expected = alone(tiny, text, path)
    assert [token for token, _ in found] == np.argsort(-expected, kind="stable")[: len(found)].tolist()
    assert max(abs(share - expected[token]) for token, share in found) < 1e-5


def poison_free_slots(drafter: DraftModelDrafter) -> None:
    """What no live node has may hold anything: a NaN that is read shows in every number behind it."""
    pool = drafter._kv
    for tensor_KPH in pool._tensors():
        tensor_KPH[:, drafter._log.num_slots :] = torch.nan


@pytest.fixture(scope="module")
def llama() -> tuple[TinyModel, DraftModel]:
    tiny = tiny_model("llama", num_hidden_layers=3)
    return tiny, load(tiny)


# sliding windows, latent attention and experts: what a tree could go wrong with
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "deepseek_v3", "gpt_oss", "cohere2"])
def test_eight_paths_in_one_forward_are_as_each_alone(model_type: str) -> None:
    tiny = tiny_model(model_type)
    drafter = load(tiny).drafter(200)
    text = [(7 * i) % VOCABULARY for i in range(30)]
    drafter.begin(text)
    paths = [(), (5,), (6,), (5, 9), (5, 9, 9), (6, 5), (9, 9, 5, 6), (5, 6, 7, 8)]
    for path, found in zip(paths, drafter.propose(paths, 8), strict=True):
        assert_as_alone(tiny, text, path, found)
    assert drafter.num_rows_computed == len(text) + 12


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), chunk=st.sampled_from([3, 8, 512]), most=st.sampled_from([6, 384]))
def test_drafts_are_as_computed_anew_while_the_text_takes_and_leaves_branches(
    llama: tuple[TinyModel, DraftModel], seed: int, chunk: int, most: int
) -> None:
    tiny, model = llama
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_model, "MAX_CHUNK_ROWS", chunk)
        patch.setattr(draft_model, "MAX_TREE_ROWS", most)
        drafter = model.drafter(90)
        text = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 20))]
        drafter.begin(text)
        for _ in range(8):
            paths = [[rng.randrange(3) for _ in range(rng.randrange(5))] for _ in range(rng.randrange(1, 9))]
            for path, found in zip(paths, drafter.propose(paths, 4), strict=True):
                if found:
                    assert_as_alone(tiny, text, path, found)
            drafter._log.check_integrity()
            poison_free_slots(drafter)
            tokens = [rng.randrange(3) for _ in range(rng.randrange(4))]
            drafter.extend(Verified(tokens))
            text += tokens
        while not (found := drafter.propose([()], 4)[0]):
            assert drafter._num_computed < len(text)
        assert_as_alone(tiny, text, (), found)


def test_nothing_that_the_text_has_taken_is_computed_again(llama: tuple[TinyModel, DraftModel]) -> None:
    tiny, model = llama
    drafter = model.drafter(100)
    text = [1, 2, 3, 4, 5]
    drafter.begin(text)
    drafter.propose([()], 4)
    drafter.propose([(7,), (8,)], 4)
    drafter.propose([(7, 7), (7, 8), (8, 7)], 4)
    assert drafter.num_rows_computed == 10
    drafter.extend(Verified([7, 8]))
    found = drafter.propose([(), (9,)], 4)
    assert drafter.num_rows_computed == 11
    for path, candidates in zip([(), (9,)], found, strict=True):
        assert_as_alone(tiny, [*text, 7, 8], path, candidates)
    drafter.propose([(), (9,)], 4)
    assert drafter.num_rows_computed == 11


def test_long_prompt_is_computed_in_calls_of_bounded_size(llama: tuple[TinyModel, DraftModel]) -> None:
    tiny, model = llama
    text = [(11 * i) % VOCABULARY for i in range(100)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_model, "MAX_CHUNK_ROWS", 40)
        drafter = model.drafter(200)
        drafter.begin(text)
        assert [drafter.propose([(3,)], 2) for _ in range(2)] == [[[]], [[]]]
        (found,) = drafter.propose([(3,)], 2)
        assert_as_alone(tiny, text, (3,), found)


def test_tree_is_bounded_until_the_text_grows(llama: tuple[TinyModel, DraftModel]) -> None:
    tiny, model = llama
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_model, "MAX_TREE_ROWS", 10)
        drafter = model.drafter(100)
        drafter.begin([1, 2])
        paths = list(itertools.product(range(4), range(3)))
        found = drafter.propose(paths, 2)
        assert sum(map(bool, found)) == 7  # of 4 x 3 leaves below inner nodes of their own
        assert drafter._log.num_slots == 2 + 10
        drafter.extend(Verified([3]))
        for path, candidates in zip([(1,), (2, 1)], drafter.propose([(1,), (2, 1)], 2), strict=True):
            assert_as_alone(tiny, [1, 2, 3], path, candidates)


def test_nothing_is_drafted_beyond_the_positions_there_are(llama: tuple[TinyModel, DraftModel]) -> None:
    _, model = llama
    drafter = model.drafter(8)
    drafter.begin([1, 2, 3, 4, 5])
    found = drafter.propose([(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)], 1)
    assert list(map(len, found)) == [1, 1, 1, 0, 0]
    drafter.extend(Verified([1, 2, 3, 4, 5]))
    assert drafter.propose([(), (1,)], 1) == [[], []]


def test_token_that_the_draft_model_lacks_ends_its_drafts_and_nothing_else(
    llama: tuple[TinyModel, DraftModel],
) -> None:
    tiny, _ = llama
    drafter = load(tiny, VOCABULARY + 100).drafter(50)
    drafter.begin([1, 2])
    found = drafter.propose([(), (VOCABULARY,), (3, VOCABULARY + 1), (3,)], 1)
    assert list(map(len, found)) == [1, 0, 0, 1]
    drafter.extend(Verified([VOCABULARY + 5]))
    assert drafter.propose([(), (1,)], 1) == [[], []]


def test_candidates_beyond_the_target_vocabulary_are_not_proposed(llama: tuple[TinyModel, DraftModel]) -> None:
    tiny, _ = llama
    drafter = load(tiny, 10).drafter(50)
    drafter.begin([1, 2])
    ((*found,),) = drafter.propose([()], 16)
    assert sorted(token for token, _ in found) == list(range(10))


def test_noise_of_each_position_is_added_to_its_scores(llama: tuple[TinyModel, DraftModel]) -> None:
    tiny, model = llama

    class Noise:
        temperature = 0.5

        def at(self, position: int) -> npt.NDArray[np.float32]:
            return np.random.default_rng(position).gumbel(size=VOCABULARY + 9).astype(np.float32)

    drafter = model.drafter(50)
    text = [4, 5, 6]
    drafter.begin(text, Noise())
    for path, found in zip([(), (1,), (1, 2)], drafter.propose([(), (1,), (1, 2)], 8), strict=True):
        scores = np.log(alone(tiny, text, path)) / 0.5 + Noise().at(3 + len(path))[:VOCABULARY]
        expected = np.exp(scores - np.logaddexp.reduce(scores))
        assert [token for token, _ in found] == np.argsort(-expected)[:8].tolist()
        assert max(abs(share - expected[token]) for token, share in found) < 1e-5


def test_answers_share_the_weights_and_nothing_else(llama: tuple[TinyModel, DraftModel]) -> None:
    tiny, model = llama
    first, second = model.drafter(50), model.drafter(50)
    first.begin([1, 2, 3])
    second.begin([3, 2, 1])
    for drafter, text in ((first, [1, 2, 3]), (second, [3, 2, 1]), (first, [1, 2, 3])):
        (found,) = drafter.propose([(9, len(text))], 4)
        assert_as_alone(tiny, text, (9, len(text)), found)
    first.close()
    with pytest.raises(LocalProtocolError, match="before an answer began"):
        _ = first._kv
    first.begin([5])
    (found,) = first.propose([(9,)], 4)
    assert_as_alone(tiny, [5], (9,), found)


def test_model_with_another_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tiny-llama cannot draft: it has 131 token ids and the model 49152"):
        load(tiny_model("llama", num_hidden_layers=1), 49_152)
