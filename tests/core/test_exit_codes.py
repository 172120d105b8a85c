"""docs/exit-codes.md and fusion_node/errors.py say the same."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from fusion_node import errors
from fusion_node.errors import FusionError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "exit-codes.md"
ROW = re.compile(r"^\| (\d+) \| `(\w+)` \| (.+?) \| (yes|no) \| (.+?) \|$", re.MULTILINE)


def all_errors() -> list[type[FusionError]]:
    return [each for _name, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, FusionError)]


def summary(error: type[FusionError]) -> str:
    """The first paragraph of the docstring, on one line."""
    return " ".join((inspect.getdoc(error) or "").partition("\n\n")[0].split())


def test_every_error_has_its_own_exit_status() -> None:
    codes = [error.exit_code for error in all_errors()]
    assert sorted(codes) == sorted(set(codes))
    assert all(0 < code < 126 for code in codes), "0 is success; shells use 126 and above"


def test_every_error_declares_its_exit_status_and_docstring() -> None:
    assert [error.__name__ for error in all_errors() if "exit_code" not in vars(error) or not error.__doc__] == []


def test_the_page_lists_every_error_as_the_code_has_it() -> None:
    expected = {
        (str(error.exit_code), error.__name__, summary(error), "yes" if error.retryable else "no")
        for error in all_errors()
    }
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert {row[:4] for row in rows} == expected
    assert len(rows) == len(expected)


def test_the_page_is_in_order_of_exit_status() -> None:
    codes = [int(row[0]) for row in ROW.findall(PAGE.read_text(encoding="utf-8"))]
    assert codes == sorted(codes)
