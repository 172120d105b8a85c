"""``fusion-node demo``: a real model answers through a real swarm of processes on this machine.

Over an emulated line, the question is answered twice, without and with speculation: that is what it is for.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fusion_node.cli.comparison import compare
from fusion_node.cli.local_swarm import LocalNode, LocalSwarm, describe_nodes, split_evenly
from fusion_node.cli.logs import LogFormat, configure_logs
from fusion_node.cli.models import pull_with_progress
from fusion_node.cli.options import AsJson, DraftModelName, Home, emulated_line
from fusion_node.cli.pictures import coverage
from fusion_node.cli.talk import describe
from fusion_node.client.overview import ModelView, look_around
from fusion_node.client.sampling import SamplingParams
from fusion_node.errors import ConfigError
from fusion_node.store import StoredModel
from fusion_node.wire import harmless, printable
from p2p.identity import short
from p2p.link_emulation_core import LineShape

if TYPE_CHECKING:
    from fusion_node.client.generation import Generation
    from fusion_node.client.swarm import GenerationStats, SwarmClient

MODEL = "smollm2-135m"
QUESTION = "What is the capital of France, and what is it known for?"
COMPARED_QUESTION = "Say the numbers from one to twelve, and then say them once more."
"""Its answer repeats itself: without a draft model, guesses come from the text alone."""

POLL_S = 0.25


class Speculation(StrEnum):
    """As --speculate of other commands; an enumeration here, since theirs is told only when torch is imported."""

    AUTO = "auto"
    TREE = "tree"
    CHAIN = "chain"
    OFF = "off"


def demo(
    prompt: Annotated[
        str | None, typer.Option(help="Your own question, instead of one on France, or numbers where answers compare.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, max=16, help="Node processes to start.")] = 3,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads per node.")] = None,
    rtt: Annotated[
        float | None,
        typer.Option("--rtt", metavar="MS", help="Let every round trip between the processes take so long."),
    ] = None,
    jitter: Annotated[
        float | None, typer.Option("--jitter", metavar="MS", help="By up to so much more or less each way.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", metavar="MBIT", help="Let no process send more than so many Mbit/s.")
    ] = None,
    speculate: Annotated[
        Speculation | None,
        typer.Option(
            help="Answer once by plain decode and once with guesses, side by side. If not given: auto over an emulated "
            "line, and else off."
        ),
    ] = None,
    draft_model: DraftModelName = None,
    check: Annotated[bool, typer.Option("--check", help="Compare with the model run in one process.")] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Start a local swarm of real node processes and ask it a question."""
    configure_logs(LogFormat.AUTO, quiet=True)
    params = SamplingParams(max_tokens=max_tokens)
    line = emulated_line(rtt, jitter, rate)
    # Here it is part of the picture, not a warning in the middle of it.
    logging.getLogger("p2p.link_emulation").setLevel(logging.ERROR)
    mode = speculate or (Speculation.OFF if line is None else Speculation.AUTO)
    if draft_model is not None and mode is Speculation.OFF:
        raise ConfigError("a draft model is of no use without speculation: add --speculate auto")
    console = Console(stderr=as_json)
    model = pull_with_progress(MODEL, home=home)
    if nodes > model.num_layers:
        raise ConfigError(f"{MODEL} has {model.num_layers} layers: --nodes may be at most that")
    per_node = threads or max(1, (os.cpu_count() or 1) // nodes)
    staging = _Staging(model, nodes, per_node, home, line, mode, draft_model)
    if prompt is None:
        prompt = QUESTION if mode is Speculation.OFF else COMPARED_QUESTION
    result = asyncio.run(_run(staging, prompt, params, console, check=check))
    if as_json:
        print(msgspec.json.encode(result).decode())
    if (check and not result["check"]["equal"]) or not result.get("equal", True):
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Staging:
    """What is to be shown."""

    model: StoredModel
    num_nodes: int
    threads: int
    home: Path | None
    line: LineShape | None
    speculation: Speculation
    draft_model: str | None


@dataclass(slots=True)
class _Scene:
    """What the live picture shows."""

    local: LocalSwarm
    model: StoredModel
    round_trips_ms: dict[str, float] = field(default_factory=dict)
    holders: list[int] = field(default_factory=list)

    def __rich__(self) -> Group:
        table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
        for name in ("", "process", "peer", "layers", "state", "found"):
            table.add_column(name, no_wrap=True)
        for node in self.local.nodes:
            trip = self.round_trips_ms.get(node.peer)
            table.add_row(
                node.name,
                str(node.process.pid),
                short(node.peer) if node.peer else "",
                str(node.layers),
                Text(node.state, style="green" if node.state == "serving" else "yellow"),
                Text("not yet", style="dim") if trip is None else f"yes, {trip:.1f} ms away",
            )
        holders = tuple(self.holders) or (0,) * self.model.num_layers
        view = ModelView(self.model.name, self.model.model_id, "fp32", self.model.num_layers, holders)
        return Group(table, Text(), coverage(view))


async def _run(
    staging: _Staging, prompt: str, params: SamplingParams, console: Console, *, check: bool
) -> dict[str, Any]:
    model, line, is_compared = staging.model, staging.line, staging.speculation is not Speculation.OFF
    console.print(
        f"[bold]Starting {staging.num_nodes} node processes[/], each with a part of {model.name}. "
        "All but the first know one address: the first one's."
    )
    if line is not None:
        console.print(f"Between all processes, this one included, a line is emulated: [bold]{line}[/].")
    console.print()
    began = time.perf_counter()
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fusion-node-demo-"))
        local = LocalSwarm(
            model.name, folder=Path(folder), home=staging.home, threads=staging.threads, numerics="fp32", line=line
        )
        await stack.enter_async_context(local)
        scene = _Scene(local, model)
        with Live(scene, console=console, refresh_per_second=8):
            # torch and transformers take seconds to import: as long as the nodes need to start.
            _, module = await asyncio.gather(
                local.start(split_evenly(model.num_layers, staging.num_nodes)),
                asyncio.to_thread(importlib.import_module, "fusion_node.client.swarm"),
            )
            swarm: SwarmClient = await stack.enter_async_context(
                module.SwarmClient(
                    model.name,
                    peers=local.nodes[0].addresses,
                    home=staging.home,
                    mdns=False,
                    emulated_line=line,
                    prefix_cache=not is_compared,
                )
            )
            speculative = swarm
            if is_compared:
                speculative = await stack.enter_async_context(
                    module.SwarmClient(
                        model.name,
                        home=staging.home,
                        prefix_cache=False,
                        speculation=staging.speculation.value,
                        draft_model=staging.draft_model,
                        connection=swarm.connection,
                    )
                )
            await asyncio.gather(
                local.wait_ready(), _watch(swarm, scene), swarm.wait_loaded(), speculative.wait_loaded()
            )
        ready_s = time.perf_counter() - began
        result: dict[str, Any] = {
            "model": model.name,
            "model_id": model.model_id,
            "nodes": describe_nodes(local.nodes),
            "line": None if line is None else asdict(line),
            "swarm_ready_s": ready_s,
        }
        if is_compared:
            console.print(f"\n[bold]You:[/] {escape(prompt)}\n", highlight=False)
            compared = await compare(console, prompt, params, swarm, speculative, mode=staging.speculation.value)
            result |= compared.to_json()
            stats = compared.plain
            console.print(f"\n{compared.verdict()}\n", highlight=False)
            _show_nodes(console, compared.speculative, local.nodes)
        else:
            console.print(f"\n[bold]You:[/] {escape(prompt)}\n[bold]{model.name}:[/] ", end="", highlight=False)
            answer = swarm.generate(prompt, params)
            text = await show_answer(console, answer)
            console.print("\n")
            stats = answer.stats
            result |= {"text": text, **describe(stats)}
            _report(console, stats, local.nodes, ready_s)
        if check:
            expected = await asyncio.to_thread(_reference, model, await swarm.encode(prompt), stats)
            result["check"] = {"equal": expected == stats.token_ids, "reference_token_ids": expected}
            verdict = "[green]equal[/]" if result["check"]["equal"] else "[bold red]NOT equal[/]"
            console.print(f"check: the {len(expected)} tokens are {verdict} to those of transformers in one process")
        return result


async def show_answer(console: Console, answer: Generation) -> str:
    """Shows it as it comes, on a terminal without what would command that. Returns the text as it is."""
    pieces = []
    async for piece in answer:
        pieces.append(piece)
        shown = harmless(piece) if console.is_terminal else piece
        console.print(shown, end="", markup=False, highlight=False, soft_wrap=True)
    return "".join(pieces)


async def _watch(swarm: SwarmClient, scene: _Scene) -> None:
    """Looks around until every node has been found through the DHT and every layer is covered."""
    while True:
        view = await look_around(swarm.connection, swarm.model.model_id)
        scene.round_trips_ms.update((n.peer, n.round_trip_ms) for n in view.nodes if n.round_trip_ms is not None)
        models = [m for m in view.models if m.model_id == swarm.model.model_id and m.numerics == "fp32"]
        if models:
            scene.holders = list(models[0].holders_per_layer)
            if models[0].is_complete and len(scene.round_trips_ms) >= len(scene.local.nodes):
                return
        await asyncio.sleep(POLL_S)


def _report(console: Console, stats: GenerationStats, nodes: Sequence[LocalNode], ready_s: float) -> None:
    speed = "–" if stats.tokens_per_s is None else f"{stats.tokens_per_s:.1f}"
    first = "–" if stats.time_to_first_token_s is None else f"{stats.time_to_first_token_s:.2f}"
    console.print(
        f"[bold]{speed} tokens/s[/], first token after [bold]{first} s[/] "
        f"({stats.prompt_tokens} prompt tokens, {stats.completion_tokens} answered; swarm up in {ready_s:.1f} s)\n"
    )
    _show_nodes(console, stats, nodes)


def _show_nodes(console: Console, stats: GenerationStats, nodes: Sequence[LocalNode]) -> None:
    names = {node.peer: node.name for node in nodes}
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for name in ("who", "did what", "steps", "ms/step", "share"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("who", "did what") else "right")
    total_s = sum(stage.compute_s for stage in stats.stages) or 1.0
    for stage in stats.stages:
        table.add_row(
            f"{names.get(stage.peer, '')} {short(stage.peer)}",
            f"layers {stage.layers}, {printable(stage.device)}",
            str(stage.steps),
            f"{1000 * stage.compute_s / max(stage.steps, 1):.1f}",
            f"{stage.compute_s / total_s:.0%}",
        )
    table.add_row("this process", "text, embedding, head, sampling", "", "", "")
    console.print(table)


def _reference(model: StoredModel, prompt_ids: Sequence[int], stats: GenerationStats) -> list[int]:
    from fusion_node.engine.reference import ReferenceModel

    # One token more than the answer has, if it ended by itself: the reference must end there too.
    num_tokens = stats.completion_tokens + (1 if stats.finish_reason == "stop" else 0)
    return ReferenceModel(model.path).greedy(prompt_ids, num_tokens)
