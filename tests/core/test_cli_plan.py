"""``fusion-node plan`` for people: what it says of a plan, of none, and of rules that make no sense."""

from __future__ import annotations

import msgspec
import pytest
from typer.testing import CliRunner

from fusion_node.cli.main import app
from fusion_node.cli.plan import MAX_SHOWN_REJECTED, WIDTH, in_words
from fusion_node.client.plan_view import AlternateView, LegView, PlaceView, PlannedStageView, PlanView, RejectedView
from fusion_node.errors import ConfigError

PEERS = [f"12D3KooW{letter * 44}" for letter in "abc"]
STAGE = PlannedStageView(
    peer=PEERS[0],
    operator="anna",
    region="eu-west",
    price=0.5,
    device="NVIDIA GeForce RTX 4090",
    start=0,
    stop=30,
    round_trip_ms=12.5,
    compute_ms=31.0,
    queue_ms=2.0,
    is_measured=True,
    why="best for 0:30",
    note="announces 0.5 ms per layer, measured 1.03 ms",
    alternate=AlternateView((PlaceView(PEERS[1], 0, 10), PlaceView(PEERS[2], 10, 30)), 20.5),
)
REJECTED = RejectedView(
    peer=PEERS[1],
    operator="",
    region="",
    price=0.0,
    device="cpu",
    start=0,
    stop=10,
    reason="slower",
    why="20.5 ms per token slower at best",
    excess_ms=20.5,
    note="",
)
VIEW = PlanView(
    model="smollm2-135m",
    model_id="ab" * 32,
    numerics="fp32",
    num_layers=30,
    objective="latency",
    rules=("deny region:us",),
    prompt_tokens=64,
    max_tokens=256,
    num_found=3,
    num_measured=3,
    coordinate_error=0.123,
    stages=(STAGE,),
    legs=(
        LegView(None, PEERS[0], 7.25, 6.25, 0.0, 1.0, "measured", None),
        LegView(PEERS[0], None, 7.25, 6.25, 0.0, 1.0, "predicted", 1.5),
    ),
    user_ms=5.0,
    ms_per_token=52.5,
    tokens_per_s=19.05,
    opening_ms=14.0,
    first_token_ms=400.0,
    full_tokens_per_s=120.0,
    bottleneck="stage 1",
    rejected=(REJECTED,),
)


def text_of(view: PlanView) -> str:
    lines = list(in_words(view))
    assert max(map(len, lines)) <= WIDTH
    return "\n".join(lines)


def test_every_part_of_a_token_is_told_with_its_source() -> None:
    text = text_of(VIEW)
    rows = [line.split() for line in text.splitlines() if "→" in line or "computes" in line or line.startswith("you:")]
    assert [row[-2:] for row in rows[:2]] == [["7.25", "measured"], ["31.00", "measured"]]
    assert "predicted ± 1.50" in text
    assert "52.50" in text
    assert "19.1 tokens/s" in text
    assert "first token 0.41 s after" in text
    assert "network coordinates are off by 12 % here" in text
    assert "your rules: deny region:us" in text


def test_a_stage_tells_whose_it_is_why_it_serves_and_who_would_else() -> None:
    text = " ".join(text_of(VIEW).split())
    assert "…aaaaaaaa layers 0:30, NVIDIA GeForce RTX 4090, anna, eu-west, price 0.5" in text
    assert "slower than it says: announces 0.5 ms per layer, measured 1.03 ms" in text
    assert "if it is lost: …bbbbbbbb 0:10 → …cccccccc 10:30, 20.50 ms more a token" in text
    alone = msgspec.structs.replace(VIEW, stages=(msgspec.structs.replace(STAGE, alternate=None),))
    assert "if it is lost, nobody can take its place" in text_of(alone)


def test_without_a_route_the_candidates_are_told_and_why_not() -> None:
    text = text_of(msgspec.structs.replace(VIEW, stages=(), legs=(), ms_per_token=None, problem="no route"))
    assert "together" not in text
    assert "…bbbbbbbb layers 0:10, cpu: 20.5 ms per token slower at best" in text


def test_a_plan_that_may_not_be_the_best_says_by_how_much() -> None:
    text = text_of(msgspec.structs.replace(VIEW, is_optimal=False, gap_ms=3.25, num_unsearched=7))
    assert "could save at most 3.25 ms; 7 shards were not searched" in text
    assert "no route of these nodes is better" not in text


def test_of_many_rejected_the_nearest_are_shown() -> None:
    many = tuple(
        msgspec.structs.replace(REJECTED, excess_ms=float(number), why=f"number {number} is slower")
        for number in reversed(range(MAX_SHOWN_REJECTED + 5))
    )
    text = text_of(msgspec.structs.replace(VIEW, rejected=many))
    assert "number 0 is slower" in text
    assert f"number {MAX_SHOWN_REJECTED} is slower" not in text
    assert "and 5 more; --json has all" in text


@pytest.mark.parametrize("command", [["generate", "m", "hello"], ["chat", "m"], ["serve", "m"], ["plan", "m"]])
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--deny", "country:de"], "names nobody"),
        (["--allow", "12D3KooW"], "too short for a peer"),
        (["--max-price", "-1"], "makes no sense"),
        (["--max-stages", "0"], "makes no sense"),
        (["--topology", "ring"], "unknown topology 'ring': pipeline, fusion, hybrid"),
        (["--members", "3"], "add --topology fusion"),
        (["--topology", "fusion", "--members", "1"], "name 2 to 16"),
        (["--ownership", "/missing.toml"], "cannot read the ownership file /missing.toml"),
    ],
)
def test_rule_that_makes_no_sense_is_refused_before_anything_is_loaded(
    command: list[str], options: list[str], complaint: str
) -> None:
    failed = CliRunner().invoke(app, [*command, *options])
    assert isinstance(failed.exception, ConfigError)
    assert complaint in str(failed.exception)


def test_serve_records_what_it_sends_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        def __init__(self, model: str, **options: object) -> None:
            raise ConfigError(f"records in {options['audit']}")

    monkeypatch.setattr("fusion_node.client.swarm.SwarmClient", Client)
    failed = CliRunner().invoke(app, ["serve", "m", "--listen", "127.0.0.1:0", "--audit", "user.log"])
    assert str(failed.exception) == "records in user.log"
