"""The ownership file: who may hold which part of a model's states, in TOML, as scheduler.ownership takes it.

It says who may hold what to somebody who writes it by hand, and nothing that it could have meant otherwise is guessed:
the default has to be written, peer ids have to be whole, and what is not known is an error that names the line, the key
and what to write instead. A file that has become wrong while the program runs leaves the last good rules in force, and
so does one that is being written: its beginning may be right by itself, and allow what the rest forbids.
"""

from __future__ import annotations

import difflib
import re
import stat
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import structlog

from fusion_node.errors import ConfigError
from fusion_node.slices import ModelSlice
from fusion_node.types import LayerRange, PeerId
from fusion_node.wire import printable
from p2p.identity import public_key_of
from scheduler.ownership import HoldRule, Ownership, PairRule, Who

MAX_FILE_BYTES = 256 * 1024

MAX_RULES = 256
"""Of each kind."""

MAX_NAMED = 256
"""Peers and operators, slices, or layer ranges of one rule."""

MAX_TAG_CHARACTERS = 96
"""Of an operator's name: records hold no more."""

SETTLED_S = 0.25
"""For so long a file that has changed has to stay as it is before it is read: more than a program takes between two
parts of what it writes, and than the clocks of file systems are coarse."""

MAX_WAITS = 12
"""Of SETTLED_S, for a file that changes all the time."""

ANYBODY = "anybody"
ANY_SLICE = "any"

_HOLD_KEYS = ("who", "slices", "layers")
_PAIR_KEYS = ("who",)
_KINDS: Mapping[str, tuple[str, ...]] = {
    "may_hold": _HOLD_KEYS,
    "never_hold": _HOLD_KEYS,
    "never_together": _PAIR_KEYS,
    "never_adjacent": _PAIR_KEYS,
}
_KEYS = ("default", *_KINDS)

_HEADER = re.compile(r"""^\s*\[\[\s*["']?([\w-]+)["']?\s*\]\]""")
_KEY = re.compile(r"""^\s*["']?([\w-]+)["']?\s*=""")

_Stamp: TypeAlias = tuple[int, int, int, int]

_UNSETTLED: _Stamp = (-1, -1, -1, -1)
"""Of no file."""

log = structlog.get_logger(__name__)


class OwnershipFile:
    """The rules of a file that is read again when it has changed.

    Args:
        sleep: waits so many seconds.

    Attributes:
        rules: the last that could be read.
        problem: why what is in the file now is not in force; None: it is.

    Raises:
        ConfigError: the file cannot be read, or is wrong.
    """

    def __init__(self, path: Path, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._path = path
        self._sleep = sleep
        self._refreshing = threading.Lock()
        self._stamp = self._stamp_of_file()
        self.rules = read_ownership(path)
        self.problem: ConfigError | None = None

    def refresh(self) -> bool:
        """Reads the file again if it has changed. To be called about once a second, on a thread that may wait: it costs
        a look at the file's date, and where that is another one, waits until nobody writes any more.

        Returns:
            Whether other rules are in force than before.
        """
        with self._refreshing:
            stamp = self._stamp_of_file()
            return stamp != self._stamp and self._read_settled(stamp)

    def _read_settled(self, stamp: _Stamp | None) -> bool:
        for _ in range(MAX_WAITS):
            self._sleep(SETTLED_S)
            before, stamp = stamp, self._stamp_of_file()
            if stamp != before:
                continue
            try:
                found: Ownership | ConfigError = read_ownership(self._path)
            except ConfigError as error:
                found = error
            if self._stamp_of_file() == stamp:
                self._stamp = stamp
                return self._take(found)
        self._stamp = _UNSETTLED
        return self._take(ConfigError(f"the ownership file {self._path} is being written: try again when it is done"))

    def _take(self, found: Ownership | ConfigError) -> bool:
        if isinstance(found, ConfigError):
            self.problem = found
            log.error("the rules on ownership are not changed: they hold as they were", reason=str(found))
            return False
        self.problem = None
        before, self.rules = self.rules, found
        return found != before

    def _stamp_of_file(self) -> _Stamp | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        # The inode too: editors replace a file. And its own date: that of what is in it may be set to another's.
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def read_ownership(path: Path) -> Ownership:
    """The rules in a file.

    Raises:
        ConfigError: it cannot be read, or is wrong.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(
                f"the ownership file {path} is no regular file, which alone can be read again when it changes"
            )
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the ownership file {path}: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"the ownership file {path} is larger than {MAX_FILE_BYTES >> 10} KiB")
    try:
        text = data.decode("utf-8-sig")  # editors may put a mark of the byte order in front
    except UnicodeDecodeError as error:
        raise ConfigError(f"the ownership file {path} is not a text file in UTF-8") from error
    return parse_ownership(text, name=str(path))


def parse_ownership(text: str, *, name: str = "") -> Ownership:
    """The rules in a text.

    Args:
        name: of the file, for people.

    Raises:
        ConfigError: something is wrong in it. Says on which line, and what to write instead.
    """
    return _Reader(text.replace("\r\n", "\n"), name).read()


class _Reader:
    def __init__(self, text: str, name: str) -> None:
        self._name = name
        self._text = text
        self._lines = _Lines(text)

    def read(self) -> Ownership:
        try:
            found = tomllib.loads(self._text)
        except tomllib.TOMLDecodeError as error:
            # It names the line, but for the last one.
            text = str(error).replace("at end of document", f"at the end, line {self._text.count(chr(10)) + 1}")
            raise ConfigError(f"ownership file {self._name}".rstrip() + f": no TOML: {text}") from error
        except (ValueError, RecursionError) as error:
            # What the parser itself does not refuse: numbers of thousands of digits, and brackets in one another.
            text = f"{error} (lines 1 to {self._text.count(chr(10)) + 1})"
            raise ConfigError(
                f"ownership file {self._name}".rstrip() + f": no TOML that can be read: {text}"
            ) from error
        for key in found:
            if key not in _KEYS:
                raise self._wrong(self._lines.of(key), key, f"is no key of this file{_instead(key, _KEYS)}")
        if "default" not in found:
            for kind in _KINDS:
                tables = found.get(kind)
                for number, table in enumerate(tables if isinstance(tables, list) else ()):
                    if isinstance(table, dict) and "default" in table:
                        what = (
                            f"stands inside a {kind}: write it above the first [[…]], below which all keys are a rule's"
                        )
                        raise self._wrong(self._lines.of(kind, number, "default"), "default", what)
            raise self._wrong(
                1, "default", 'is missing: write default = "deny" (who is not named holds nothing) or "allow"'
            )
        default, line = found["default"], self._lines.of("default")
        if default not in ("allow", "deny"):
            raise self._wrong(line, "default", f'is {_shown(default)}: write "allow" or "deny"')
        rules: dict[str, list[HoldRule]] = {"may_hold": [], "never_hold": []}
        pairs: dict[str, list[PairRule]] = {"never_together": [], "never_adjacent": []}
        for kind in _KINDS:
            for number, table in enumerate(self._tables(found, kind)):
                at = self._lines.of(kind, number)
                who = self._who(kind, number, table, is_pair=kind in pairs)
                if kind in pairs:
                    pairs[kind].append(PairRule(who, where=f"ownership line {at}"))
                else:
                    slices, layers = self._slices(kind, number, table), self._layers(kind, number, table)
                    rules[kind].append(HoldRule(who, slices, layers, where=f"ownership line {at}"))
        return Ownership(
            is_default_allow=default == "allow",
            may_hold=tuple(rules["may_hold"]),
            never_hold=tuple(rules["never_hold"]),
            never_together=tuple(pairs["never_together"]),
            never_adjacent=tuple(pairs["never_adjacent"]),
            name=self._name,
            where_default=f"ownership line {line}",
        )

    def _tables(self, found: Mapping[str, Any], kind: str) -> Iterator[Mapping[str, Any]]:
        tables = found.get(kind, [])
        if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
            raise self._wrong(self._lines.of(kind), kind, f"is not a list of rules: write [[{kind}]] above each")
        if len(tables) > MAX_RULES:
            raise self._wrong(self._lines.of(kind, MAX_RULES), kind, f"has {len(tables)} rules; {MAX_RULES} at most")
        for number, table in enumerate(tables):
            for key in table:
                if key not in _KINDS[kind]:
                    line = self._lines.of(kind, number, key)
                    raise self._wrong(line, key, f"is no key of {kind}{_instead(key, _KINDS[kind])}")
            if "who" not in table:
                line = self._lines.of(kind, number)
                raise self._wrong(line, kind, 'has no who: add who = "operator:NAME", a peer id, or a list of them')
            yield table

    def _words(self, kind: str, number: int, table: Mapping[str, Any], key: str, example: str) -> list[tuple[int, str]]:
        """One text or several, each with its line."""
        value, line = table[key], self._lines.of(kind, number, key)
        words = value if isinstance(value, list) else [value]
        if not words or not all(isinstance(word, str) for word in words):
            raise self._wrong(line, key, f"is {_shown(value)}: write {example}")
        if len(words) > MAX_NAMED:
            raise self._wrong(line, key, f"lists {len(words)}; {MAX_NAMED} at most")
        return [(self._lines.of_text(word, line), word.strip()) for word in words]

    def _who(self, kind: str, number: int, table: Mapping[str, Any], *, is_pair: bool) -> Who:
        peers, operators, is_anybody = set[PeerId](), set[str](), False
        example = '"operator:NAME", a whole peer id, or a list of them'
        for line, word in self._words(kind, number, table, "who", example):
            begin, colon, name = word.partition(":")
            if colon and begin == "operator" and 1 <= len(name.strip()) <= MAX_TAG_CHARACTERS:
                operators.add(name.strip())
            elif word == ANYBODY and not is_pair:
                is_anybody = True
            elif word == ANYBODY:
                raise self._wrong(line, "who", f'"{ANYBODY}" would leave no group: name peers and operators')
            elif not colon and _is_peer(word):
                peers.add(PeerId(word))
            else:
                raise self._wrong(line, "who", f"{_shown(word)} names nobody: {_who_instead(word, is_pair)}")
        if is_pair and len(peers) == 1 and not operators:
            line = self._lines.of(kind, number, "who")
            raise self._wrong(line, "who", "names one node, which has nobody to be beside: name two, or an operator")
        return Who(frozenset(peers), frozenset(operators), is_anybody)

    def _slices(self, kind: str, number: int, table: Mapping[str, Any]) -> frozenset[ModelSlice] | None:
        if "slices" not in table:
            return None
        example = '"any", or slices as "0/3" ("0/1" is whole rows), one or a list'
        found, is_any = set[ModelSlice](), False
        for line, word in self._words(kind, number, table, "slices", example):
            if word == ANY_SLICE:
                is_any = True
                continue
            try:
                found.add(ModelSlice.parse(word))
            except ConfigError as error:
                raise self._wrong(line, "slices", f'{error}; whole rows are 0/1, and all of them "any"') from error
        return None if is_any else frozenset(found)

    def _layers(self, kind: str, number: int, table: Mapping[str, Any]) -> tuple[LayerRange, ...]:
        if "layers" not in table:
            return ()
        found = []
        for line, word in self._words(kind, number, table, "layers", '"START:STOP" as "0:15", one or a list'):
            try:
                found.append(LayerRange.parse(word))
            except ConfigError as error:
                raise self._wrong(line, "layers", str(error)) from error
        # Ranges that touch are one: a node's layers may lie in both.
        joined: list[LayerRange] = []
        for each in sorted(found):
            if joined and each.start <= joined[-1].stop:
                joined[-1] = LayerRange(joined[-1].start, max(joined[-1].stop, each.stop))
            else:
                joined.append(each)
        return tuple(joined)

    def _wrong(self, line: int, key: str, what: str) -> ConfigError:
        name = f" {self._name}" if self._name else ""
        return ConfigError(f"ownership file{name}, line {line}: {printable(key, limit=40)}: {what}")


class _Lines:
    """On which line of a file something is. The parser of the standard library does not tell.

    Reads a file that is written as TOML usually is: a header or a key at the beginning of a line. Of anything else it
    tells a line before.
    """

    def __init__(self, text: str) -> None:
        self._lines = text.split("\n")
        self._at: dict[tuple[str, int, str], int] = {}
        numbers: dict[str, int] = {}
        table, number = "", 0
        for line, content in enumerate(self._lines, 1):
            if found := _HEADER.match(content):
                table = found[1]
                number = numbers[table] = numbers.get(table, -1) + 1
                self._at.setdefault((table, number, ""), line)
            elif found := _KEY.match(content):
                self._at.setdefault((table, number, found[1]) if table else (found[1], 0, ""), line)

    def of(self, kind: str, number: int = 0, key: str = "") -> int:
        """Of a key, of the rule with this number of a kind; 1 where it is not found."""
        places = ((kind, number, key), (kind, number, ""), (kind, 0, ""), ("", 0, ""))
        return next((self._at[place] for place in places if place in self._at), 1)

    def of_text(self, text: str, line: int) -> int:
        """Where a text stands, from this line on; the line where it is not found."""
        lines = range(line, len(self._lines) + 1)
        return next((n for n in lines if text in self._lines[n - 1]), line)


def _is_peer(text: str) -> bool:
    try:
        public_key_of(text)
    except ValueError:
        return False
    return True


def _who_instead(word: str, is_pair: bool) -> str:
    if word.startswith("region:"):
        return "who may own something is a peer or an operator; for regions there are --allow and --deny"
    anybody = "" if is_pair else f', or "{ANYBODY}"'
    return f'write a whole peer id (`fusion-node status --json` shows them), "operator:NAME"{anybody}'


def _instead(key: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(key, known, 1)
    return f": did you mean {close[0]}?" if close else f": there are {', '.join(known)}"


def _shown(value: object) -> str:
    return printable(repr(value), limit=80)
