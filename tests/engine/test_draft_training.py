"""Training a draft head: on data of a tiny model, through the engine, to the end and back from a kill."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import msgspec
import pytest
import torch

from fusion_node.engine.boundary import Boundary
from fusion_node.engine.draft_acceptance import calibrate, measure
from fusion_node.engine.draft_batches import collate, plan_batches
from fusion_node.engine.draft_data import (
    NUM_TOP,
    SHARD_BYTES,
    DataSettings,
    DraftData,
    DraftTarget,
    Job,
    Recording,
    default_feature_layers,
    record,
)
from fusion_node.engine.draft_training import Measured, Trainer, TrainingSettings
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.trained_head import TrainedHead, normed
from fusion_node.errors import ConfigError, StoreCorrupted
from tests.engine.tiny import TinyModel, tiny_model

FP32 = numerics_class("fp32")
CPU = torch.device("cpu")
SETTINGS = TrainingSettings(
    epochs=3, batch_positions=120, draft_vocab=96, learning_rate=2e-3, evaluate_every=8, patience=50, ridge=0.05
)


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model("llama", num_hidden_layers=3)


@pytest.fixture(scope="module")
def target(model: TinyModel) -> DraftTarget:
    return DraftTarget.load(model, numerics=FP32, device=CPU)


def jobs(first: int, count: int, *, num_new: int = 20, temperature: float = 0.0) -> list[Job]:
    generator = torch.Generator().manual_seed(first)
    return [
        Job(number, tuple(torch.randint(3, 131, (4 + number % 3,), generator=generator).tolist()), num_new, temperature)
        for number in range(first, first + count)
    ]


def data_settings(target: DraftTarget, **other: object) -> DataSettings:
    settings = DataSettings(
        model_id="", numerics="fp32", feature_layers=target.feature_layers, hidden_size=target.hidden_size,
        vocab_size=target.vocab_size, seed=0, texts="",
    )  # fmt: skip
    return DataSettings(**{name: other.get(name, getattr(settings, name)) for name in settings.__struct_fields__})


@pytest.fixture(scope="module")
def texts(target: DraftTarget) -> list[Recording]:
    return list(record(target, jobs(0, 24, temperature=0.5), batch_size=8, max_tokens=32))


def filled(folder: Path, target: DraftTarget, texts: list[Recording]) -> DraftData:
    data = DraftData(folder, data_settings(target))
    for text in texts:
        data.add(text)
    data.flush()
    return data


@pytest.fixture
def data(tmp_path: Path, target: DraftTarget, texts: list[Recording]) -> tuple[DraftData, DraftData]:
    return filled(tmp_path / "train", target, texts[:18]), filled(tmp_path / "held-out", target, texts[18:])


# Recording.


def test_recorded_answers_and_features_are_those_of_the_whole_model(model: TinyModel, target: DraftTarget) -> None:
    (text,) = record(target, jobs(0, 1), batch_size=3, max_tokens=64)
    with torch.no_grad():
        out = model.whole(text.tokens_T[None].long(), output_hidden_states=True)
    expected = torch.softmax(out.logits[0], dim=-1).topk(NUM_TOP)
    start = text.first_start
    assert text.num_prompt == 4
    assert torch.equal(text.top_ids_TK[start:], expected.indices[start:].int())
    assert torch.allclose(text.top_probabilities_TK[start:].float(), expected.values[start:], atol=1e-3)
    assert not text.top_probabilities_TK[:start].any()
    assert torch.equal(text.tokens_T[4:].long(), expected.indices[3:-1, 0])
    # transformers puts the final norm into the last hidden state, which a head is told without it.
    for index, layer in enumerate(target.feature_layers[:-1]):
        hidden = normed(out.hidden_states[layer][0])
        assert torch.allclose(text.features_TkD[:, index].float(), hidden, atol=5e-3)


def test_recorded_given_text_is_learnt_whole(target: DraftTarget) -> None:
    (text,) = record(target, [Job(0, tuple(range(3, 40)))], batch_size=1, max_tokens=30)
    assert text.tokens_T.tolist() == list(range(3, 33))
    assert text.first_start == 0
    assert text.top_probabilities_TK.float().sum(dim=1).min() > 0.2


def test_a_sampled_answer_does_not_depend_on_what_is_beside_it(target: DraftTarget) -> None:
    alone = [next(record(target, [job], batch_size=1, max_tokens=32)) for job in jobs(0, 6, temperature=1.0)]
    together = sorted(
        record(target, jobs(0, 6, temperature=1.0), batch_size=4, max_tokens=32), key=lambda text: text.number
    )
    assert [text.tokens_T.tolist() for text in alone] == [text.tokens_T.tolist() for text in together]
    assert len({tuple(text.tokens_T.tolist()[-5:]) for text in alone}) > 1


def test_an_answer_ends_at_an_end_token_which_is_not_recorded(model: TinyModel) -> None:
    plain = DraftTarget.load(model, numerics=FP32, device=CPU)
    (whole,) = record(plain, jobs(3, 1), batch_size=1, max_tokens=64)
    end = int(whole.tokens_T[9])
    ending = DraftTarget.load(model, numerics=FP32, device=CPU, eos_ids=[end])
    (text,) = record(ending, jobs(3, 1), batch_size=1, max_tokens=64)
    first = whole.tokens_T[whole.num_prompt :].tolist().index(end)
    assert text.tokens_T.tolist() == whole.tokens_T[: whole.num_prompt + first].tolist()


@pytest.mark.parametrize("ids", [(5,), (5, 131), (-1, 5)])
def test_a_text_that_is_none_is_refused(target: DraftTarget, ids: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="text 0"):
        list(record(target, [Job(0, ids)], batch_size=1, max_tokens=8))


@pytest.mark.parametrize("layers", [(), (0, 3), (2, 1, 3), (1, 2), (1, 4)])
def test_feature_layers_that_are_not_there_are_refused(model: TinyModel, layers: tuple[int, ...]) -> None:
    target = DraftTarget.load(model, numerics=FP32, device=CPU)
    with pytest.raises(ConfigError, match="feature layers"):
        DraftTarget(target.stage, target.boundary, config=target.config, feature_layers=layers)


def test_default_feature_layers_are_thirds_of_the_depth() -> None:
    assert default_feature_layers(30) == (10, 20, 30)
    assert default_feature_layers(80) == (27, 53, 80)
    assert default_feature_layers(1) == (1,)


# On disk.


def test_data_is_read_as_it_was_written(data: tuple[DraftData, DraftData], texts: list[Recording]) -> None:
    again = DraftData(data[0].folder, data[0].settings)
    assert again.numbers == {text.number for text in texts[:18]}
    assert again.num_learnt == sum(text.num_learnt for text in texts[:18])
    for mine, theirs in zip(again, texts[:18], strict=True):
        for name in (field.name for field in dataclasses.fields(Recording)):
            assert torch.equal(torch.as_tensor(getattr(mine, name)), torch.as_tensor(getattr(theirs, name)))


def test_a_second_shard_follows_the_first(data: tuple[DraftData, DraftData], texts: list[Recording]) -> None:
    train, _ = data
    train.add(texts[20])
    assert len(train) == 18
    train.flush()
    again = DraftData(train.folder, train.settings)
    assert len(again) == 19
    assert torch.equal(again.load(18).tokens_T, texts[20].tokens_T)


@pytest.mark.parametrize("offset", [3, 300, -2])
def test_a_damaged_shard_is_refused(data: tuple[DraftData, DraftData], offset: int) -> None:
    (shard,) = data[0].folder.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[offset] ^= 1
    shard.write_bytes(content)
    with pytest.raises(StoreCorrupted, match=r"shard-00000.safetensors is damaged: remove the folder"):
        DraftData(data[0].folder, data[0].settings)


def test_a_shard_that_is_cut_off_or_gone_is_refused(data: tuple[DraftData, DraftData]) -> None:
    (shard,) = data[0].folder.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(StoreCorrupted, match="damaged"):
        DraftData(data[0].folder, data[0].settings)
    shard.unlink()
    with pytest.raises(StoreCorrupted, match="damaged"):
        DraftData(data[0].folder, data[0].settings)


@pytest.mark.parametrize("index", [b"{", b"[]", b'{"format":1,"settings":{},"shards":[]}'])
def test_a_damaged_index_is_refused(data: tuple[DraftData, DraftData], index: bytes) -> None:
    (data[0].folder / "index.json").write_bytes(index)
    with pytest.raises(StoreCorrupted, match="damaged"):
        DraftData(data[0].folder, data[0].settings)


def test_data_of_other_settings_is_refused(data: tuple[DraftData, DraftData], target: DraftTarget) -> None:
    with pytest.raises(ConfigError, match="another model id"):
        DraftData(data[0].folder, data_settings(target, model_id="ab"))


def test_data_is_full_before_it_is_beyond_its_limit(
    tmp_path: Path, target: DraftTarget, texts: list[Recording]
) -> None:
    data = DraftData(tmp_path, data_settings(target), max_bytes=SHARD_BYTES + 10_000)
    assert not data.is_full
    for text in texts:
        data.add(text)
    assert data.is_full


# Training.


def train(
    target: DraftTarget,
    data: tuple[DraftData, DraftData],
    folder: Path,
    *,
    settings: TrainingSettings = SETTINGS,
    kill_at: int | None = None,
) -> tuple[TrainedHead, list[Measured], list[float]]:
    folder.mkdir(exist_ok=True)
    measured: list[Measured] = []
    losses: list[float] = []
    trainer = Trainer(target, *data, settings, folder, checkpoint_s=0.0)

    def on_step(step: int, loss: float) -> None:
        losses.append(loss)
        # What was computed since the last checkpoint is lost, as with a kill.
        if step == kill_at:
            raise KeyboardInterrupt

    return trainer.run(on_step, measured.append), measured, losses


@pytest.fixture(scope="module")
def head(target: DraftTarget, texts: list[Recording], tmp_path_factory: pytest.TempPathFactory) -> TrainedHead:
    folder = tmp_path_factory.mktemp("head")
    data = filled(folder / "train", target, texts[:18]), filled(folder / "held-out", target, texts[18:])
    return train(target, data, folder / "run")[0]


def test_training_lowers_the_loss_and_raises_acceptance(
    target: DraftTarget, data: tuple[DraftData, DraftData], tmp_path: Path
) -> None:
    # One length of chains throughout, so that losses can be compared.
    settings = msgspec.structs.replace(SETTINGS, epochs=10, last_unroll=SETTINGS.first_unroll)
    _, measured, losses = train(target, data, tmp_path / "run", settings=settings)
    # Every epoch sees all texts; most of the loss is how undecided the target itself is.
    steps = round(len(losses) / settings.epochs)
    assert sum(losses[-steps:]) < 0.96 * sum(losses[:steps])
    assert max(sum(m.acceptance.top1) for m in measured) > sum(measured[0].acceptance.top1)
    # By chance it would be one of 96.
    assert measured[0].acceptance.top1[0] > 0.1


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text", "phi3", "deepseek_v3"])
def test_a_head_is_trained_for_layers_that_are_not_those_of_llama(model_type: str, tmp_path: Path) -> None:
    target = DraftTarget.load(tiny_model(model_type), numerics=FP32, device=CPU)
    texts = list(record(target, jobs(0, 9, num_new=10, temperature=0.5), batch_size=9, max_tokens=24))
    data = filled(tmp_path / "train", target, texts[:6]), filled(tmp_path / "held-out", target, texts[6:])
    head, _, losses = train(target, data, tmp_path, settings=msgspec.structs.replace(SETTINGS, epochs=2))
    assert losses[-1] < losses[0]
    head.save(tmp_path / "head")
    assert TrainedHead.load(tmp_path / "head").config.feature_layers == (2, 5, 7)


def test_a_training_that_goes_on_after_a_kill_ends_with_the_same_weights(
    target: DraftTarget, data: tuple[DraftData, DraftData], tmp_path: Path
) -> None:
    whole, undisturbed, _ = train(target, data, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(target, data, tmp_path / "killed", kill_at=11)
    again, resumed, losses = train(target, data, tmp_path / "killed")
    assert len(losses) == undisturbed[-1].num_steps - 10
    assert undisturbed[-1].acceptance == resumed[-1].acceptance
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_a_damaged_checkpoint_is_refused(
    target: DraftTarget, data: tuple[DraftData, DraftData], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(target, data, tmp_path / "run", kill_at=3)
    path = tmp_path / "run" / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(StoreCorrupted, match="remove it"):
        train(target, data, tmp_path / "run")


def test_a_checkpoint_of_other_data_is_not_taken_up(
    target: DraftTarget, data: tuple[DraftData, DraftData], tmp_path: Path, texts: list[Recording]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(target, data, tmp_path / "run", kill_at=3)
    data[0].add(texts[-1])
    data[0].flush()
    assert Trainer(target, *data, SETTINGS, tmp_path / "run").resumed_at is None


def test_training_without_data_is_refused(target: DraftTarget, tmp_path: Path) -> None:
    empty = DraftData(tmp_path, data_settings(target))
    with pytest.raises(ConfigError, match="no texts"):
        Trainer(target, empty, empty, SETTINGS, tmp_path)


def test_batches_hold_every_text_once_and_no_more_than_fits() -> None:
    lengths = [7 + (index * 31) % 50 for index in range(90)]
    batches = plan_batches(lengths, 200, seed=1, epoch=2)
    assert sorted(text for batch in batches for text in batch) == list(range(90))
    assert all(len(batch) * max(lengths[text] for text in batch) <= 200 for batch in batches)
    assert batches == plan_batches(lengths, 200, seed=1, epoch=2)
    assert batches != plan_batches(lengths, 200, seed=1, epoch=3)


# Acceptance.


def one_chain(
    head: TrainedHead, boundary: Boundary, text: Recording, start: int, num_steps: int
) -> list[tuple[bool, bool]]:
    """Guesses of one chain, position by position, with keys and values in plain lists, for first and first eight.

    Rows of the prompt but for the last are not there.
    """
    embedded = boundary.embed(text.tokens_T.tolist())
    features = text.features_TkD.float()
    head_WD = boundary.head_rows(head.token_ids.tolist())
    groups = head.config.num_attention_heads // head.config.num_key_value_heads
    keys, values, guesses = [], [], []
    hidden = None
    for position in range(text.first_start, start + 1):
        row = head.start(features[position], embedded[position + 1])
        query, key, value = head.qkv(row[None, None], torch.tensor([position]))
        keys.append(key[0, :, 0])
        values.append(value[0, :, 0])
    for step in range(1, num_steps + 1):
        if step > 1:
            row = head.next(hidden, embedded[start + step])
            query, key, value = head.qkv(row[None, None], torch.tensor([start + step - 1]))
            keys.append(key[0, :, 0])
            values.append(value[0, :, 0])
        heads = []
        for index in range(head.config.num_attention_heads):
            scores = torch.stack([query[0, index, 0] @ key[index // groups] for key in keys])
            shares = torch.softmax(scores * head.config.head_dim**-0.5, dim=0)
            heads.append(sum(share * value[index // groups] for share, value in zip(shares, values, strict=True)))
        hidden = head.finish(row[None, None], torch.stack(heads)[None, None])[0, 0]
        best = head.token_ids[head.logits(hidden, head_WD, step).topk(8).indices].tolist()
        goal = int(text.top_ids_TK[start + step, 0])
        guesses.append((best[0] == goal, goal in best))
    return guesses


def test_acceptance_by_depth_is_that_of_chains_computed_one_by_one(
    target: DraftTarget, head: TrainedHead, texts: list[Recording]
) -> None:
    found = measure(head, target.boundary, texts[18:], num_steps=4, batch_positions=70)
    top1, top8, totals, chains = [0] * 4, [0] * 4, [0] * 4, []
    with torch.no_grad():
        for text in texts[18:]:
            for start in range(text.first_start, text.num_positions - 1):
                depth = min(4, text.num_positions - 1 - start)
                guesses = one_chain(head, target.boundary, text, start, depth)
                for step, (is_first, is_within) in enumerate(guesses):
                    top1[step] += is_first
                    top8[step] += is_within
                    totals[step] += 1
                if depth == 4:
                    wrong = [step for step, (is_first, _) in enumerate(guesses) if not is_first]
                    chains.append(wrong[0] if wrong else 4)
    assert found.num_positions == totals[0]
    assert found.top1 == pytest.approx([a / b for a, b in zip(top1, totals, strict=True)])
    assert found.top8 == pytest.approx([a / b for a, b in zip(top8, totals, strict=True)])
    assert found.chain_length == pytest.approx(sum(chains) / len(chains))
    assert 0.05 < found.top1[0] < 1.0


def test_calibration_changes_probabilities_and_no_order(
    target: DraftTarget, head: TrainedHead, texts: list[Recording]
) -> None:
    before, scales = measure(head, target.boundary, texts[18:]), head.log_scales.tolist()
    head = copy.deepcopy(head)
    head.log_scales.data += 0.8
    calibrate(head, target.boundary, texts[18:])
    assert head.log_scales.tolist() == pytest.approx(scales, abs=0.01)
    assert measure(head, target.boundary, texts[18:]) == before


def test_chains_of_a_batch_do_not_see_one_another(
    target: DraftTarget, head: TrainedHead, texts: list[Recording]
) -> None:
    batch = collate(texts[18:21], CPU)
    alone = collate(texts[19:20], CPU)
    with torch.no_grad():
        both = [
            head.unroll(
                b.features_BTkD, target.boundary.embed(b.ids_BT.flatten().tolist()).view(*b.ids_BT.shape, -1), 3
            )
            for b in (batch, alone)
        ]
    length = texts[19].num_positions
    for step, (together, single) in enumerate(zip(*both, strict=True), 1):
        assert torch.allclose(together[1, : length - step], single[0], atol=1e-5)


# The two files.


@pytest.fixture
def head_folder(head: TrainedHead, tmp_path: Path) -> Path:
    head.save(tmp_path / "head")
    return tmp_path / "head"


def test_a_saved_head_is_the_same_head(
    target: DraftTarget, head: TrainedHead, texts: list[Recording], tmp_path: Path
) -> None:
    head.save(tmp_path / "head", dtype=torch.float32)
    again = TrainedHead.load(tmp_path / "head")
    assert measure(again, target.boundary, texts[18:]) == measure(head, target.boundary, texts[18:])
    for name, tensor in head.state_dict().items():
        assert torch.allclose(tensor, again.state_dict()[name], atol=1e-6), name


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"fusion_draft_head"', b'"eagle"', "not the configuration of a trained draft head"),
        (b'"hidden_size": 48', b'"hidden_size": 49', "is not what its config.json says"),
        (b'"draft_vocab_size": 96', b'"draft_vocab_size": 95', "d2t"),
        (b'"draft_vocab_size": 96', b'"draft_vocab_size": 960', "larger than the target's"),
        (b'"num_key_value_heads": 2', b'"num_key_value_heads": 3', "do not fit each other"),
    ],
)
def test_a_head_whose_files_contradict_each_other_is_refused(
    head_folder: Path, old: bytes, new: bytes, message: str
) -> None:
    config = head_folder / "config.json"
    assert old in config.read_bytes()
    config.write_bytes(config.read_bytes().replace(old, new))
    with pytest.raises(ConfigError, match=message):
        TrainedHead.load(head_folder)


def test_a_head_that_is_cut_off_or_not_there_is_refused(head_folder: Path, tmp_path: Path) -> None:
    weights = head_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="train the draft head again"):
        TrainedHead.load(head_folder)
    with pytest.raises(ConfigError, match="holds no draft head"):
        TrainedHead.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"hidden_size": 64}, "hidden size of 48"),
        ({"vocab_size": 100}, "vocabulary of 131"),
        ({"num_layers": 2}, "row after layer 3"),
        ({"model_id": "cd" * 32}, "trained for the model abab"),
    ],
)
def test_a_head_of_another_target_is_refused(head_folder: Path, other: dict[str, object], message: str) -> None:
    config = head_folder / "config.json"
    config.write_bytes(
        config.read_bytes().replace(b'"target_model_id": ""', b'"target_model_id": "' + b"ab" * 32 + b'"')
    )
    right: dict[str, object] = {"hidden_size": 48, "vocab_size": 131, "num_layers": 3, "model_id": "ab" * 32}
    head = TrainedHead.load(head_folder)
    head.check_target(**right)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        head.check_target(**right | other)  # type: ignore[arg-type]
