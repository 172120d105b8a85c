"""``fusion-node generate`` and ``fusion-node chat``: use a swarm from a terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from fusion_node.cli import speculation_view
from fusion_node.cli.logs import LogFormat, configure_logs
from fusion_node.cli.options import (
    Allow,
    AsJson,
    AuditFile,
    Deny,
    DistinctOperators,
    DraftModelName,
    EmulateJitter,
    EmulateRate,
    EmulateRtt,
    Home,
    MaskedSums,
    MaxPrice,
    MaxStages,
    MaxTokens,
    Mdns,
    Members,
    MinP,
    Model,
    Numerics,
    ObjectiveName,
    OwnershipFileName,
    Peers,
    PrefixCache,
    PuzzleBits,
    RepetitionPenalty,
    Seed,
    Speculate,
    Stop,
    SwarmKeyFile,
    Temperature,
    Threads,
    TopK,
    TopologyName,
    TopP,
    UserIdentity,
    Wire,
    check_ownership,
    check_topology,
    emulated_line,
    read_identity,
    sampling,
    user_rules,
)
from fusion_node.client.sampling import SamplingParams
from fusion_node.errors import ConfigError, FusionError
from fusion_node.types import PeerId, members_of
from fusion_node.wire import harmless, printable
from p2p.identity import short

if TYPE_CHECKING:
    from fusion_node.client.swarm import GenerationStats, SwarmClient


MIN_NAME = 6
"""Characters of a peer id that is named by its beginning or end."""


def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from standard input.")],
    peer: Peers = None,
    swarm_key: SwarmKeyFile = None,
    identity: UserIdentity = None,
    raw: Annotated[bool, typer.Option(help="Continue the text as it is, without the model's chat template.")] = False,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = None,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print speed and nodes after the answer.")] = False,
    speculation_plot: Annotated[
        Path | None,
        typer.Option(
            "--speculation-plot",
            metavar="FILE",
            help="Draw there how it was guessed, as PNG, SVG or PDF; needs matplotlib.",
        ),
    ] = None,
    background: Annotated[
        bool, typer.Option("--background", help="Nobody waits for it: nodes compute it with what others leave.")
    ] = False,
    numerics: Numerics = "fp32",
    wire: Wire = None,
    objective: ObjectiveName = "latency",
    speculate: Speculate = "off",
    draft_model: DraftModelName = None,
    allow: Allow = None,
    deny: Deny = None,
    distinct_operators: DistinctOperators = False,
    max_price: MaxPrice = None,
    max_stages: MaxStages = None,
    ownership: OwnershipFileName = None,
    topology: TopologyName = "pipeline",
    members: Members = None,
    masked_sums: MaskedSums = False,
    threads: Threads = None,
    puzzle_bits: PuzzleBits = None,
    mdns: Mdns = True,
    emulate_rtt: EmulateRtt = None,
    emulate_jitter: EmulateJitter = None,
    emulate_rate: EmulateRate = None,
    audit: AuditFile = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Answer one PROMPT with MODEL, served by a swarm."""
    configure_logs(LogFormat.AUTO, quiet=True)
    rules = user_rules(allow, deny, distinct_operators, max_price, max_stages)
    check_ownership(ownership)
    check_topology(topology, members, masked_sums)
    line = emulated_line(emulate_rtt, emulate_jitter, emulate_rate)
    params = sampling(max_tokens, temperature, top_p, top_k, min_p, repetition_penalty, seed, stop)
    if speculation_plot is not None:
        if speculate == "off":
            raise ConfigError(
                "--speculation-plot shows how an answer is guessed: add --speculate auto, or leave it out"
            )
        speculation_view.check_plot(speculation_plot)
    text = sys.stdin.read() if prompt == "-" else prompt
    from fusion_node.client.swarm import SwarmClient

    async def run() -> None:
        async with SwarmClient(
            model,
            peers=peer or (),
            home=home,
            numerics=numerics,
            wire=wire,
            threads=threads,
            mdns=mdns,
            puzzle_bits=puzzle_bits,
            prefix_cache=False,
            background=background,
            swarm_key=swarm_key,
            identity=read_identity(identity),
            objective=objective,
            speculation=speculate,
            draft_model=draft_model,
            emulated_line=line,
            audit=audit,
            rules=rules,
            ownership=ownership,
            topology=topology,
            members=members,
            masked_sums=masked_sums,
        ) as swarm:
            answer = swarm.generate(text, params, raw=raw)
            pieces = []
            try:
                async for piece in answer:
                    pieces.append(piece)
                    if not as_json:
                        show(piece)
            except FusionError:
                if pieces and not as_json:
                    print()
                raise
            if as_json:
                await swarm.wait_released()
                print(msgspec.json.encode({"text": "".join(pieces), **describe(answer.stats)}).decode())
            else:
                print()
                if stats:
                    await swarm.wait_released()
                    print(summary(answer.stats), file=sys.stderr)
            if speculation_plot is not None and answer.stats.speculation is not None:
                speculation_view.write_plot(answer.stats.speculation, speculation_plot)

    asyncio.run(run())


def chat(
    model: Model,
    peer: Peers = None,
    swarm_key: SwarmKeyFile = None,
    identity: UserIdentity = None,
    system: Annotated[str | None, typer.Option(help="System message in front of the conversation.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    top_k: TopK = None,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    numerics: Numerics = "fp32",
    wire: Wire = None,
    objective: ObjectiveName = "latency",
    speculate: Speculate = "off",
    draft_model: DraftModelName = None,
    allow: Allow = None,
    deny: Deny = None,
    distinct_operators: DistinctOperators = False,
    max_price: MaxPrice = None,
    max_stages: MaxStages = None,
    ownership: OwnershipFileName = None,
    topology: TopologyName = "pipeline",
    members: Members = None,
    masked_sums: MaskedSums = False,
    threads: Threads = None,
    puzzle_bits: PuzzleBits = None,
    mdns: Mdns = True,
    prefix_cache: PrefixCache = True,
    emulate_rtt: EmulateRtt = None,
    emulate_jitter: EmulateJitter = None,
    emulate_rate: EmulateRate = None,
    audit: AuditFile = None,
    home: Home = None,
) -> None:
    """Talk with MODEL. An empty line or Ctrl-D ends; /new starts over; /revoke PEER withdraws what a node holds."""
    configure_logs(LogFormat.AUTO, quiet=True)
    rules = user_rules(allow, deny, distinct_operators, max_price, max_stages)
    check_ownership(ownership)
    check_topology(topology, members, masked_sums)
    line = emulated_line(emulate_rtt, emulate_jitter, emulate_rate)
    params = sampling(max_tokens, temperature, top_p, top_k, min_p, repetition_penalty, seed, None)
    from fusion_node.client.swarm import SwarmClient

    async def run() -> None:
        async with SwarmClient(
            model,
            peers=peer or (),
            home=home,
            numerics=numerics,
            wire=wire,
            threads=threads,
            mdns=mdns,
            puzzle_bits=puzzle_bits,
            prefix_cache=prefix_cache,
            swarm_key=swarm_key,
            identity=read_identity(identity),
            objective=objective,
            speculation=speculate,
            draft_model=draft_model,
            emulated_line=line,
            audit=audit,
            rules=rules,
            ownership=ownership,
            topology=topology,
            members=members,
            masked_sums=masked_sums,
        ) as swarm:
            await converse(swarm, params, system)

    asyncio.run(run())


async def converse(swarm: SwarmClient, params: SamplingParams, system: str | None) -> None:
    """The conversation loop. An answer that fails is told, and the conversation goes on without it."""
    read_line = line_reader()
    start: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    served: set[PeerId] = set()
    while True:
        try:
            line = (await read_line()).strip()
        except (EOFError, KeyboardInterrupt):
            return
        if not line:
            return
        if line == "/new":
            messages = list(start)
            continue
        command, _, name = line.partition(" ")
        if command in ("/revoke", "/allow"):
            withdraw(swarm, served, command, name.strip())
            continue
        messages.append({"role": "user", "content": line})
        pieces: list[str] = []
        answer = swarm.chat(messages, params)
        try:
            async for piece in answer:
                pieces.append(piece)
                show(piece)
        except FusionError as error:
            print(f"\nerror: {printable(str(error), limit=2000)}", file=sys.stderr)
            messages.pop()
            continue
        finally:
            served |= {member for stage in answer.stats.stages for member in members_of(stage.peer)}
        print()
        messages.append({"role": "assistant", "content": "".join(pieces)})


def withdraw(swarm: SwarmClient, served: Collection[PeerId], command: str, name: str) -> None:
    """``/revoke PEER`` and ``/allow PEER``: a whole peer id, or a part of one that has served or is revoked."""
    known = served if command == "/revoke" else swarm.revoked
    found = [peer for peer in known if len(name) >= MIN_NAME and (peer.startswith(name) or peer.endswith(name))]
    if command == "/allow" and not found:
        revoked = ", ".join(map(short, sorted(known))) or "nobody"
        print(f"error: /allow needs one of those that are revoked: {revoked}", file=sys.stderr)
        return
    if len(found) > 1 or (not found and len(name) < MIN_NAME):
        print(f"error: {command} needs a peer id, or {MIN_NAME} characters of its end", file=sys.stderr)
        return
    peer = found[0] if found else PeerId(name)
    try:
        (swarm.revoke if command == "/revoke" else swarm.allow_again)(peer)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
    else:
        print(f"{short(peer)} {'is revoked' if command == '/revoke' else 'may serve again'}", file=sys.stderr)


def show(piece: str) -> None:
    """Prints a piece of an answer at once: exactly for files and programs; for a terminal, nothing that commands it."""
    print(harmless(piece) if sys.stdout.isatty() else piece, end="", flush=True)


def line_reader() -> Callable[[], Awaitable[str]]:
    """Reads what a person types without stopping the event loop, or lines of standard input that is not a terminal."""
    if sys.stdin.isatty():
        from prompt_toolkit import PromptSession

        terminal = PromptSession[str]()

        async def typed() -> str:
            return str(await terminal.prompt_async("> "))

        return typed

    async def piped() -> str:
        line: str = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            raise EOFError
        return line

    return piped


def describe(stats: GenerationStats) -> dict[str, Any]:
    """The statistics of an answer for machines."""
    return {
        "finish_reason": stats.finish_reason,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "completion_tokens": stats.completion_tokens,
        "token_ids": stats.token_ids,
        "seed": stats.seed,
        "time_to_first_token_s": stats.time_to_first_token_s,
        "tokens_per_s": stats.tokens_per_s,
        "stages": [
            {
                "peer": stage.peer,
                "layers": str(stage.layers),
                "device": stage.device,
                "round_trip_s": stage.round_trip_s,
                "steps": stage.steps,
                "compute_s": stage.compute_s,
                "queue_s": stage.queue_s,
            }
            for stage in stats.stages
        ],
        "repairs": [
            {
                "kind": repair.kind,
                "stage": repair.stage,
                "peer": repair.peer,
                "cause": repair.cause,
                "stall_s": repair.stall_s,
                "replayed_positions": repair.replayed_positions,
                "replayed_bytes": repair.replayed_bytes,
            }
            for repair in stats.repairs
        ],
        "grants": [
            {
                "peer": report.peer,
                "layers": str(report.layers),
                "slice": str(report.slice),
                "expires_at": report.grant.expires_at,
                "is_revoked": report.is_revoked,
                "released": None if report.release is None else report.release.why,
                "released_positions": None if report.release is None else report.release.num_positions,
            }
            for report in stats.grants
        ],
        "speculation": None if stats.speculation is None else msgspec.to_builtins(stats.speculation),
    }


def summary(stats: GenerationStats) -> str:
    """The statistics of an answer for people: one line, one for each repair, and some on how it was guessed."""
    speed = "" if stats.tokens_per_s is None else f", {stats.tokens_per_s:.1f} tokens/s"
    first = "" if stats.time_to_first_token_s is None else f", first token after {stats.time_to_first_token_s:.2f} s"
    nodes = " → ".join(f"{short(stage.peer)} [{stage.layers}]" for stage in stats.stages)
    repaired = "".join(
        f"\n{repair.kind}: stage {repair.stage + 1} {short(repair.peer)} ({repair.cause}), stood still for "
        f"{repair.stall_s:.2f} s, {repair.replayed_positions} positions computed again"
        for repair in stats.repairs
    )
    guessed = "" if stats.speculation is None else f"\n{speculation_view.lines(stats.speculation)}"
    return f"{stats.completion_tokens} tokens{speed}{first}, over {nodes}{repaired}{_released(stats)}{guessed}"


def _released(stats: GenerationStats) -> str:
    """What members of groups have signed of what they had been granted; empty where there were none."""
    if not stats.grants:
        return ""
    done = [report.release for report in stats.grants if report.release is not None]
    silent = [f"{short(report.peer)} (slice {report.slice})" for report in stats.grants if report.release is None]
    others = f"; not by {', '.join(silent)}" if silent else ""
    return f"\n{len(done)} of {len(stats.grants)} slices released by their holders{others}"
