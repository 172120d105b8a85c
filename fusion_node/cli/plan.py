"""``fusion-node plan``: who would serve an answer, why, how long each part takes, and who would not."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from fusion_node.cli.logs import LogFormat, configure_logs
from fusion_node.cli.options import (
    Allow,
    AsJson,
    Deny,
    DistinctOperators,
    EmulateJitter,
    EmulateRate,
    EmulateRtt,
    Home,
    MaskedSums,
    MaxPrice,
    MaxStages,
    Mdns,
    Members,
    Model,
    Numerics,
    ObjectiveName,
    OwnershipFileName,
    Peers,
    PuzzleBits,
    SwarmKeyFile,
    Threads,
    TopologyName,
    UserIdentity,
    Wire,
    check_ownership,
    check_topology,
    emulated_line,
    read_identity,
    user_rules,
)
from fusion_node.cli.pictures import who
from fusion_node.errors import NoRoute
from fusion_node.wire import printable
from p2p.identity import short

if TYPE_CHECKING:
    from fusion_node.client.plan_view import (
        AlternateView,
        LegView,
        MemberView,
        PlannedStageView,
        PlanView,
        RejectedView,
    )

WIDTH = 80
"""Columns that the plan fits into."""

MAX_SHOWN_REJECTED = 20
"""Rejected shards that people are shown; the JSON has all."""

_FULL = {"latency": "a token", "throughput": "a token of all sessions", "first-token": "until the first token"}
"""What an excess is of, by objective."""


def plan(
    model: Model,
    peer: Peers = None,
    swarm_key: SwarmKeyFile = None,
    identity: UserIdentity = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Open no session and send no row. It never does; this only says so.")
    ] = False,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=2**20, help="Length of the prompt to plan for.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, max=2**20, help="Longest answer to plan for, in tokens.")] = 256,
    numerics: Numerics = "fp32",
    wire: Wire = None,
    objective: ObjectiveName = "latency",
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
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Show who would serve an answer of MODEL now, why, with what speed, and why the others would not."""
    configure_logs(LogFormat.AUTO, quiet=True)
    rules = user_rules(allow, deny, distinct_operators, max_price, max_stages)
    check_ownership(ownership)
    check_topology(topology, members, masked_sums)
    emulated = emulated_line(emulate_rtt, emulate_jitter, emulate_rate)
    from fusion_node.client.swarm import SwarmClient

    async def run() -> PlanView:
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
            swarm_key=swarm_key,
            identity=read_identity(identity),
            objective=objective,
            emulated_line=emulated,
            rules=rules,
            ownership=ownership,
            topology=topology,
            members=members,
            masked_sums=masked_sums,
        ) as swarm:
            return await swarm.plan(prompt_tokens=prompt_tokens, max_tokens=max_tokens)

    view = asyncio.run(run())
    if as_json:
        print(msgspec.json.encode(view).decode())
    else:
        for line in in_words(view):
            print(line)
    if view.problem:
        raise NoRoute(view.problem)


def in_words(view: PlanView) -> Iterator[str]:
    """The plan for a terminal of WIDTH columns, line by line."""
    yield from _head(view)
    if view.stages:
        yield ""
        yield from _loop(view)
        yield ""
        yield from _stages(view)
        yield ""
        yield from _totals(view)
    if view.rejected:
        yield ""
        yield from _rejected(view)


def _head(view: PlanView) -> Iterator[str]:
    yield from _wrapped(
        f"{printable(view.model)} in {view.numerics}, {view.num_layers} layers: a prompt of {view.prompt_tokens} "
        f"tokens and an answer of {view.max_tokens}, planned for {view.objective}"
        f"{'' if view.topology == 'pipeline' else f', {view.topology}'}{', with masked sums' if view.masks else ''}"
    )
    if view.rules:
        yield from _wrapped(f"your rules: {'; '.join(view.rules)}")
    found = f"{view.num_found} node{'' if view.num_found == 1 else 's'} found, {view.num_measured} measured"
    if view.coordinate_error is not None:
        found += f"; network coordinates are off by {100 * view.coordinate_error:.0f} % here"
    yield from _wrapped(found)


def _loop(view: PlanView) -> Iterator[str]:
    """Every leg and stage of a step in order, with its milliseconds."""
    yield _row("one token goes", "ms", "known from")
    names = {stage.peer: f"group {number}" for number, stage in enumerate(view.stages, 1) if stage.members}
    for index, leg in enumerate(view.legs):
        yield _row(f"{_peer(leg.sender, names)} → {_peer(leg.receiver, names)}", _ms(leg.ms), _source(leg))
        if index < len(view.stages):
            stage = view.stages[index]
            word = "measured" if stage.is_measured else "its own word"
            what = f"  {_peer(stage.peer, names)} computes layers {stage.start}:{stage.stop}"
            yield _row(what, _ms(stage.compute_ms), word)
            if stage.members:
                yield _row("  its members exchange partial sums", _ms(stage.exchange_ms), "estimated")
            if stage.queue_ms >= 0.005:
                yield _row("  where it waits", _ms(stage.queue_ms), word)
    yield _row("you: embedding, norm, head, sampling", _ms(view.user_ms), "measured" if view.user_ms else "")
    yield _row("together", _ms(view.ms_per_token or 0.0), "")


def _row(what: str, number: str, source: str) -> str:
    return f"{what:<44}{number:>10}  {source}".rstrip()


def _source(leg: LegView) -> str:
    if leg.error_ms is not None:
        return f"{leg.source} ± {_ms(leg.error_ms)}"
    return leg.source


def _stages(view: PlanView) -> Iterator[str]:
    for number, stage in enumerate(view.stages, 1):
        if stage.members:
            what = f"group of {len(stage.members)}, layers {stage.start}:{stage.stop}"
            yield from _wrapped(f"{number}. {what}", indent="   ", first="")
        else:
            yield from _wrapped(f"{number}. {_described(stage)}", indent="   ", first="")
        yield from _wrapped(f"{stage.round_trip_ms:.3g} ms away; {stage.why or 'chosen'}", indent="   ")
        if stage.ownership:
            yield from _wrapped(f"allowed by {stage.ownership}", indent="   ")
        for member in stage.members:
            yield from _member(member)
        if stage.note and not stage.members:
            yield from _wrapped(f"slower than it says: {stage.note}", indent="   ")
        yield from _wrapped(_alternate(stage.alternate, view.objective), indent="   ")


def _member(member: MemberView) -> Iterator[str]:
    """What a member holds, and why it is one."""
    tags = who(member.operator, member.region, member.price)
    yield from _wrapped(
        f"{short(member.peer)} slice {member.slice}, {member.device}{f', {tags}' if tags else ''}",
        indent="      ",
        first="   ",
    )
    kv_heads = ", ".join(map(str, member.kv_heads))
    yield from _wrapped(
        f"columns {_span(member.columns)}; heads {_span(member.heads)}, which read KV head"
        f"{'s' if len(member.kv_heads) > 1 else ''} {kv_heads}; channels {_span(member.channels)}",
        indent="      ",
    )
    yield from _wrapped(
        f"{member.round_trip_ms:.3g} ms away, computes {_ms(member.compute_ms)} ms; {member.why}", indent="      "
    )
    if member.ownership:
        yield from _wrapped(f"allowed by {member.ownership}", indent="      ")
    if member.note:
        yield from _wrapped(f"slower than it says: {member.note}", indent="      ")


def _span(span: tuple[int, int]) -> str:
    return f"{span[0]}:{span[1]}"


def _described(stage: PlannedStageView | RejectedView) -> str:
    tags = who(stage.operator, stage.region, stage.price)
    return f"{short(stage.peer)} layers {stage.start}:{stage.stop}, {stage.device}{f', {tags}' if tags else ''}"


def _alternate(alternate: AlternateView | None, objective: str) -> str:
    if alternate is None:
        return "if it is lost, nobody can take its place"
    places = " → ".join(f"{short(place.peer)} {place.start}:{place.stop}" for place in alternate.stages)
    return f"if it is lost: {places}, {_more(alternate.excess_ms, objective)}"


def _more(excess_ms: float, objective: str) -> str:
    return f"{_ms(excess_ms)} ms more {_FULL.get(objective, '')}".rstrip() if excess_ms >= 0.005 else "no slower"


def _totals(view: PlanView) -> Iterator[str]:
    if view.tokens_per_s is not None and view.first_token_ms is not None and view.opening_ms is not None:
        first_s = (view.opening_ms + view.first_token_ms) / 1000
        yield from _wrapped(
            f"{view.tokens_per_s:.3g} tokens/s; the first token {first_s:.2f} s after the question, of which opening "
            f"the session takes {view.opening_ms / 1000:.2f} s"
        )
    if view.full_tokens_per_s is not None:
        yield from _wrapped(
            f"{view.full_tokens_per_s:.3g} tokens/s with many sessions at a time, limited by: {view.bottleneck}"
        )
    if view.is_optimal:
        yield "no route of these nodes is better"
    else:
        unsearched = f"; {view.num_unsearched} shards were not searched" if view.num_unsearched else ""
        yield from _wrapped(f"a better route could save at most {_ms(view.gap_ms)} ms{unsearched}")


def _rejected(view: PlanView) -> Iterator[str]:
    yield "not chosen:"
    # Who nearly serves is more interesting than who never could.
    order = sorted(
        view.rejected, key=lambda each: (each.excess_ms is None, each.excess_ms or 0.0, each.peer, each.start)
    )
    for each in order[:MAX_SHOWN_REJECTED]:
        yield from _wrapped(f"{_described(each)}: {each.why}", indent="   ", first="")
        if each.note:
            yield from _wrapped(f"slower than it says: {each.note}", indent="   ")
    if len(order) > MAX_SHOWN_REJECTED:
        yield f"and {len(order) - MAX_SHOWN_REJECTED} more; --json has all"


def _peer(peer: str | None, names: Mapping[str, str]) -> str:
    return "you" if peer is None else names.get(peer) or short(peer)


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.2f}" if milliseconds < 1000 else f"{milliseconds:.0f}"


def _wrapped(text: str, *, indent: str = "", first: str | None = None) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent if first is None else first, subsequent_indent=indent, break_on_hyphens=False
    )
