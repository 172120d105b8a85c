"""What import-linter cannot say: rules by file name, rules about calls, and how often a fault may be caught whole.

A rule that must bend is bent here, with its reason: the tables at the head are the whole list.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("fusion_node", "p2p", "scheduler", "verification")

# A core is handed `now`, its random source and its bytes; it has no way to get at another.
NOT_IN_CORES = {"asyncio", "trio", "socket", "threading", "time", "random", "libp2p", "torch", "aiohttp"}
CORES = ("**/*_core.py", "scheduler/**/*.py", "p2p/records.py")

# Each of these is imported only by the files named.
ONLY_IN = {
    "libp2p": ("p2p/libp2p_adapter/",),
    "trio": ("p2p/libp2p_adapter/",),
    "multiaddr": ("p2p/libp2p_adapter/",),
    "torch": ("fusion_node/engine/",),
}

# Loading one of these can run code that its author chose.
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
UNSAFE_CALLS = {"torch.load", "torch.hub.load", "pandas.read_pickle"}
UNSAFE_FLAGS = {"trust_remote_code", "allow_pickle"}

# Handlers of every Exception that do not end by raising: file -> (how many at most, why).
CATCHES_EVERYTHING: dict[str, tuple[int, str]] = {
    "fusion_node/client/drafting.py": (1, "a drafter's fault costs its proposals, and not the answer"),
    "fusion_node/cli/main.py": (1, "an unforeseen fault becomes one line and an exit status"),
    "fusion_node/client/answer.py": (1, "a bug behind a message or a timer ends its answer, and not a link or nothing"),
    "fusion_node/gateway/server.py": (1, "a fault in one request is that request's error, and not the server's end"),
    "p2p/libp2p_adapter/dialing.py": (1, "a dialled address's failure must not be the host's end"),
    "p2p/libp2p_adapter/requests.py": (1, "a stream's end must not be the host's"),
    "p2p/libp2p_adapter/runner.py": (1, "a bridged call's failure must not be the host's end"),
    "p2p/bridge.py": (2, "the death of libp2p's thread is a value, and so is a failed restart"),
    "p2p/connection.py": (1, "a bug above the handler of frames costs one peer, not the node"),
    "p2p/links.py": (1, "a bug above the pool must not end what watches all peers"),
    "p2p/websocket.py": (1, "hands on what was thrown in, as a generator's `throw` does"),
}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name. `module` is dotted; of `from a import b` both `a` and `a.b` are listed."""

    module: str
    line: int
    for_types_only: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def files_of(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports_of(path: Path) -> Iterator[Import]:
    tree = parse(path)
    types_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in block.body
        for node in ast.walk(statement)
    }
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            yield Import(name, node.lineno, id(node) in types_only)


def file_of_module(module: str) -> Path | None:
    """The file of a module of ours; None for the standard library, other distributions and mere names."""
    if module.partition(".")[0] not in PACKAGES:
        return None
    stem = ROOT.joinpath(*module.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


def core_files() -> list[Path]:
    found = {path for pattern in CORES for path in ROOT.glob(pattern)}
    return sorted(path for path in found if path.relative_to(ROOT).parts[0] in PACKAGES)


def forbidden_chains(start: Path) -> Iterator[str]:
    """Imports of a forbidden module from `start`, directly or through modules of ours."""
    seen = {start}
    pending: list[tuple[Path, str]] = [(start, name_of(start))]
    while pending:
        path, chain = pending.pop()
        for found in imports_of(path):
            if found.for_types_only:
                continue
            if found.top in NOT_IN_CORES:
                yield f"{chain}:{found.line} imports {found.module}"
            ours = file_of_module(found.module)
            if ours is not None and ours not in seen:
                seen.add(ours)
                pending.append((ours, f"{chain}:{found.line} -> {name_of(ours)}"))


def dotted(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""


def unsafe_uses(path: Path) -> Iterator[str]:
    for found in imports_of(path):
        if found.top in UNSAFE_MODULES or found.module in UNSAFE_CALLS:
            yield f"{name_of(path)}:{found.line} imports {found.module}"
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Attribute) and dotted(node) in UNSAFE_CALLS:
            yield f"{name_of(path)}:{node.lineno} uses {dotted(node)}"
        if isinstance(node, ast.keyword) and node.arg in UNSAFE_FLAGS:
            value = node.value
            if not (isinstance(value, ast.Constant) and value.value is False):
                yield f"{name_of(path)}:{value.lineno} sets {node.arg}"


def handlers_of_everything(path: Path) -> list[int]:
    """Lines of the handlers of Exception, BaseException or all that do not end by raising."""

    def is_broad(handler: ast.ExceptHandler) -> bool:
        if handler.type is None:
            return True
        types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        return any(dotted(each) in ("Exception", "BaseException") for each in types)

    return [
        node.lineno
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ExceptHandler) and is_broad(node) and not isinstance(node.body[-1], ast.Raise)
    ]


@pytest.mark.parametrize("path", core_files(), ids=name_of)
def test_a_core_imports_no_io_clock_or_random_source(path: Path) -> None:
    assert list(forbidden_chains(path)) == []


@pytest.mark.parametrize("library", sorted(ONLY_IN))
def test_a_library_is_imported_only_where_it_belongs(library: str) -> None:
    places = ONLY_IN[library]
    elsewhere = [
        f"{name_of(path)}:{found.line}"
        for path in files_of(*PACKAGES)
        if not name_of(path).startswith(places)
        for found in imports_of(path)
        if found.top == library
    ]
    assert elsewhere == []


def test_nothing_runs_code_that_came_with_weights() -> None:
    places = files_of(*PACKAGES, "benchmarks", "deploy", "tests")
    assert [use for path in places for use in unsafe_uses(path)] == []


def test_a_fault_is_caught_whole_only_where_the_list_says() -> None:
    too_many = []
    for path in files_of(*PACKAGES):
        lines = handlers_of_everything(path)
        allowed, _why = CATCHES_EVERYTHING.get(name_of(path), (0, ""))
        if len(lines) > allowed:
            too_many.append(f"{name_of(path)} catches every Exception on lines {lines}; {allowed} allowed")
    assert too_many == []


def test_the_rules_find_what_they_forbid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    package = tmp_path / "p2p"
    package.mkdir()
    core = package / "a_core.py"
    core.write_text("from typing import TYPE_CHECKING\nfrom . import shell\nif TYPE_CHECKING:\n    import random\n")
    (package / "shell.py").write_text(
        "import pickle\nimport torch\ntorch.load('x')\nf(trust_remote_code=True)\n"
        "def g():\n    import time\n    try:\n        pass\n    except (OSError, Exception):\n        pass\n"
    )
    assert core_files() == [core]
    assert list(forbidden_chains(core)) == [
        "p2p/a_core.py:2 -> p2p/shell.py:2 imports torch",
        "p2p/a_core.py:2 -> p2p/shell.py:6 imports time",
    ]
    assert len(list(unsafe_uses(package / "shell.py"))) == 3
    assert handlers_of_everything(package / "shell.py") == [9]
