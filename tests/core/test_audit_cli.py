"""``fusion-node audit``: the table, the page, JSON, the exit status, and logs that are none."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fusion_node.audit_records import StepLine
from fusion_node.cli.audit import closed_in_words, parse_dims, percent
from fusion_node.cli.audit_view import MAX_BARS, MAX_PLANS, as_html
from fusion_node.cli.main import app
from fusion_node.errors import AuditFailed, ConfigError, UnknownModel
from fusion_node.slices import Dims
from p2p.identity import short
from tests.core.audit_world import DENSE, EXPERTS, MODEL, USER, World, group, identity_of
from verification.audit_core import audit
from verification.audit_report import CHECK_OF, Kind, Report

SIZES = ("--dims", "96:6:3:8:96")


def trio() -> World:
    world = World((group(0, 2, "abc", (2, 1, 1)),))
    world.steps(5, 1, 1)
    return world


def gathered() -> World:
    """With a member that is sent what is another one's, and a stranger."""
    world = trio()
    for sender, receiver in (("a", "b"), ("c", "b"), ("a", "x")):
        width = 48 if sender == "a" else 24
        world.carry(sender, receiver, StepLine(0, 0, rows=1, width=width, sequence=1, first=6, nodes=1, wanted=1))
    return world.close()


def repaired(times: int) -> World:
    """Whose second member is replaced so often."""
    world = World((group(0, 2, "ab"),))
    world.steps(3)
    for name in "cdefghijklm"[:times]:
        world.kill(world.stages[0].peers[1])
        world.repair((group(0, 2, f"a{name}"),))
        world.steps(1)
    return world.close()


def run(world: World, folder: Path, *arguments: str, expect: int = 0) -> str:
    files = [str(path) for path in world.write(folder)]
    result = CliRunner().invoke(app, ["audit", *files, *SIZES, *arguments], env={"COLUMNS": "100"})
    if expect:
        assert isinstance(result.exception, AuditFailed)
        assert result.exception.exit_code == expect
    else:
        assert result.exit_code == 0, result.output
    return named(result.stdout)


def named(text: str) -> str:
    """With the names of peers in the place of their ids."""
    for name in ("user", *"abcx"):
        peer = identity_of(name).peer_id
        text = text.replace(peer, name).replace(short(peer), f"…{name}")
    return text


def judged(world: World) -> Report:
    return audit(world.logs(), {MODEL: world.dims})


def test_a_table_tells_what_each_node_was_sent(tmp_path: Path) -> None:
    shown = run(trio().close(), tmp_path)
    lines = [line.split() for line in shown.splitlines()]
    assert ["…a", "0:2", "0:48", "50.0%", "50.0%", "48", "100.0%", "own", "slice"] in lines
    assert ["…b", "0:2", "48:72", "25.0%", "25.0%", "48", "100.0%", "own", "slice"] in lines
    assert "closed steps: 3 of 3 (100.0%)" in shown
    assert "released: nobody; not by …a, …b, …c" in shown
    assert shown.count("ok ") == 7
    assert "FAILED" not in shown


def test_what_is_wrong_is_told_with_the_records_and_fails(tmp_path: Path) -> None:
    shown = run(gathered(), tmp_path, expect=15)
    assert shown.count("FAILED") == 3
    assert "whole state" in shown
    assert "too much" in shown
    told = " ".join(shown.split())
    assert re.search(r"path: step 1 .* from …a to …b: the plan has no such way \(a\.log:\d+, b\.log:\d+\)", told)


def test_of_a_node_without_a_log_no_good_is_said(tmp_path: Path) -> None:
    world = trio().close()
    files = [path for path in world.write(tmp_path) if path.stem != "b"]
    result = CliRunner().invoke(app, ["audit", *map(str, files), *SIZES])
    assert isinstance(result.exception, AuditFailed)
    lines = [line.split() for line in named(result.stdout).splitlines()]
    assert [line[-2:] for line in lines if line[:1] == ["…b"]] == [["no", "log"]]
    assert [line[-2:] for line in lines if line[:1] == ["…a"]] == [["own", "slice"]]


def test_a_pipeline_fails_because_its_nodes_are_sent_whole_states(tmp_path: Path) -> None:
    world = World((group(0, 2, "a"), group(2, 3, "b")))
    world.steps(3, 1)
    shown = run(world.close(), tmp_path, expect=15)
    assert "FAILED no node was sent a whole state: 2 findings" in shown
    assert "solvable" in shown


def test_json_has_all_that_was_found(tmp_path: Path) -> None:
    report = json.loads(run(gathered(), tmp_path, "--json", expect=15))
    assert report["passed"] is False
    assert {node["peer"]: node["largest_fraction"] for node in report["sessions"][0]["nodes"]} == {
        "a": 0.5, "b": 1.0, "c": 0.25, "x": 0.5,
    }  # fmt: skip
    assert report["counts"] == {"path": 2, "stranger": 1, "whole": 1, "not-own": 1}


def test_a_member_that_was_sent_something_without_a_grant_fails_the_audit(tmp_path: Path) -> None:
    for path in trio().close().write(tmp_path):
        path.write_text(re.sub(r',"grant":"[0-9a-f]+"', "", path.read_text()))
    files = sorted(map(str, tmp_path.glob("*.log")))
    result = CliRunner().invoke(app, ["audit", *files, *SIZES])
    assert isinstance(result.exception, AuditFailed)
    told = " ".join(named(result.stdout).split())
    assert "FAILED who was sent a part of a state in a group had its user's grant for it: 3 findings" in told
    assert "not-granted: …a was sent 51 parts of states in epoch 0: its open has no grant" in told


def test_one_session_of_several_is_chosen_by_its_name(tmp_path: Path) -> None:
    name = trio().runs[USER].sessions[1]
    assert name in run(trio().close(), tmp_path, "--session", name[:6])
    files = [str(path) for path in tmp_path.glob("*.log")]
    result = CliRunner().invoke(app, ["audit", *files, *SIZES, "--session", "zz"])
    assert isinstance(result.exception, ConfigError)


def test_a_log_that_is_not_there_and_one_that_is_none_are_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["audit", str(tmp_path / "nothing.log")])
    assert isinstance(result.exception, ConfigError)
    (tmp_path / "none.log").write_text("hello\n")
    result = CliRunner().invoke(app, ["audit", str(tmp_path / "none.log")])
    assert isinstance(result.exception, ConfigError)
    assert "none.log, line 1" in str(result.exception)


def test_a_model_that_is_not_in_the_store_has_to_be_described(tmp_path: Path) -> None:
    files = [str(path) for path in trio().close().write(tmp_path)]
    result = CliRunner().invoke(app, ["audit", *files, "--home", str(tmp_path)])
    assert isinstance(result.exception, UnknownModel)
    assert "--dims" in str(result.exception)


def test_sizes_are_read() -> None:
    assert parse_dims("96:6:3:8:96") == DENSE
    assert parse_dims("96:6:3:8:96:4:2") == EXPERTS
    assert parse_dims("576:9:3:64:1536") == Dims(576, 9, 3, 64, 1536)


@pytest.mark.parametrize(
    "text", ["", "96", "96:6:3:8", "96:6:3:8:96:4", "0:6:3:8:96", "96:6:4:8:96", "a:6:3:8:96", "-1:6:3:8:9"]
)
def test_what_are_no_sizes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="576:9:3:64:1536"):
        parse_dims(text)


def test_a_fraction_is_all_only_when_it_is() -> None:
    assert [percent(each) for each in (0.0, 1 / 3, 0.9999, 1.0)] == ["0.0%", "33.3%", "99.9%", "100.0%"]


def test_what_became_of_steps_is_told_in_words() -> None:
    world = trio()
    world.step(1, returns=False)
    assert closed_in_words(judged(world.close()).sessions[0]).endswith("3 of 3 (100.0%), 1 under way at the end")


def test_the_manual_says_of_every_finding_which_check_it_fails() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `([a-z-]+)` \| (logs|closed|digests|paths|own|whole|grants) \|", text, re.MULTILINE))
    assert told == {str(kind): check.name.lower() for kind, check in CHECK_OF.items()}
    assert set(CHECK_OF) == set(Kind)


# The page.


class Page(HTMLParser):
    """Checks that tags are closed, and keeps what matters."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.shapes: list[dict[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        assert not {"src", "href", "onload", "onclick"} & set(values)
        assert tag not in ("script", "img", "link", "iframe")
        if tag == "rect":
            self.shapes.append(values)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "rect":
            self.shapes.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def of(self, style: str) -> list[dict[str, str | None]]:
        return [shape for shape in self.shapes if shape["class"] == style]


def test_a_page_shows_the_slices_of_each_member(tmp_path: Path) -> None:
    run(trio().close(), tmp_path, "--html", str(tmp_path / "page.html"))
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    heights = [float(shape["height"] or 0) for shape in page.of("sent")]
    # A row is 64 high: a half, and two quarters.
    assert heights == [32.0, 16.0, 16.0]
    # The states after layers 1 and 2 are one band.
    assert len(page.of("made")) == 3
    assert len(page.of("user")) == 2
    assert page.of("foreign") == []
    # Three steps at three nodes.
    assert len(page.of("closed")) == 9
    assert "audit passed" in page.texts


def test_a_page_shows_in_red_what_is_not_a_nodes_own() -> None:
    page = Page(as_html(judged(gathered())))
    assert "audit failed" in page.texts
    # Above and below its own columns, and the bar of the step; and the stranger's.
    assert len(page.of("foreign")) == 5


def test_a_page_draws_each_plan_and_many_of_them_in_part() -> None:
    page = Page(as_html(judged(repaired(2))))
    assert [text for text in page.texts if text.startswith("Plan ")] == ["Plan 0 (the first)", "Plan 1", "Plan 2"]
    many = Page(as_html(judged(repaired(9))))
    assert len([text for text in many.texts if text.startswith("Plan ")]) == MAX_PLANS
    assert "4 plans between them are not drawn." in many.texts


def test_a_page_of_a_long_answer_has_no_more_bars_than_one_can_see() -> None:
    world = World((group(0, 1, "ab"),))
    world.steps(*[1] * (2 * MAX_BARS + 1))
    page = Page(as_html(judged(world.close())))
    assert MAX_BARS / 2 < len(page.of("closed")) / 2 <= MAX_BARS


def test_nothing_from_a_log_becomes_markup(tmp_path: Path) -> None:
    world = gathered()
    for run_ in world.runs.values():
        run_.source = "<script>alert(1)</script>.log"
    text = as_html(judged(world))
    Page(text)
    assert "&lt;script&gt;" in text


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    files = [str(path) for path in trio().close().write(tmp_path)]
    result = CliRunner().invoke(app, ["audit", *files, *SIZES, "--html", str(tmp_path / "no" / "page.html")])
    assert isinstance(result.exception, ConfigError)


@pytest.mark.parametrize("line", [[], ["--demo", "some.log"]])
def test_logs_or_the_demonstration_have_to_be_named(line: list[str]) -> None:
    result = CliRunner().invoke(app, ["audit", *line])
    assert isinstance(result.exception, ConfigError)
    assert "or else say --demo" in str(result.exception)
