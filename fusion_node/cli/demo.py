"""``fusion-node demo``: a real model answers through a real swarm of processes on this machine.

Over an emulated line, the question is answered twice, without and with speculation: that is what it is for. With
``--topology fusion`` the processes are the members of one group, each with a slice of every layer, and the logs of all
of them are audited behind the answer.
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

from fusion_node.cli.audit import closed_in_words, judge_files, node_table
from fusion_node.cli.comparison import compare
from fusion_node.cli.local_swarm import LocalNode, LocalSwarm, describe_nodes, split_evenly
from fusion_node.cli.logs import LogFormat, configure_logs
from fusion_node.cli.models import pull_with_progress
from fusion_node.cli.options import AsJson, DraftModelName, Home, MaskedSums, emulated_line
from fusion_node.cli.pictures import coverage
from fusion_node.cli.pictures import slices as picture_of_slices
from fusion_node.cli.talk import describe
from fusion_node.client.overview import ModelView, SplitView, look_around
from fusion_node.client.sampling import SamplingParams
from fusion_node.client.swarm import NO_DRAFT
from fusion_node.client.user_rules import check_masked_sums, topology_of
from fusion_node.errors import ConfigError, LocalProtocolError
from fusion_node.slices import ModelSlice
from fusion_node.store import StoredModel
from fusion_node.types import LayerRange, is_group, members_of
from fusion_node.wire import harmless, printable
from p2p.identity import short
from p2p.link_emulation_core import LineShape
from verification.audit_report import Report

if TYPE_CHECKING:
    from fusion_node.client.generation import Generation
    from fusion_node.client.swarm import GenerationStats, SwarmClient

MODEL = "smollm2-135m"
QUESTION = "What is the capital of France, and what is it known for?"
COMPARED_QUESTION = "Say the numbers from one to twelve, and then say them once more."
"""Its answer repeats itself: without a draft model, guesses come from the text alone."""

MAX_FUSED = 9
"""Members that the query heads of the model are enough for."""

POLL_S = 0.25


class Speculation(StrEnum):
    """As --speculate of other commands; an enumeration here, since theirs is told only when torch is imported."""

    AUTO = "auto"
    TREE = "tree"
    CHAIN = "chain"
    OFF = "off"


class Topology(StrEnum):
    """What serves a part of the model; as --topology of other commands, but that nothing is left to the planner."""

    PIPELINE = "pipeline"
    FUSION = "fusion"


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
    topology: Annotated[
        Topology,
        typer.Option(
            help="Give each process some of the layers, or a slice of all of them as the members of a fusion group; "
            "what every member was sent is audited then."
        ),
    ] = Topology.PIPELINE,
    masked_sums: MaskedSums = False,
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
    if draft_model not in (None, NO_DRAFT) and mode is Speculation.OFF:
        raise ConfigError("a draft model is of no use without speculation: add --speculate auto")
    console = Console(stderr=as_json)
    model = pull_with_progress(MODEL, home=home)
    check_masked_sums(masked_sums, topology_of(topology.value), nodes)
    if topology is Topology.FUSION and nodes < 2:
        raise ConfigError("a fusion group has two members at least: leave --nodes out, or take more")
    if nodes > (MAX_FUSED if topology is Topology.FUSION else model.num_layers):
        what = f"{MAX_FUSED} query heads" if topology is Topology.FUSION else f"{model.num_layers} layers"
        raise ConfigError(f"{MODEL} has {what}: --nodes may be at most that")
    per_node = threads or max(1, (os.cpu_count() or 1) // nodes)
    is_fused = topology is Topology.FUSION
    staging = _Staging(model, nodes, per_node, home, line, mode, draft_model, is_fused=is_fused, masks=masked_sums)
    if prompt is None:
        prompt = QUESTION if mode is Speculation.OFF else COMPARED_QUESTION
    result, report = asyncio.run(_run(staging, prompt, params, console, check=check))
    audited = True
    if report is not None:
        audited = all(each.passed for each in report.checks)
        result["audit"] = {"passed": audited, **msgspec.to_builtins(report)}
    if as_json:
        print(msgspec.json.encode(result).decode())
    if (check and not result["check"]["equal"]) or not result.get("equal", True) or not audited:
        raise typer.Exit(1)


def audited_demo(*, home: Path | None, console: Console) -> Report:
    """An answer of a fusion group of three processes, and what its members were sent."""
    model = pull_with_progress(MODEL, home=home)
    per_node = max(1, (os.cpu_count() or 1) // 3)
    staging = _Staging(model, 3, per_node, home, None, Speculation.OFF, None, is_fused=True)
    _, report = asyncio.run(_run(staging, QUESTION, SamplingParams(max_tokens=32), console, check=False))
    if report is None:
        raise LocalProtocolError("a group was not audited")
    return report


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
    is_fused: bool = False
    masks: bool = False

    @property
    def ranges(self) -> list[LayerRange]:
        """Layers of each process."""
        if self.is_fused:
            return [LayerRange(0, self.model.num_layers)] * self.num_nodes
        return split_evenly(self.model.num_layers, self.num_nodes)

    @property
    def slices(self) -> list[str]:
        """Which part of them each has; nothing where it has all."""
        if not self.is_fused:
            return []
        return [str(ModelSlice(index, (1,) * self.num_nodes)) for index in range(self.num_nodes)]


@dataclass(slots=True)
class _Scene:
    """What the live picture shows."""

    local: LocalSwarm
    model: StoredModel
    round_trips_ms: dict[str, float] = field(default_factory=dict)
    holders: list[int] = field(default_factory=list)
    split: SplitView | None = None

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
                f"{node.layers} {node.slice}".rstrip(),
                Text(node.state, style="green" if node.state == "serving" else "yellow"),
                Text("not yet", style="dim") if trip is None else f"yes, {trip:.1f} ms away",
            )
        if any(node.slice for node in self.local.nodes):
            return Group(table, Text(), Text() if self.split is None else picture_of_slices(self.split))
        holders = tuple(self.holders) or (0,) * self.model.num_layers
        view = ModelView(self.model.name, self.model.model_id, "fp32", self.model.num_layers, holders)
        return Group(table, Text(), coverage(view))


async def _run(
    staging: _Staging, prompt: str, params: SamplingParams, console: Console, *, check: bool
) -> tuple[dict[str, Any], Report | None]:
    """What is told of the answer, and of a group what its members were sent."""
    model, line = staging.model, staging.line
    console.print(
        f"[bold]Starting {staging.num_nodes} node processes[/], "
        f"each with {'a slice of every layer' if staging.is_fused else 'a part'} of {model.name}. "
        "All but the first know one address: the first one's."
    )
    if line is not None:
        console.print(f"Between all processes, this one included, a line is emulated: [bold]{line}[/].")
    console.print()
    with tempfile.TemporaryDirectory(prefix="fusion-node-demo-") as folder:
        result = await _play(staging, prompt, params, console, folder=Path(folder), check=check)
        if not staging.is_fused:
            return result, None
        # Behind the processes' end, so that all logs are whole.
        report = await asyncio.to_thread(_judge, Path(folder), staging.home)
        _show_audit(console, report)
        return result, report


async def _play(
    staging: _Staging, prompt: str, params: SamplingParams, console: Console, *, folder: Path, check: bool
) -> dict[str, Any]:
    model, line, is_compared = staging.model, staging.line, staging.speculation is not Speculation.OFF
    began = time.perf_counter()
    async with AsyncExitStack() as stack:
        local = LocalSwarm(
            model.name,
            folder=folder,
            home=staging.home,
            threads=staging.threads,
            numerics="fp32",
            line=line,
            is_audited=staging.is_fused,
        )
        await stack.enter_async_context(local)
        scene = _Scene(local, model)
        with Live(scene, console=console, refresh_per_second=8):
            # torch and transformers take seconds to import: as long as the nodes need to start.
            _, module = await asyncio.gather(
                local.start(staging.ranges, slices=staging.slices),
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
                    topology="fusion" if staging.is_fused else "pipeline",
                    masked_sums=staging.masks,
                    audit=folder / "user.audit" if staging.is_fused else None,
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
                        topology="fusion" if staging.is_fused else "pipeline",
                        masked_sums=staging.masks,
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
        scene.split = next((s for s in view.splits if s.model_id == swarm.model.model_id), None)
        if scene.split is not None and all(scene.split.holders_per_slice):
            return
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
        members = members_of(stage.peer)
        numbers = (
            str(stage.steps),
            f"{1000 * stage.compute_s / max(stage.steps, 1):.1f}",
            f"{stage.compute_s / total_s:.0%}",
        )
        for index, peer in enumerate(members):
            part = f"slice {index}/{len(members)} of " if is_group(stage.peer) else ""
            table.add_row(
                f"{names.get(peer, '')} {short(peer)}",
                f"{part}layers {stage.layers}, {printable(stage.device)}",
                *(numbers if index == 0 else ("", "", "")),
            )
    table.add_row("this process", "text, embedding, head, sampling", "", "", "")
    console.print(table)


def _judge(folder: Path, home: Path | None) -> Report:
    return judge_files(sorted(folder.glob("*.audit")), home=home)


def _show_audit(console: Console, report: Report) -> None:
    console.print("\n[bold]Audit[/] of what went over the connections, from the logs of all processes:")
    for session in report.sessions:
        console.print(node_table(session.nodes))
        console.print(f"{closed_in_words(session)}, each of {session.num_layers} layers", markup=False)
    failed = [check.name.value for check in report.checks if not check.passed]
    verdict = f"[bold red]FAILED[/]: not {escape('; not '.join(failed))}" if failed else "[green]passed[/]"
    console.print(f"audit {verdict}; 'solvable' is what a member could work out of what it was sent: docs/privacy.md")


def _reference(model: StoredModel, prompt_ids: Sequence[int], stats: GenerationStats) -> list[int]:
    from fusion_node.engine.reference import ReferenceModel

    # One token more than the answer has, if it ended by itself: the reference must end there too.
    num_tokens = stats.completion_tokens + (1 if stats.finish_reason == "stop" else 0)
    return ReferenceModel(model.path).greedy(prompt_ids, num_tokens)
