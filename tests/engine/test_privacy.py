"""What a node can read of what it is sent: attacks that must succeed, and controls that must fail."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fusion_node.cli.main import app
from fusion_node.engine.fusion_group import FusionGroup
from fusion_node.engine.node_views import MAX_TOKENS, GroupTruth, MemberView, watch_group, watch_stages
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.public_model import PublicModel
from fusion_node.engine.stage import Stage
from fusion_node.errors import ConfigError, FusionError, LocalProtocolError
from fusion_node.privacy.attacks import choose_candidates, nearest, relative_error, solve
from fusion_node.privacy.findings import MATCHING, NEAREST_EMBEDDING, Read, Report
from fusion_node.privacy.group import RANDOM, SHUFFLED, SOLVED, GroupAttack, Tally
from fusion_node.privacy.report import Settings, cut_layers, make_report
from fusion_node.slices import Exchange
from fusion_node.types import LayerRange
from tests.engine.tiny import TinyModel, home_with_tiny, tiny_model

FP32 = numerics_class("fp32")
PROMPT = list(range(5, 105, 4))
"""25 tokens, each but once, so that no other position has a position's token."""


@cache
def small(model_type: str = "llama", **overrides: Any) -> TinyModel:
    return tiny_model(model_type, **{"num_hidden_layers": 2, **overrides})


_PUBLIC: dict[int, PublicModel] = {}


def public(model: TinyModel) -> PublicModel:
    """Loaded once: models of small live as long as the tests."""
    if id(model) not in _PUBLIC:
        _PUBLIC[id(model)] = PublicModel.load(model, numerics=FP32)
    return _PUBLIC[id(model)]


def watched(model: TinyModel, weights: tuple[int, ...], index: int = 0) -> tuple[MemberView, GroupTruth]:
    layers = LayerRange(0, public(model).num_layers)
    group = FusionGroup.load(model, layers, weights, numerics=FP32, num_slots=len(PROMPT))
    return watch_group(group, public(model).embed(PROMPT), index)


def reported(model: TinyModel, settings: Settings, prompt: Sequence[int] = PROMPT) -> Report:
    return make_report(model, [prompt], settings, decode=lambda ids: " ".join(map(str, ids)))


def of_kind(report: Report, attack: str, *, is_control: bool) -> list[Read]:
    return [found for found in report.read if found.attack == attack and found.is_control is is_control]


# What a member has.


def test_what_a_member_was_sent_and_holds_is_all_that_its_columns_are_made_of() -> None:
    """So nothing is missing in the view, and nothing in it is of another prompt or another member."""
    view, truth = watched(small(), (2, 1, 1), index=1)
    columns = view.own.columns
    own = slice(columns.start, columns.stop)
    for layer in range(2):
        middle = view.columns_Td[layer] + view.summed(layer, Exchange.O)
        np.testing.assert_array_equal(middle, view.middle_Td[layer])
        after = middle + view.summed(layer, Exchange.DOWN)
        if layer + 1 in view.columns_Td:
            np.testing.assert_array_equal(after, view.columns_Td[layer + 1])
    np.testing.assert_array_equal(view.columns_Td[0], public(small()).embed(PROMPT).numpy()[:, own])
    np.testing.assert_array_equal(truth.before_TD[0], public(small()).embed(PROMPT).numpy())
    assert {sender for _, _, sender in view.received} == {0, 2}


def test_frames_that_came_are_as_many_bytes_as_the_contributions() -> None:
    view, _ = watched(small(), (1, 1))
    values = sum(received.nbytes for received in view.received.values()) + view.columns_Td[0].nbytes
    assert values < view.num_bytes < values + 64 * (len(view.received) + 2)


def test_a_public_model_makes_of_tokens_what_the_group_makes() -> None:
    model = public(small())
    _, truth = watched(small(), (1, 1))
    prompt = model.read(PROMPT, (0, 1), num_candidates=3)
    for layer in (0, 1):
        assert relative_error(prompt.states[layer].before_TD, truth.before_TD[layer]) < 1e-5
        assert relative_error(prompt.states[layer].middle_TD, truth.middle_TD[layer]) < 1e-5
    for position in (0, 7, len(PROMPT) - 1):
        tried = model.try_tokens(prompt, position, [PROMPT[position], 3, 4], (0, 1))
        for layer in (0, 1):
            whole, alone = prompt.states[layer], tried[layer]
            assert relative_error(alone.middle_TD[:1], whole.middle_TD[position : position + 1]) < 1e-5
            assert relative_error(alone.keys_KTH[:, 0], whole.keys_KTH[:, position]) < 1e-5
            assert relative_error(alone.middle_TD[1:2], whole.middle_TD[position : position + 1]) > 0.1
    np.testing.assert_array_equal(prompt.logits_TV.shape, (len(PROMPT), 131))


def test_prompts_that_no_step_holds_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match="no step"):
        watch_stages([], torch.zeros(MAX_TOKENS + 1, 48))


# Attacks on a group.


@pytest.mark.parametrize("weights", [(1, 1), (2, 1), (1, 1, 1), (1, 2, 1, 1)], ids=str)
def test_a_member_reads_every_token_from_what_it_is_sent(weights: tuple[int, ...]) -> None:
    report = reported(small(), Settings(weights=weights, num_candidates=64, num_positions=12))
    assert report.columns < report.hidden == 48
    states = {f.sent for f in report.solved if f.equations >= f.unknowns and not f.is_control}
    assert {"contributions to Q, K and V", "contributions to gates and ups"} <= states
    masked = {f.sent for f in report.solved if f.is_masked}
    names = {"masked contributions to Q, K and V", "masked contributions to gates and ups"}
    assert masked == (names if len(weights) > 2 else set())
    for solved in report.solved:
        if solved.is_control:
            assert solved.error > 0.5
        elif solved.is_masked:
            assert solved.error > 1e3, solved
        elif solved.equations >= 1.25 * solved.unknowns:
            assert solved.error < 1e-4, solved
        elif solved.equations < solved.unknowns:
            assert solved.error > 0.1, solved
    assert [(t.num_tokens, t.num_recovered) for t in report.prompts] == [(25, 25)]
    for attack, tried in ((NEAREST_EMBEDDING, 25), (MATCHING, 12)):
        for found in of_kind(report, attack, is_control=False):
            assert (found.found, found.tried) == (tried, tried), found
        for control in of_kind(report, attack, is_control=True):
            # By chance none or one of 25 is found among 131, or of 12 among 64.
            assert control.found <= 3, control
    assert {found.layer for found in of_kind(report, MATCHING, is_control=True)} == {0, 1}
    assert report.positions == 12
    assert "read 25 of 25 tokens" in report.conclusion


def test_a_group_that_rounds_to_16_bits_is_read_as_well() -> None:
    report = reported(small(), Settings(weights=(1, 1), numerics="f16r32", num_candidates=64, num_positions=4))
    errors = [f.error for f in report.solved if f.sent == "contributions to Q, K and V"]
    # The first layer is sent numbers that 16 bits hold.
    assert 1e-5 < max(errors) < 1e-2
    assert report.prompts[0].num_recovered == 25
    for found in of_kind(report, MATCHING, is_control=False):
        if "sum of squares" not in found.seen:
            assert found.found == 4, found


def test_experts_change_nothing_for_queries_keys_and_values() -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=2, decoder_sparse_step=1, mlp_only_layers=[])
    report = reported(model, Settings(weights=(1, 1), num_candidates=64, num_positions=3))
    errors = [f.error for f in report.solved if f.sent == "contributions to Q, K and V"]
    assert len(errors) == 2
    assert max(errors) < 1e-4
    assert not any("gates" in found.sent for found in report.solved)
    assert report.prompts[0].num_recovered == 25
    assert all(found.found == 3 for found in of_kind(report, MATCHING, is_control=False))


@pytest.mark.parametrize(
    ("hidden", "channels", "num_members"),
    [(96, 96, 2), (96, 96, 3), (96, 96, 4), (128, 192, 4), (128, 192, 8)],
    ids=lambda value: str(value),
)
def test_sums_alone_say_the_state_while_there_are_as_many_equations_as_unknowns(
    hidden: int, channels: int, num_members: int
) -> None:
    """Gates and ups are 2F/n equations in the D(1 - 1/n) columns of all others: enough while n <= 2F/D + 1."""
    model = small(hidden_size=hidden, intermediate_size=channels, num_attention_heads=8, num_hidden_layers=1)
    view, truth = watched(model, (1,) * num_members)
    states = public(model).read(PROMPT, (0,), num_candidates=1).states
    tally = Tally()
    GroupAttack(public(model), view, truth, states, tally, np.random.default_rng(0)).solve()
    (found,) = (f for f in tally.solved if f.sent == "sums of gates and ups alone")
    assert (found.equations, found.unknowns) == (2 * channels // num_members, hidden - hidden // num_members)
    if num_members <= 2 * channels / hidden + 1:
        assert found.error < 1e-3
    else:
        assert found.error > 0.1


def test_an_attack_reads_nothing_of_the_truth() -> None:
    """What is found is the same when the truth that it is measured against is another's."""
    model = small()
    view, truth = watched(model, (1, 1, 1))
    wrong = GroupTruth({n: -x for n, x in truth.before_TD.items()}, {n: -x for n, x in truth.middle_TD.items()})
    states = public(model).read(PROMPT, (0, 1), num_candidates=1).states
    found, errors = [], []
    for measured_by in (truth, wrong):
        tally = Tally()
        attack = GroupAttack(public(model), view, measured_by, states, tally, np.random.default_rng(0))
        attack.solve()
        found.append(attack.read(PROMPT))
        errors.append(max(f.error for f in tally.solved if f.sent == "contributions to Q, K and V"))
    assert found[0] == found[1] == PROMPT
    assert errors[0] < 1e-4
    assert errors[1] == pytest.approx(2.0, rel=1e-3)


def test_the_control_would_show_an_attack_that_cheats() -> None:
    """The names of controls are in the report, with as many tries as the attacks have."""
    report = reported(small(), Settings(weights=(1, 1), num_candidates=64, num_positions=6))
    tries = {found.seen: found.tried for found in report.read if found.is_control}
    assert tries == {RANDOM: 25, SHUFFLED: 6}
    assert {found.tried for found in report.read if found.seen == SOLVED} == {25, 6}


# Attacks on stages.


def test_a_stage_is_sent_what_says_every_token() -> None:
    report = reported(small(), Settings(topology="pipeline", weights=(1, 1), num_candidates=64, num_positions=12))
    assert not report.solved
    assert {(f.layer, f.attack) for f in report.read} == {(0, NEAREST_EMBEDDING), (0, MATCHING), (1, MATCHING)}
    for found in report.read:
        assert found.found <= 2 if found.is_control else found.found == found.tried, found
    assert (report.member, report.columns) == (None, 48)
    assert report.prompts[0].recovered == report.prompts[0].prompt


def test_a_stage_view_holds_the_rows_before_its_first_layer() -> None:
    model = small()
    cpu = torch.device("cpu")
    stages = [Stage.load(model, layers, numerics=FP32, device=cpu) for layers in cut_layers(2, (1, 1))]
    embedded = public(model).embed(PROMPT)
    first, second = watch_stages(stages, embedded)
    np.testing.assert_array_equal(first.rows_TD, embedded.numpy())
    states = public(model).read(PROMPT, (1,), num_candidates=1).states
    assert (first.layer, second.layer) == (0, 1)
    assert relative_error(second.rows_TD, states[1].before_TD) < 1e-5


def test_stages_are_cut_by_weights() -> None:
    assert [(r.start, r.stop) for r in cut_layers(30, (1, 1, 1))] == [(0, 10), (10, 20), (20, 30)]
    assert [(r.start, r.stop) for r in cut_layers(30, (2, 1))] == [(0, 20), (20, 30)]
    with pytest.raises(ConfigError, match="cannot be cut into 3 stages"):
        cut_layers(2, (1, 1, 1))


# The arithmetic.


def test_least_squares_of_too_few_equations_is_the_smallest_solution() -> None:
    rng = np.random.default_rng(1)
    block, inputs = rng.standard_normal((4, 9)).astype(np.float32), rng.standard_normal((5, 9)).astype(np.float32)
    found = solve(block, inputs @ block.T)
    np.testing.assert_allclose(found @ block.T, inputs @ block.T, atol=1e-5)
    assert (np.linalg.norm(found, axis=1) <= np.linalg.norm(inputs, axis=1)).all()
    assert relative_error(found, inputs) > 0.1
    assert relative_error(inputs, inputs) == 0.0


def test_candidates_hold_the_true_token_the_likely_ones_and_others_in_no_order() -> None:
    prior = np.arange(100, dtype=np.float32)
    places = []
    for seed in range(20):
        chosen = choose_candidates(5, prior, 100, 16, np.random.default_rng(seed))
        assert len(chosen) == len(set(chosen)) == 16
        assert {5, *range(92, 100)} <= set(chosen)
        places.append(chosen.index(5))
    assert len(set(places)) > 5
    assert sorted(choose_candidates(5, None, 12, 256, np.random.default_rng(0))) == list(range(12))


def test_nearest_is_the_candidate_at_the_least_distance() -> None:
    candidates = np.array([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]], dtype=np.float32)
    assert [nearest(np.array(view, dtype=np.float32), candidates) for view in ([0.6, 0.5], [4, 9], [-1, 1])] == [
        0,
        2,
        1,
    ]


# The command.


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return home_with_tiny(tmp_path_factory, num_hidden_layers=2)


def run(home: Path, *words: str) -> Any:
    return CliRunner().invoke(app, ["privacy-report", "tiny", "--threads", "1", *words, "--home", str(home)])


def test_the_command_shows_the_prompt_and_what_was_read_of_it(home: Path, tmp_path: Path) -> None:
    prompt = "my pin is 4711,\nkeep it"
    words = ["--members", "2", "--prompt", prompt, "--candidates", "32", "--positions", "4"]
    result = run(home, *words, "--json", str(tmp_path / "report.json"))
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    assert "prompt my pin is 4711,⏎keep it" in shown
    assert "recovered my pin is 4711,⏎keep it" in shown
    assert "read 23 of 23 tokens" in shown
    assert "contributions" in shown
    assert "4711" not in result.stderr
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Report)
    assert report.prompts[0].recovered == prompt
    assert {f.layer for f in report.solved} == {0, 1}
    assert (report.member, report.candidates, report.positions) == (0, 32, 4)


def test_the_command_on_stages_shows_no_equations(home: Path) -> None:
    words = ["--topology", "pipeline", "--members", "2", "--candidates", "16", "--positions", "2", "--prompt", "abc"]
    result = run(home, *words)
    assert result.exit_code == 0, result.output
    assert "Equations" not in result.stdout
    assert "2 stages one after the other" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--topology", "ring"], "choose fusion or pipeline"),
        (["--members", "1"], "at least"),
        (["--members", "40"], "40"),
        (["--weights", "2:x"], "2:x"),
        (["--member", "3"], "there is no member 3 of 3"),
        (["--layers", "0,7"], "from 0 to 1"),
        (["--layers", "-1"], "are none"),
        (["--prompt", ""], "a prompt of 0 tokens"),
        (["--prompt", "x" * 300], "a prompt of 300 tokens"),
        (["--numerics", "bf16"], "float32"),
        (["--topology", "pipeline", "--layers", "1"], "leave that out"),
    ],
    ids=lambda value: "-".join(value)[:24] if isinstance(value, list) else "",
)
def test_the_command_says_what_is_wrong(home: Path, words: list[str], message: str) -> None:
    result = run(home, *words)
    assert isinstance(result.exception, FusionError), result.exception
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_json_has_no_numbers_that_json_does_not_have(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    assert run(home, "--members", "2", "--positions", "1", "--prompt", "a", "--json", str(file)).exit_code == 0
    json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
