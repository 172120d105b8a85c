"""``fusion-node serve``: an OpenAI-compatible endpoint for a model that a swarm serves."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Annotated

import structlog
import typer

from fusion_node.cli.logs import LogFormat, configure_logs
from fusion_node.cli.options import (
    Allow,
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
    Mdns,
    Members,
    Model,
    Numerics,
    ObjectiveName,
    OwnershipFileName,
    Peers,
    PuzzleBits,
    SharedPrefixCache,
    Speculate,
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
from p2p.addresses import check_bindable, is_loopback, parse_listen

if TYPE_CHECKING:
    from fusion_node.client.swarm import SwarmClient

DEFAULT_LISTEN = "127.0.0.1:8080"

log = structlog.get_logger(__name__)


def serve(
    model: Model,
    peer: Peers = None,
    swarm_key: SwarmKeyFile = None,
    identity: UserIdentity = None,
    listen: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Where to listen. There is no access control: keep it on this machine."),
    ] = DEFAULT_LISTEN,
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
    prefix_cache: SharedPrefixCache = None,
    audit: AuditFile = None,
    emulate_rtt: EmulateRtt = None,
    emulate_jitter: EmulateJitter = None,
    emulate_rate: EmulateRate = None,
    home: Home = None,
    log_format: Annotated[LogFormat, typer.Option(help="auto is pretty on a terminal.")] = LogFormat.AUTO,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Offer MODEL, served by a swarm, at an OpenAI-compatible HTTP endpoint until Ctrl-C."""
    configure_logs(log_format, verbose=verbose)
    rules = user_rules(allow, deny, distinct_operators, max_price, max_stages)
    check_ownership(ownership)
    check_topology(topology, members, masked_sums)
    host, port = parse_listen(listen)
    if port:
        # Before anything heavy is loaded.
        check_bindable(host, port)
    if prefix_cache is None:
        # Whoever else can connect would learn by the time an answer takes what others have asked.
        prefix_cache = is_loopback(host)
    from fusion_node.client.swarm import SwarmClient

    connect = partial(
        SwarmClient,
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
        emulated_line=emulated_line(emulate_rtt, emulate_jitter, emulate_rate),
        rules=rules,
        ownership=ownership,
        topology=topology,
        members=members,
        masked_sums=masked_sums,
        audit=audit,
    )
    asyncio.run(_until_told_to_stop(_serve(connect, model, host, port)))


async def _serve(connect: Callable[[], SwarmClient], model: str, host: str, port: int) -> None:
    """Serves until cancelled."""
    from fusion_node.gateway.server import listening, make_app

    async with connect() as swarm:
        await swarm.wait_loaded()
        app = make_app(swarm, aliases=[model], only_local=is_loopback(host))
        async with listening(app, host, port) as url:
            if not is_loopback(host):
                log.warning("reachable from other machines: whoever can connect can use it", listen=f"{host}:{port}")
            log.info("ready", url=f"{url}/v1", model=swarm.model.name)
            await asyncio.Event().wait()


async def _until_told_to_stop(coroutine: Coroutine[None, None, None]) -> None:
    """Runs it until it fails, or SIGINT or SIGTERM cancels it, which is success."""
    task, loop = asyncio.ensure_future(coroutine), asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    log.info("stopped")
