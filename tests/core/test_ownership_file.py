"""The ownership file: what it says, what is wrong with it and where, and that it is read again."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from fusion_node.client.ownership_file import (
    MAX_FILE_BYTES,
    MAX_RULES,
    OwnershipFile,
    parse_ownership,
    read_ownership,
)
from fusion_node.errors import ConfigError
from fusion_node.slices import ModelSlice
from fusion_node.types import LayerRange
from p2p.identity import Identity
from scheduler.ownership import HoldRule, Ownership, PairRule, Who

EXAMPLE = Path(__file__).parents[2] / "deploy" / "ownership.toml"
PEERS = [Identity.from_seed(bytes([number] * 32)).peer_id for number in (1, 2)]


def operators(*names: str) -> Who:
    return Who(operators=frozenset(names))


def test_example_is_what_it_says() -> None:
    rules = read_ownership(EXAMPLE)
    lines = EXAMPLE.read_text().splitlines()

    def at(number: int, text: str) -> str:
        return f"ownership line {[n for n, line in enumerate(lines, 1) if line == text][number]}"

    def third(index: int, who: str, *layers: LayerRange) -> HoldRule:
        return HoldRule(operators(who), frozenset({ModelSlice(index, (1, 1, 1))}), layers, at(index, "[[may_hold]]"))

    assert rules == Ownership(
        is_default_allow=False,
        may_hold=(third(0, "anna"), third(1, "ben"), third(2, "carl", LayerRange(0, 30))),
        never_hold=(HoldRule(Who(is_anybody=True), frozenset({ModelSlice(0, (1,))}), (), at(0, "[[never_hold]]")),),
        never_adjacent=(PairRule(operators("anna", "carl"), at(0, "[[never_adjacent]]")),),
        name=str(EXAMPLE),
        where_default=at(0, 'default = "deny"'),
    )
    assert rules.in_words() == (f"ownership {EXAMPLE}: default deny, 3 may_hold, 1 never_hold, 1 never_adjacent",)


def test_peers_operators_and_weights_may_be_listed_over_several_lines() -> None:
    text = f"""
        default = "allow"
        [[may_hold]]
        who = [
            "{PEERS[0]}",  # mine
            "operator:anna",
            "{PEERS[1]}",
        ]
        slices = ["0/2:1", "0/1"]
        [[never_hold]]
        who = "anybody"
        slices = "any"
        layers = "0:2"
    """
    rules = parse_ownership(text)
    [may], [never] = rules.may_hold, rules.never_hold
    assert may.who == Who(frozenset(PEERS), frozenset({"anna"}))
    assert may.slices == {ModelSlice(0, (2, 1)), ModelSlice(0, (1,))}
    assert (never.slices, never.layers) == (None, (LayerRange(0, 2),))
    assert (may.where, never.where, rules.where_default) == (
        "ownership line 3", "ownership line 10", "ownership line 2"
    )  # fmt: skip


HEAD = 'default = "deny"\n'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", r'line 1: default: is missing: write default = "deny"'),
        ("[[may_hold]]\nwho = 1", r"line 1: default: is missing"),
        ('\ndefault = "maybe"', r"""line 2: default: is 'maybe': write "allow" or "deny\""""),
        ("default = true", r"line 1: default: is True"),
        ("default = ", r"no TOML: .*line 1"),
        (HEAD + "[[may_hold]]\nwho = 'x", r"no TOML: .*line 3"),
        (HEAD + "[[may_hodl]]\nwho = 'operator:x'", r"line 2: may_hodl: is no key of this file: did you mean may_hold"),
        (HEAD + "colour = 1", r"line 2: colour: is no key of this file: there are default, may_hold, never_hold"),
        (HEAD + "may_hold = 3", r"line 2: may_hold: is not a list of rules: write \[\[may_hold\]\] above each"),
        (HEAD + "[may_hold]\nwho = 'operator:x'", r"may_hold: is not a list of rules"),
        (HEAD + "\n[[never_hold]]\nslices = '0/3'", r"line 3: never_hold: has no who: add who = \"operator:NAME\""),
        (
            HEAD + "[[may_hold]]\nwho = 'operator:x'\n[[may_hold]]\nwho = 'operator:y'\nslice = '0/3'",
            r"line 6: slice: is no key of may_hold: did you mean slices\?",
        ),
        (
            HEAD + "[[never_adjacent]]\nwho = 'operator:x'\nslices = '0/3'",
            r"line 4: slices: is no key of never_adjacent: there are who",
        ),
        ("[[may_hold]]\nwho = 'operator:x'\n" + HEAD, r"line 3: default: stands inside a may_hold: write it above"),
        (HEAD + "colour = " + "[" * 20_000, r"no TOML that can be read: .*\(lines 1 to 2\)"),
        (HEAD + "colour = " + "9" * 5_000, r"no TOML that can be read: .*\(lines 1 to 2\)"),
        (HEAD + "[[may_hold]]\nwho = []", r"line 3: who: is \[\]: write \"operator:NAME\", a whole peer id"),
        (HEAD + "[[may_hold]]\nwho = [1]", r"line 3: who: is \[1\]: write"),
        (HEAD + "[[may_hold]]\nwho = [\n'operator:a',\n'anna']", r"line 5: who: 'anna' names nobody: write a whole"),
        (HEAD + "[[may_hold]]\nwho = 'operator:'", r"line 3: who: 'operator:' names nobody"),
        (HEAD + f"[[may_hold]]\nwho = '{PEERS[0][-8:]}'", r"line 3: who: .* names nobody: write a whole peer id"),
        (HEAD + "[[may_hold]]\nwho = 'region:eu'", r"line 3: who: .*for regions there are --allow and --deny"),
        (HEAD + "[[never_together]]\nwho = 'anybody'", r'line 3: who: "anybody" would leave no group'),
        (HEAD + f"[[never_together]]\nwho = '{PEERS[0]}'", r"line 3: who: names one node, which has nobody to be"),
        (HEAD + "[[may_hold]]\nwho = 'operator:x'\nslices = '3/3'", r"line 4: slices: there is no slice 3 of 3.*whole"),
        (HEAD + "[[may_hold]]\nwho = 'operator:x'\nslices = ['0/3',\n'half']", r"line 5: slices: slice 'half' is none"),
        (HEAD + "[[may_hold]]\nwho = 'operator:x'\nslices = 0", r"line 4: slices: is 0: write \"any\", or slices as"),
        (HEAD + "[[may_hold]]\nwho = 'operator:x'\nlayers = '9:3'", r"line 4: layers: layers 9:3 is not a range"),
        (HEAD + "[[may_hold]]\nwho = 'operator:x'\nlayers = ['0-3']", r"line 4: layers: layers '0-3' is not a range"),
        (
            HEAD + "[[may_hold]]\nwho = 'operator:x'\n" * (MAX_RULES + 1),
            rf"line {2 + 2 * MAX_RULES}: may_hold: has {MAX_RULES + 1} rules; {MAX_RULES} at most",
        ),
        (
            HEAD + f"[[may_hold]]\nwho = {[f'operator:{n}' for n in range(257)]}",
            r"line 3: who: lists 257; 256 at most",
        ),
        (
            HEAD + '[[may_hold]]\nwho = "operator:\\u001b[2J"\nslices = "\\u001b[2J"',
            r"line 4: slices: slice '\\x1b\[2J' is none",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_line_and_key_and_what_to_write(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as told:
        parse_ownership(text, name="own.toml")
    assert str(told.value).startswith(("ownership file own.toml, line ", "ownership file own.toml: no TOML"))
    assert str(told.value).isprintable()


def test_files_that_cannot_be_read_say_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the ownership file .*missing.toml: No such file"):
        read_ownership(tmp_path / "missing.toml")
    (tmp_path / "latin.toml").write_bytes(b'default = "\xe4"')
    with pytest.raises(ConfigError, match="not a text file in UTF-8"):
        read_ownership(tmp_path / "latin.toml")
    (tmp_path / "large.toml").write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than 256 KiB"):
        read_ownership(tmp_path / "large.toml")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes that have a name")
def test_what_cannot_be_read_twice_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe is no regular file, which alone can be read again when it changes"):
        read_ownership(tmp_path / "pipe")


def test_mark_of_the_byte_order_is_no_part_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_bytes(b"\xef\xbb\xbf" + HEAD.encode())
    assert not read_ownership(tmp_path / "own.toml").is_default_allow


def test_whatever_is_in_a_file_is_read_or_refused_with_an_error_of_ours() -> None:
    rng = random.Random(7)
    text, errors = EXAMPLE.read_text(), list[str]()
    for _ in range(400):
        start = rng.randrange(len(text))
        cut = rng.choice(("", "\n", '"', "[[", "]", "= 3", "\x00", text[: rng.randrange(40)]))
        broken = text[:start] + cut + text[start + rng.randrange(30) :]
        try:
            parse_ownership(broken)
        except ConfigError as error:
            errors.append(str(error))
    assert len(errors) > 100
    assert all("line " in error for error in errors)


def test_file_is_read_again_when_it_changes_and_a_wrong_one_leaves_the_rules_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(HEAD)
    file = OwnershipFile(path)
    assert not file.refresh()
    before = file.rules
    path.write_text(HEAD + "[[may_hold]]\nwho = 'operator:anna'\n")
    assert file.refresh()
    assert file.rules != before
    after = file.rules
    path.write_text("")
    assert not file.refresh()
    assert file.rules == after
    assert "default: is missing" in str(file.problem)
    path.unlink()
    assert not file.refresh()
    assert "cannot read" in str(file.problem)
    path.write_text(HEAD + "[[may_hold]]\nwho = 'operator:ben'\n")
    assert file.refresh()
    assert file.problem is None
    stamp = path.stat()
    path.write_text(HEAD + "[[may_hold]]\nwho = 'operator:bob'\n")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    assert file.refresh(), "of the same size"


class Writer:
    """Writes a file in parts, one whenever its reader waits, as programs do whose buffer is smaller than the file."""

    def __init__(self, path: Path, *parts: str) -> None:
        self._path, self._parts = path, list(parts)
        self.num_waits = 0

    def __call__(self, seconds: float) -> None:
        self.num_waits += 1
        if self._parts:
            with self._path.open("a") as file:
                file.write(self._parts.pop(0))


def test_of_a_file_that_is_being_written_no_part_is_taken_for_the_whole(tmp_path: Path) -> None:
    """A beginning may be right by itself, and allow what the rest of it forbids."""
    path = tmp_path / "own.toml"
    path.write_text('default = "deny"\n')
    writer = Writer(path, "[[never_hold]]\n", 'who = "operator:x"\n', "")
    file = OwnershipFile(path, sleep=writer)
    assert not file.refresh()
    assert not writer.num_waits, "nothing has changed"
    path.write_text('default = "allow"\n')
    assert file.refresh()
    assert file.rules.never_hold, "the whole file"
    assert file.problem is None


def test_of_a_file_that_changes_all_the_time_the_rules_stay_and_no_answer_begins(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('default = "deny"\n')
    file = OwnershipFile(path, sleep=Writer(path, *["#\n"] * 1000))
    path.write_text('default = "allow"\n')
    assert not file.refresh()
    assert not file.rules.is_default_allow
    assert "being written" in str(file.problem)
    file._sleep = lambda seconds: None
    assert file.refresh()
    assert file.problem is None
    assert file.rules.is_default_allow


def test_error_in_a_changed_file_is_told_at_every_look_whatever_kind_it_is_of(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(HEAD)
    file = OwnershipFile(path)
    path.write_text(HEAD + "x = " + "[" * 20_000)
    for _ in range(2):
        assert not file.refresh()
        assert "no TOML that can be read" in str(file.problem)
