"""What a node is told at its start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fusion_node.daemon.manners_core import PAUSE_GRACE_S
from fusion_node.errors import ConfigError
from fusion_node.slices import ModelSlice
from fusion_node.types import LayerRange, PeerId
from p2p.addresses import parse_announce, parse_listen
from p2p.link_emulation_core import LineShape

DEFAULT_LISTEN = "127.0.0.1:0"
"""Loopback: nobody is served beyond this machine unless its operator says so."""


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Settings of one node.

    Attributes:
        model: name or id in the store.
        layers: what to serve; None takes the whole model, or what fits and the swarm lacks.
        slice: of these layers, or of all, that the node holds as a member of fusion groups; None: they are held whole.
        max_layers: that the node takes at most when it chooses; None takes what fits.
        scheduler: peer id of the one whose assignments of layers are obeyed; None obeys nobody's.
        peers: multiaddrs or invites of the swarm to join; empty starts a new one.
        listen: ``HOST:PORT`` of the control plane; the data plane takes the next port (any free one for port 0).
        announce: ``HOST:PORT`` under which others reach ``listen``, as behind a router; the data plane's is one more.
        home: folder of the store and the identity; None is the default place.
        identity_path: key file; None is ``identity.key`` in the home.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:N``, ``mps``, or several with commas.
        numerics: name of the numerics class.
        threads: torch threads; None lets torch choose.
        kv_memory_bytes: for all sessions together; None takes a quarter of what is free.
        retain_memory_bytes: for rows that were handed on, so that a session outlives the stages behind this one; None
            takes a sixteenth of the free memory, 1 GiB at most; 0 keeps none.
        max_ram_bytes: of the whole process, on a CPU node; None sets no bound.
        max_vram_bytes: of the whole process on a GPU; None sets no bound.
        max_upload_Bps: of all data-plane links together, bytes per second with their headers; None sets no bound.
        back_off: whether to pause while another program uses the device; None does so on a GPU.
        relay: whether to carry the connections of nodes that cannot be dialled.
        relay_rate_Bps: how much of that at most; None leaves it to the line.
        upnp: whether to ask the router to forward both ports; without effect on loopback.
        mdns: whether to find and be found on the local network.
        is_private: whether to be in the swarm whose key is ``swarm.key`` in the home; made if there is none.
        swarm_key_path: key file of the private swarm to be in. An invite in ``peers`` may hold the key instead.
        allow_path: file of the peer ids that may connect; None lets in everybody who is not banned.
        operator: a name that the operator wants to be known by; a claim.
        region: where the operator says that the node stands; a claim.
        price: what the operator asks for a million positions in one layer: a tag for users' rules.
        drain_grace_s: for the users of a node that stops or is paused to take their sessions elsewhere.
        puzzle_bits: what this identity pays, and demands of others; None is p2p.puzzle.default_bits.
        audit_path: file to record in what this node is sent and sends (p2p.audit_log); None records nothing.
        received_path: file to keep in what this node is sent, values included (p2p.received_frames); None: nothing.
        emulated_line: how slow a line to pretend, for demonstrations and measurements (p2p.link_emulation); None: none.
    """

    model: str
    layers: LayerRange | None = None
    slice: ModelSlice | None = None
    max_layers: int | None = None
    scheduler: PeerId | None = None
    peers: tuple[str, ...] = field(default=(), repr=False)  # an invite may be a secret
    listen: str = DEFAULT_LISTEN
    announce: tuple[str, ...] = ()
    home: Path | None = None
    identity_path: Path | None = None
    device: str = "auto"
    numerics: str = "fp32"
    threads: int | None = None
    kv_memory_bytes: int | None = None
    retain_memory_bytes: int | None = None
    max_ram_bytes: int | None = None
    max_vram_bytes: int | None = None
    max_upload_Bps: float | None = None
    back_off: bool | None = None
    relay: bool = False
    relay_rate_Bps: int | None = None
    upnp: bool = True
    mdns: bool = True
    is_private: bool = False
    swarm_key_path: Path | None = None
    allow_path: Path | None = None
    operator: str = ""
    region: str = ""
    price: float = 0.0
    drain_grace_s: float = PAUSE_GRACE_S
    puzzle_bits: int | None = None
    audit_path: Path | None = None
    received_path: Path | None = None
    emulated_line: LineShape | None = None


def check_ports(listen: str, announce: Sequence[str]) -> None:
    """Makes sure that the data plane can have the port after each.

    Raises:
        ConfigError: it cannot, or one of them is malformed.
    """
    for text, port in ((listen, parse_listen(listen)[1]), *((text, parse_announce(text)[1]) for text in announce)):
        if port == 65_535:
            raise ConfigError(f"{text!r} leaves no port for the data plane, which takes the next one: name a lower one")


def check_slice(config: NodeConfig) -> None:
    """Makes sure that who holds a slice is not to choose layers as well, and has others to be in a group with.

    Raises:
        ConfigError: one of the two does not hold.
    """
    if config.slice is None:
        return
    if config.slice.num_members == 1:
        raise ConfigError(
            f"slice {config.slice} is all of the layers, and a group has 2 members at least: leave --slice out, so "
            "that the node serves them alone"
        )
    for flag, value in (("--max-layers", config.max_layers), ("--scheduler", config.scheduler)):
        if value is not None:
            raise ConfigError(
                f"{flag} is for nodes that go over to other layers, and a slice stays where it is, because the other "
                "members of its group hold the rest: name its layers with --layers"
            )
