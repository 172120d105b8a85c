"""What a node kept of real answers is what it was sent, and an attack reads from it what was asked."""

from __future__ import annotations

import json
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fusion_node.cli.main import app
from fusion_node.engine.fusion_group import FusionGroup, Sent
from fusion_node.engine.node_views import MemberView, chain_of, watch_group
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.public_model import PublicModel
from fusion_node.engine.received_views import ReceivedSession, read_sessions, watch_received
from fusion_node.engine.stage import StepInput
from fusion_node.engine.tensor_codec import encode_partials, encode_rows
from fusion_node.engine.weights import TensorSource
from fusion_node.errors import ConfigError
from fusion_node.privacy.findings import MATCHING, NEAREST_EMBEDDING
from fusion_node.privacy.group import SOLVED
from fusion_node.privacy.report import Settings, make_received_report
from fusion_node.slices import MASK_KEY_BYTES
from fusion_node.store import ModelStore
from fusion_node.types import LayerRange, PeerId
from p2p.identity import Identity
from p2p.messages import OpenSession, Partials, PartialsEntry, Step, StepResult, alias_of
from p2p.received_frames import MAGIC, FrameFile, Recorders, read_frames
from p2p.records import Plan, PlanMember, PlanStage, sign_plan
from tests.engine.tiny import TinyModel, home_with_tiny, tiny_model

FP32 = numerics_class("fp32")
TOKENS = list(range(5, 105, 4))
"""25 tokens, each but once."""

CHUNKS = (16, 5, 1, 1, 1, 1)
"""A prompt in two chunks, and tokens one by one."""

MODEL_ID = "0f" * 32
SESSION = bytes(range(16))
USER = Identity.from_seed(bytes(32))


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def public(model: TinyModel) -> PublicModel:
    return PublicModel.load(model, numerics=FP32)


def plan_of(model_id: str, members: Sequence[PeerId], *, start: int = 0, masks: bool = False) -> bytes:
    places = tuple(PlanMember(peer, ("ws://127.0.0.1:1",)) for peer in members)
    stages = [PlanStage(members[0], start, start + 2, (), members=places, weights=(1,) * len(members))]
    if start:
        stages.insert(0, PlanStage(USER.peer_id, 0, start, ("ws://127.0.0.1:1",)))
    plan = Plan(1, USER.peer_id, SESSION, 0, model_id, "fp32", 64, 1000, 2000, tuple(stages), masks=masks)
    return sign_plan(plan, USER)


MEMBERS = [Identity.from_seed(bytes([n + 1] * 32)).peer_id for n in range(3)]


def recorded(
    model: TensorSource, public: PublicModel, path: Path, *, model_id: str = MODEL_ID, max_bytes: int = 2**26
) -> Path:
    """What member 1 of three keeps of an answer whose rows come in CHUNKS."""
    index = 1
    kept = FrameFile(path, MEMBERS[index], max_bytes=max_bytes)
    kept.received(USER.peer_id, OpenSession(SESSION, 0, 0, plan_of(model_id, MEMBERS), member=index), b"")
    group = FusionGroup.load(model, LayerRange(0, 2), (1, 1, 1), numerics=FP32, num_slots=len(TOKENS))
    first = 0

    def on_sent(sent: Sent) -> None:
        if sent.owner == index != sent.sender:
            entry = PartialsEntry(alias_of(SESSION, 0), first + 1, len(sent.values_TW))
            message = Partials(sent.layer, int(sent.exchange), (entry,))
            kept.received(MEMBERS[sent.sender], message, encode_partials([sent.values_TW]))

    group.on_sent = on_sent
    rows_TD = public.embed(TOKENS)
    for sequence, size in enumerate(CHUNKS):
        part_TD = rows_TD[first : first + size]
        cut_Td = group.cut(part_TD)[index]
        meta, payload = encode_rows(cut_Td, "f32")
        step = Step(SESSION, 0, sequence, first + 1, first, (), first + size, (first + size,), meta, ())
        kept.received(USER.peer_id, step, payload)
        whole = chain_of(first + size)
        rows = replace(
            whole,
            live_rows=tuple(range(size)),
            nodes=whole.nodes[first:],
            positions=whole.positions[first:],
            first_slot=first,
            num_committed=first,
        )
        group.forward([StepInput(rows, part_TD, (range(first + size),))])
        first += size
    kept.close()
    return path


@pytest.fixture(scope="module")
def session(model: TinyModel, public: PublicModel, tmp_path_factory: pytest.TempPathFactory) -> ReceivedSession:
    (found,) = read_sessions(recorded(model, public, tmp_path_factory.mktemp("frames") / "frames"))
    return found


def test_frames_in_chunks_make_the_view_of_a_prompt_in_one_step(
    model: TinyModel, public: PublicModel, session: ReceivedSession
) -> None:
    group = FusionGroup.load(model, LayerRange(0, 2), (1, 1, 1), numerics=FP32, num_slots=len(TOKENS))
    expected, _ = watch_group(group, public.embed(TOKENS), 1)
    found = watch_received(model, session)
    assert (found.member, found.bounds) == (expected.member, expected.bounds)
    for name in ("received", "contributed", "columns_Td", "middle_Td", "keys_KTH", "values_KTH"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.keys() == theirs.keys()
        for key in theirs:
            np.testing.assert_allclose(ours[key], theirs[key], rtol=2e-4, atol=2e-6)
    assert isinstance(found, MemberView)
    assert expected.num_bytes * 0.9 < found.num_bytes < expected.num_bytes * 1.5


def test_a_report_on_real_frames_reads_what_was_asked(model: TinyModel, session: ReceivedSession) -> None:
    settings = Settings(num_candidates=64, num_positions=6)
    report = make_received_report(
        model, [session], settings, model_id=MODEL_ID, decode=lambda ids: " ".join(map(str, ids))
    )
    asked = " ".join(map(str, TOKENS))
    (text,) = report.prompts
    assert (text.prompt, text.recovered, text.num_recovered) == (asked, asked, len(TOKENS))
    assert (report.is_received, report.member, report.weights, report.columns) == (True, 1, [1, 1, 1], 16)
    solved = [each for each in report.solved if each.equations >= each.unknowns and not each.is_control]
    assert {each.layer for each in solved} == {0, 1}
    assert max(each.error for each in solved) < 1e-2
    (control,) = (each for each in report.solved if each.is_control)
    assert control.error > 0.5
    (near,) = (each for each in report.read if each.attack == NEAREST_EMBEDDING and each.seen == SOLVED)
    assert (near.found, near.tried) == (len(TOKENS), len(TOKENS))
    matched = [each for each in report.read if each.attack == MATCHING and each.seen == SOLVED]
    assert [each.found for each in matched] == [each.tried for each in matched] == [6, 6]


def test_command_attacks_a_file_and_refuses_what_the_file_says_itself(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    home = home_with_tiny(tmp_path_factory, num_hidden_layers=2)
    stored = ModelStore(home).find("tiny")
    frames = recorded(stored, PublicModel.load(stored, numerics=FP32), tmp_path / "frames", model_id=stored.model_id)

    def run(*words: str) -> Any:
        line = ["privacy-report", "tiny", "--received", str(frames), "--threads", "1", "--home", str(home), *words]
        return CliRunner().invoke(app, line)

    result = run("--candidates", "16", "--positions", "3", "--json", str(tmp_path / "report.json"))
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    assert "1 answers: member 1 of 3" in shown
    assert f"read {len(TOKENS)} of {len(TOKENS)} tokens" in shown
    assert "own columns" in shown
    assert json.loads((tmp_path / "report.json").read_bytes())["is_received"] is True
    for words in (["--prompt", "x"], ["--member", "0"], ["--topology", "pipeline"]):
        refused = run(*words)
        assert isinstance(refused.exception, ConfigError)
        assert "--received says" in str(refused.exception)


def test_rows_behind_a_missing_contribution_are_left_out(
    model: TinyModel, public: PublicModel, session: ReceivedSession, tmp_path: Path
) -> None:
    whole = recorded(model, public, tmp_path / "whole")
    cut = tmp_path / "cut"
    cut.write_bytes(whole.read_bytes()[:-2000])
    (found,) = read_sessions(cut)
    assert len(found.columns_Td) == len(TOKENS) - 1
    np.testing.assert_array_equal(found.columns_Td, session.columns_Td[:-1])


def test_what_hangs_on_a_tree_is_left_out(model: TinyModel, public: PublicModel, tmp_path: Path) -> None:
    path = recorded(model, public, tmp_path / "frames")
    peer, frames = read_frames(path)
    other = FrameFile(tmp_path / "tree", peer)
    for frame in frames:
        message = frame.message
        if isinstance(message, Step) and message.sequence == 2:
            message = Step(SESSION, 0, 2, 22, 7, (), 0, (22,), message.tensor, ())
        other.received(frame.sender, message, frame.payload)
    other.close()
    (found,) = read_sessions(tmp_path / "tree")
    assert len(found.columns_Td) == sum(CHUNKS[:2])


def test_frames_of_another_model_or_of_a_later_group_are_refused(
    model: TinyModel, session: ReceivedSession, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="of another model"):
        make_received_report(model, [session], Settings(), model_id="another", decode=str)
    later = FrameFile(tmp_path / "later", MEMBERS[1])
    later.received(USER.peer_id, OpenSession(SESSION, 0, 1, plan_of(MODEL_ID, MEMBERS, start=2), member=1), b"")
    later.close()
    with pytest.raises(ConfigError, match="begins at layer 0"):
        read_sessions(tmp_path / "later")


def test_masked_sums_are_refused_and_their_keys_are_not_kept(tmp_path: Path) -> None:
    keys = bytes(range(100, 100 + MASK_KEY_BYTES)) * 2
    kept = FrameFile(tmp_path / "frames", MEMBERS[1])
    plan = plan_of(MODEL_ID, MEMBERS, masks=True)
    kept.received(USER.peer_id, OpenSession(SESSION, 0, 0, plan, member=1, mask_keys=keys), b"")
    kept.close()
    assert keys[:MASK_KEY_BYTES] not in (tmp_path / "frames").read_bytes()
    _, frames = read_frames(tmp_path / "frames")
    assert [frame.message for frame in frames] == [OpenSession(SESSION, 0, 0, plan, member=1)]
    with pytest.raises(ConfigError, match=r"has only sessions with masked sums.*without --masked-sums"):
        read_sessions(tmp_path / "frames")


def test_file_is_its_owners_alone_is_never_overwritten_and_ends_in_time(
    model: TinyModel, public: PublicModel, tmp_path: Path
) -> None:
    path = recorded(model, public, tmp_path / "frames", max_bytes=20_000)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert 15_000 < path.stat().st_size <= 20_000
    with pytest.raises(ConfigError, match="File exists"):
        FrameFile(path, MEMBERS[0])
    with pytest.raises(ConfigError, match="record-received"):
        (tmp_path / "other").write_bytes(b"something else")
        read_sessions(tmp_path / "other")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_sessions(tmp_path / "absent")


def test_only_what_comes_is_kept_and_of_it_no_results(tmp_path: Path) -> None:
    meta, payload = encode_rows(torch.ones(1, 4), "f32")
    result = StepResult(SESSION, 0, 0, (1,), meta, ())
    step = Step(SESSION, 0, 0, 1, 0, (), 1, (1,), meta, ())
    one, two = FrameFile(tmp_path / "one", MEMBERS[0]), FrameFile(tmp_path / "two", MEMBERS[0])
    both = Recorders([one, two])
    both.received(MEMBERS[1], result, payload)
    both.sent(MEMBERS[1], step, payload)
    both.received(MEMBERS[1], step, payload)
    both.gone(MEMBERS[1])
    for each in (one, two):
        each.close()
        each.close()
    both.received(MEMBERS[1], step, payload)
    for name in ("one", "two"):
        peer, frames = read_frames(tmp_path / name)
        assert peer == MEMBERS[0]
        assert [(f.sender, f.message, bytes(f.payload)) for f in frames] == [(MEMBERS[1], step, bytes(payload))]


@pytest.mark.parametrize("cut", [1, 3, 40, 60, 120])
def test_a_file_that_is_cut_or_garbled_says_so_or_ends_early(
    model: TinyModel, public: PublicModel, tmp_path: Path, cut: int
) -> None:
    content = recorded(model, public, tmp_path / "frames").read_bytes()
    (tmp_path / "short").write_bytes(content[: len(content) - cut])
    _, frames = read_frames(tmp_path / "short")
    assert len(list(frames)) == len(list(read_frames(tmp_path / "frames")[1])) - 1
    first = len(MAGIC) + 1 + len(MEMBERS[1])
    garbled = bytearray(content)
    garbled[first + 1 + len(USER.peer_id) + 4 + cut % 8] ^= 0xFF
    (tmp_path / "garbled").write_bytes(garbled)
    with pytest.raises(ConfigError, match=r"cannot be read|is longer than any"):
        next(read_frames(tmp_path / "garbled")[1])
