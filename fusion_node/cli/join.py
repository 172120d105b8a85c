"""``fusion-node join``: serve layers of a model until told to stop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import structlog
import typer

from fusion_node.cli.logs import LogFormat, configure_logs
from fusion_node.cli.options import (
    EmulateJitter,
    EmulateRate,
    EmulateRtt,
    Home,
    Mdns,
    Model,
    Numerics,
    Peers,
    PuzzleBits,
    SwarmKeyFile,
    Threads,
    emulated_line,
    parse_peer,
    parse_price,
    parse_rate,
    parse_size,
    parse_size_or_none,
)
from fusion_node.daemon.config import DEFAULT_LISTEN, NodeConfig
from fusion_node.daemon.manners_core import PAUSE_GRACE_S
from fusion_node.slices import ModelSlice
from fusion_node.types import LayerRange

if TYPE_CHECKING:
    from fusion_node.daemon.serving_node import ReadyNode


def join(
    model: Model,
    layers: Annotated[
        str | None,
        typer.Option(metavar="START:STOP", help="Layers to serve; the whole model, or what fits, if not given."),
    ] = None,
    slice_: Annotated[
        str | None,
        typer.Option(
            "--slice",
            metavar="K/N",
            help="Hold slice K of N of these layers, as a member of fusion groups: 0/3 is the first of three alike, "
            "0/2:1:1 of three by these weights.",
        ),
    ] = None,
    max_layers: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Take so many layers at most where --layers is not given."),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="PEER_ID", help="Hold the layers that this peer assigns with `fusion-node place`, and choose none."
        ),
    ] = None,
    peer: Peers = None,
    private: Annotated[
        bool,
        typer.Option(
            "--private", help="Be in a swarm of your own: its key is swarm.key in the home folder, made if absent."
        ),
    ] = False,
    swarm_key: SwarmKeyFile = None,
    allow: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Talk only with the peers whose ids this file lists, one a line; read again on changes.",
        ),
    ] = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where to listen. The default serves this machine only; 0.0.0.0:4600 serves everybody. "
            "The data plane takes the next port.",
        ),
    ] = DEFAULT_LISTEN,
    announce: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where others reach --listen, if not at this machine's own address, as behind a router that "
            "forwards this port and the next. May be repeated.",
        ),
    ] = None,
    identity: Annotated[Path | None, typer.Option(help="Key file; made if absent.")] = None,
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda, cuda:N, mps, or several with commas; auto and cuda take every GPU.")
    ] = "auto",
    numerics: Numerics = "fp32",
    threads: Threads = None,
    kv_memory: Annotated[
        int | None,
        typer.Option(metavar="SIZE", parser=parse_size, help="Memory for all sessions' KV; a quarter of what is free."),
    ] = None,
    retain_memory: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=parse_size_or_none,
            help="Memory for rows that were handed on, so that answers outlive the nodes behind this one; a sixteenth "
            "of what is free, 1 GiB at most. 0 keeps none.",
        ),
    ] = None,
    max_ram: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=parse_size,
            help="Bound on the memory of the whole process when it computes on the CPU: a number of MiB, or 6GiB.",
        ),
    ] = None,
    max_vram: Annotated[
        int | None, typer.Option(metavar="SIZE", parser=parse_size, help="Bound on its memory on a GPU.")
    ] = None,
    max_upload: Annotated[
        float | None,
        typer.Option(
            metavar="RATE",
            parser=parse_rate,
            help="What all rows and answers together may take of the uplink, as 10Mbit or 2MB per second; no limit if "
            "not given.",
        ),
    ] = None,
    back_off: Annotated[
        bool | None,
        typer.Option(
            "--yield/--no-yield",
            help="Pause while another program uses the device. If neither is given: on a GPU, and not on a CPU.",
        ),
    ] = None,
    operator: Annotated[str, typer.Option(help="A name under which you want to be known.")] = "",
    region: Annotated[str, typer.Option(help="Where the node stands, as eu-west or de: users may ask for it.")] = "",
    price: Annotated[
        float | None,
        typer.Option(
            metavar="PRICE",
            parser=parse_price,
            help="What you ask for a million positions in one layer, in your swarm's unit: a tag, nothing is paid.",
        ),
    ] = None,
    relay: Annotated[
        bool, typer.Option("--relay", help="Carry connections for nodes that cannot be dialled, sealed and unreadable.")
    ] = False,
    relay_limit: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE", parser=parse_size, help="Bytes per second that --relay carries at most, for all together."
        ),
    ] = None,
    upnp: Annotated[bool, typer.Option(help="Ask the router to forward the ports of --listen to this node.")] = True,
    puzzle_bits: PuzzleBits = None,
    mdns: Mdns = True,
    home: Home = None,
    drain_grace: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0.0, help="How long users have to go elsewhere when the node stops or is paused."
        ),
    ] = PAUSE_GRACE_S,
    emulate_rtt: EmulateRtt = None,
    emulate_jitter: EmulateJitter = None,
    emulate_rate: EmulateRate = None,
    audit_log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Record there what the node is sent and sends, without the values, for `fusion-node audit`.",
        ),
    ] = None,
    record_received: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep there what users send, values included, for `fusion-node privacy-report --received`.",
        ),
    ] = None,
    until_stdin_ends: Annotated[
        bool, typer.Option("--until-stdin-ends", help="Leave when standard input ends: with whoever started the node.")
    ] = False,
    log_format: Annotated[LogFormat, typer.Option(help="auto is pretty on a terminal.")] = LogFormat.AUTO,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Serve layers of MODEL: load them, listen, announce, and answer until Ctrl-C."""
    configure_logs(log_format, verbose=verbose)
    config = NodeConfig(
        model=model,
        layers=None if layers is None else LayerRange.parse(layers),
        slice=None if slice_ is None else ModelSlice.parse(slice_),
        max_layers=max_layers,
        scheduler=None if scheduler is None else parse_peer(scheduler),
        peers=tuple(peer or ()),
        listen=listen,
        announce=tuple(announce or ()),
        home=home,
        identity_path=identity,
        device=device,
        numerics=numerics,
        threads=threads,
        kv_memory_bytes=kv_memory,
        retain_memory_bytes=retain_memory,
        max_ram_bytes=max_ram,
        max_vram_bytes=max_vram,
        max_upload_Bps=max_upload,
        back_off=back_off,
        relay=relay,
        relay_rate_Bps=relay_limit,
        upnp=upnp,
        mdns=mdns,
        is_private=private,
        swarm_key_path=swarm_key,
        allow_path=allow,
        operator=operator,
        region=region,
        price=price or 0.0,
        drain_grace_s=drain_grace,
        puzzle_bits=puzzle_bits,
        audit_path=audit_log,
        received_path=record_received,
        emulated_line=emulated_line(emulate_rtt, emulate_jitter, emulate_rate),
    )
    from fusion_node.daemon.node import run_node

    asyncio.run(run_node(config, on_ready=_tell, until_stdin_ends=until_stdin_ends))


def _tell(node: ReadyNode) -> None:
    structlog.get_logger(__name__).info(
        "ready",
        peer=node.peer,
        layers=str(node.layers),
        **({} if node.slice is None else {"slice": str(node.slice)}),
        data=list(node.data_addresses),
        addresses=list(node.addresses),
        invite=node.invite,
    )
