"""``fusion-node simulate``: how a swarm of some size would fare, on one core."""

from __future__ import annotations

import gc
import json
import math
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from fusion_node.errors import ConfigError


def simulate(
    nodes: Annotated[int, typer.Option(help="Nodes on average.")] = 300,
    users: Annotated[int, typer.Option(help="Users who ask one question after another.")] = 20,
    hours: Annotated[float, typer.Option(help="Simulated time.")] = 1.0,
    model: Annotated[
        str, typer.Option(help="llama-8b, llama-70b, llama-405b, qwen-32b or smollm2-135m.")
    ] = "llama-70b",
    seed: Annotated[int, typer.Option(help="The same seed gives the same run.")] = 0,
    churn: Annotated[
        str, typer.Option(metavar="HOURS|none", help="How long nodes stay on average: most much shorter, a few longer.")
    ] = "3",
    membership: Annotated[
        Literal["auto", "real", "modelled"],
        typer.Option(help="Run the membership core on every host, or model how late views are; auto: by size."),
    ] = "auto",
    liars: Annotated[float, typer.Option(help="Share of the nodes that claim five times what they have.")] = 0.05,
    garbage: Annotated[float, typer.Option(help="Share of the nodes that hand on broken rows now and then.")] = 0.01,
    hangs: Annotated[float, typer.Option(help="Times an hour that a node is stopped for some seconds.")] = 0.05,
    resets: Annotated[float, typer.Option(help="Times an hour that all connections of a node are reset.")] = 0.05,
    partition: Annotated[
        list[str] | None,
        typer.Option(metavar="START:STOP:SHARE", help="Seconds between which a share of all hosts is cut off."),
    ] = None,
    think: Annotated[float, typer.Option(help="Seconds that a user thinks between two questions, on average.")] = 60.0,
    prompt_tokens: Annotated[float, typer.Option(help="Tokens of a question, on average.")] = 300.0,
    answer_tokens: Annotated[float, typer.Option(help="Tokens of an answer, on average.")] = 150.0,
    tokens_per_event: Annotated[
        int, typer.Option(help="Decoded tokens per simulated step, at most, while nothing befalls the nodes: faster.")
    ] = 1,
    stage_layers: Annotated[
        int, typer.Option(help="Stages begin at multiples of this: above 1 plans are found faster.")
    ] = 1,
    alternates: Annotated[
        bool, typer.Option("--alternates/--no-alternates", help="Whether users keep warm alternates.")
    ] = True,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write all numbers there.")] = None,
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw pictures there; needs matplotlib.")] = None,
) -> None:
    """Simulate a swarm with the real cores of nodes and users over a modelled network.

    Nothing is loaded, computed or sent. What is modelled, and what is left out, is in docs/simulator.md.
    """
    from rich.console import Console

    from fusion_node.simulator.plots import check_available, write_plots
    from fusion_node.simulator.report import document, print_report
    from fusion_node.simulator.settings import Settings, parse_partition
    from fusion_node.simulator.world import World

    settings = Settings(
        nodes=nodes,
        users=users,
        hours=hours,
        model=model,
        seed=seed,
        mean_lifetime_s=_lifetime_s(churn),
        membership=membership,
        liars_share=liars,
        garbage_share=garbage,
        hangs_per_hour=hangs,
        resets_per_hour=resets,
        partitions=tuple(parse_partition(text) for text in partition or ()),
        think_s=think,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        tokens_per_event=tokens_per_event,
        stage_layers=stage_layers,
        alternates=alternates,
    )
    settings.check()
    if plots is not None:
        check_available()
    if json_path is not None and not json_path.resolve().parent.is_dir():
        raise ConfigError(f"there is no folder {json_path.resolve().parent} to write {json_path.name} to")
    began = time.perf_counter()
    world = World(settings)
    # What a world is made of stays: looking through all of it again and again would take longer than the events.
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
    try:
        world.run()
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
    report = document(world, seconds=time.perf_counter() - began)
    print_report(report, Console())
    if json_path is not None:
        try:
            json_path.write_text(json.dumps(report, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {json_path}: {error.strerror}") from error
    if plots is not None:
        for path in write_plots(world, plots):
            print(path)
    if not all(check["ok"] for check in report["checks"]):
        raise typer.Exit(1)


def _lifetime_s(text: str) -> float:
    if text.strip().lower() == "none":
        return math.inf
    try:
        hours = float(text)
    except ValueError as error:
        raise ConfigError(f"churn {text!r}: write the hours that a node stays on average, or none") from error
    if not (math.isfinite(hours) and hours > 0):
        raise ConfigError(f"churn {text!r}: write the hours that a node stays on average, or none")
    return hours * 3600.0
