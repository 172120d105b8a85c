"""`fusion-node models`: what is on this machine, and fetching more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bars
from rich.table import Table

from fusion_node.cli.options import Home
from fusion_node.errors import StoreCorrupted
from fusion_node.store import ModelStore, StoredModel

models_app = typer.Typer(help="List, fetch and remove models.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Name = Annotated[
    str, typer.Argument(metavar="NAME_OR_ID", help="Name of a stored model, or 6 or more digits of its id.")
]


@models_app.command("pull")
def pull(
    source: Annotated[
        str,
        typer.Argument(help="smollm2-135m, a folder, a .gguf file, or ORGANISATION/NAME on the Hugging Face hub."),
    ],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a repository.")] = None,
    file: Annotated[str | None, typer.Option(help="Which .gguf file of a folder or repository.")] = None,
    home: Home = None,
) -> None:
    """Fetch a model. An interrupted pull continues when it is run again."""
    model = pull_with_progress(source, revision=revision, file=file, home=home)
    Console().print(f"{model.name}  {model.model_id}  {_size(model.size_bytes)}", soft_wrap=True, highlight=False)


@models_app.command("list")
def list_models(as_json: Json = False, home: Home = None) -> None:
    """List the models on this machine."""
    models = ModelStore(home).list()
    if as_json:
        _print_json([_summary(model) for model in models])
        return
    if not models:
        Console().print("No models yet. `fusion-node models pull smollm2-135m` fetches a small one.", highlight=False)
        return
    table = Table("NAME", "ID", "LAYERS", "PARAMETERS", "SIZE", box=None, pad_edge=False)
    for model in models:
        table.add_row(
            model.name,
            model.model_id[:12],
            str(model.num_layers),
            _count(model.manifest.num_parameters),
            _size(model.size_bytes),
        )
    Console().print(table)


@models_app.command("show")
def show(
    name_or_id: Name,
    as_json: Json = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every weight and compare it with the manifest.")
    ] = False,
    home: Home = None,
) -> None:
    """Show what a model consists of."""
    model = ModelStore(home).find(name_or_id)
    if verify:
        bad = model.bad_blocks()
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            raise StoreCorrupted(
                f"model {model.name}: {bad[0]}{more} does not match the manifest: "
                f"run `fusion-node models rm {model.name}` and pull it again"
            )
    details = _details(model) | ({"verified": True} if verify else {})
    if as_json:
        _print_json(details)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, value in (
        ("name", model.name),
        ("id", model.model_id),
        ("source", model.manifest.source),
        ("revision", model.manifest.revision or "-"),
        ("architecture", model.manifest.architecture),
        ("quantization", model.quantization or "-"),
        ("layers", str(model.num_layers)),
        ("parameters", f"{model.manifest.num_parameters:,}"),
        ("tensors", f"{len(model.manifest.tensors):,} in {model.manifest.num_blocks:,} blocks"),
        ("size", _size(model.size_bytes)),
        ("folder", str(model.path)),
        *((f"  {file['name']}", _size(file["num_bytes"])) for file in details["files"]),
        *([("verified", "every block matches the manifest")] if verify else []),
    ):
        table.add_row(label, value)
    Console().print(table)


@models_app.command("rm")
def remove(name_or_id: Name, home: Home = None) -> None:
    """Remove a model from this machine."""
    ModelStore(home).remove(name_or_id)
    Console().print(f"removed {name_or_id}", highlight=False)


class _RichProgress:
    """The store's progress as bars, one below the other."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._task: TaskID | None = None

    def start(self, what: str, total_bytes: int | None) -> None:
        self.done()
        self._task = self._bars.add_task(what, total=total_bytes)

    def advance(self, num_bytes: int) -> None:
        if self._task is not None:
            self._bars.advance(self._task, num_bytes)

    def done(self) -> None:
        """Fills the bar of the current piece, whose size may have been unknown."""
        if self._task is not None:
            total = self._bars.tasks[self._task].total or 1
            self._bars.update(self._task, total=total, completed=total)


def pull_with_progress(
    source: str, *, revision: str | None = None, file: str | None = None, home: Path | None = None
) -> StoredModel:
    """Fetches a model into the store, or finds it there, with progress bars on standard error."""
    with _bars() as progress:
        return ModelStore(home).pull(source, revision=revision, file=file, progress=progress)


@contextmanager
def _bars() -> Iterator[_RichProgress]:
    # On standard error, so that standard output holds the result alone.
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        progress = _RichProgress(bars)
        yield progress
        progress.done()


def _summary(model: StoredModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "model_id": model.model_id,
        "source": model.manifest.source,
        "revision": model.manifest.revision,
        "architecture": model.manifest.architecture,
        "quantization": model.quantization,
        "num_layers": model.num_layers,
        "num_parameters": model.manifest.num_parameters,
        "size_bytes": model.size_bytes,
    }


def _details(model: StoredModel) -> dict[str, Any]:
    files = [path for path in sorted(model.path.iterdir()) if path.is_file()]
    return _summary(model) | {
        "path": str(model.path),
        "num_tensors": len(model.manifest.tensors),
        "num_blocks": model.manifest.num_blocks,
        "files": [{"name": path.name, "num_bytes": path.stat().st_size} for path in files],
    }


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def _size(num_bytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} B"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"
