"""The documentation says what is there: every module in the code map, every link, every command line that it shows.

``python tests/core/test_docs.py`` writes the tables of docs/code-map.md anew, from the docstrings of the modules.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import typer
from markdown_it import MarkdownIt
from markdown_it.token import Token

from fusion_node.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("fusion_node", "p2p", "scheduler", "verification")
CODE_MAP = ROOT / "docs" / "code-map.md"
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.md")],
)

SHELLS = {"", "sh", "bash", "console"}
"""Info strings of the fences that may hold command lines."""

_ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
_SENTENCE = re.compile(r"(.+?[.!?])(?= [A-Z`]|$)")
_IMAGE = re.compile(r"<(?:img|source)\b[^>]*?\bsrc(?:set)?=\"([^\"]+)\"")
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]+")
_END_OF_COMMAND = {"|", ">", "2>", ">>", "&", "&&", ";", "||"}


# The code map.


def modules_of(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"), key=lambda path: (path.parent.as_posix(), path.name))


def title_of(path: Path) -> str:
    """How the code map calls a module: its path, or its folder's when it is the package itself."""
    name = path.relative_to(ROOT)
    return f"{name.parent.as_posix()}/" if path.name == "__init__.py" else name.as_posix()


def summary_of(path: Path) -> str:
    """The first sentence of the module's docstring, in Markdown."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    found = _SENTENCE.match(paragraph)
    return (found[1] if found else paragraph).replace("``", "`").replace("|", "\\|")


def table_of(package: str) -> str:
    rows = [f"| `{title_of(path)}` | {summary_of(path)} |" for path in modules_of(package)]
    return "\n".join(["| module | what it is |", "| --- | --- |", *rows])


def marked(package: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- modules: {package} -->\n).*?(<!-- end -->)", re.DOTALL)


def code_map_as_it_should_be() -> str:
    text = CODE_MAP.read_text(encoding="utf-8")
    for package in PACKAGES:
        table = table_of(package)
        text, count = marked(package).subn(lambda found, table=table: f"{found[1]}\n{table}\n\n{found[2]}", text)
        assert count == 1, f"{CODE_MAP.name} has {count} places for the modules of {package}"
    return text


@pytest.mark.parametrize("path", [path for package in PACKAGES for path in modules_of(package)], ids=title_of)
def test_every_module_has_a_summary(path: Path) -> None:
    assert summary_of(path).endswith((".", "!", "?")), "its docstring begins with a sentence"


def test_the_code_map_lists_every_module_once() -> None:
    # Not the summaries: a docstring may be improved without another page in the same commit.
    listed = Counter(_ROW.findall(CODE_MAP.read_text(encoding="utf-8").partition("## Beside the packages")[0]))
    expected = Counter(title_of(path) for package in PACKAGES for path in modules_of(package))
    assert listed == expected, f"run python tests/core/test_docs.py; {listed - expected=}, {expected - listed=}"


# Links.


@cache
def tokens_of(page: Path) -> tuple[Token, ...]:
    blocks = MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
    return tuple(token for block in blocks for token in (block, *(block.children or ())))


def links_of(page: Path) -> Iterator[str]:
    for token in tokens_of(page):
        match token.type:
            case "link_open":
                yield str(token.attrs["href"])
            case "image":
                yield str(token.attrs["src"])
            case "html_block" | "html_inline":
                yield from _IMAGE.findall(token.content)


@cache
def anchors_of(page: Path) -> frozenset[str]:
    """The ids that a heading gets on code hosts: lower case, no punctuation, hyphens for spaces."""
    anchors = set()
    tokens = tokens_of(page)
    for index, token in enumerate(tokens):
        if token.type == "heading_open":
            text = re.sub(r"[^\w\- ]", "", tokens[index + 1].content.lower())
            anchors.add(text.replace(" ", "-"))
    return frozenset(anchors)


def broken_links(page: Path) -> Iterator[str]:
    for link in links_of(page):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = page.parent / unquote(parts.path) if parts.path else page
        if not target.exists() or ROOT not in target.resolve().parents:
            yield f"{link}: there is no such file"
        elif parts.fragment and target.suffix == ".md" and parts.fragment not in anchors_of(target):
            yield f"{link}: there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_relative_link_and_image_resolves(page: Path) -> None:
    assert list(broken_links(page)) == []


# Command lines.


def command_lines_of(page: Path) -> Iterator[list[str]]:
    """The words after ``fusion-node`` of every command line on a page."""
    for token in tokens_of(page):
        if token.type == "fence" and token.info.strip() in SHELLS:
            lines = token.content.replace("\\\n", " ").splitlines()
        elif token.type == "code_inline":
            lines = [token.content]
        else:
            continue
        for line in (line for line in lines if "fusion-node " in line):
            # A synopsis puts what may be left out in brackets.
            words = shlex.split(line.removeprefix("$ ").translate({ord("["): "", ord("]"): ""}), comments=True)
            while words and ("=" in words[0] or words[0] == "|"):  # environment in front
                words.pop(0)
            if words and Path(words[0]).name == "fusion-node":
                end = next((index for index, word in enumerate(words) if word in _END_OF_COMMAND), len(words))
                yield words[1:end]


def parse_command_line(words: list[str]) -> None:
    """Parses as the program would, without running anything; raises what the program would say.

    A command that is only named, without its arguments, is looked up; a name in capitals stands for any.
    """
    command: Any = typer.main.get_command(app)
    context = command.make_context("fusion-node", [words[0]] if words else [], resilient_parsing=True)
    names = []
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        if _PLACEHOLDER.fullmatch(words[0]):
            return
        name, command, words = command.resolve_command(context, words)
        names.append(name)
        context = command.make_context(name, [], parent=context, resilient_parsing=True)
    arguments = [word for word in words if word != "--help"]
    if arguments:
        command.make_context(" ".join(names), arguments, parent=context)


SHOWN = [(page, words) for page in PAGES if page.name != "CHANGELOG.md" for words in command_lines_of(page)]
"""Not the changelog's: it speaks of past releases too."""


@pytest.mark.parametrize(
    ("page", "words"), SHOWN, ids=[f"{page.name}: fusion-node {shlex.join(words)}" for page, words in SHOWN]
)
def test_every_command_line_that_is_shown_is_one(page: Path, words: list[str]) -> None:
    parse_command_line(words)


@pytest.mark.parametrize(
    "line",
    ["nonsense", "join m --no-such-flag", "models fetch x", "generate m", "join m --threads none", "--no-such-flag"],
)
def test_a_command_line_that_is_none_is_found(line: str) -> None:
    with pytest.raises(Exception, match=r"."):
        parse_command_line(shlex.split(line))


def test_what_is_wrong_on_a_page_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading, and more\n[a](#a-heading-and-more) [b](#none) [c](none.md) ![d](none.png)\n\n"
        '<img src="no.svg">\n\n'
        "```sh\nX=1 .venv/bin/fusion-node join m \\\n  --layers 0:3  # serve\nls\n```\n`fusion-node models`\n"
    )
    assert [broken.partition(":")[0] for broken in broken_links(page)] == ["#none", "none.md", "none.png", "no.svg"]
    assert list(command_lines_of(page)) == [["join", "m", "--layers", "0:3"], ["models"]]


if __name__ == "__main__":
    CODE_MAP.write_text(code_map_as_it_should_be(), encoding="utf-8")
