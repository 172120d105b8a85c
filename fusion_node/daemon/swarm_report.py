"""What a node tells of the swarm around it, as it travels over the control socket: invites, and peers with ages.

Ages are those of the facts: what has not been heard again stays as old as it is.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class InviteRequest(msgspec.Struct, frozen=True):
    """Body of ``POST /invite``.

    Attributes:
        expires_in_s: from now; None never.
        with_key: whether the key of a private swarm goes in.
    """

    expires_in_s: float | None = None
    with_key: bool = True


class InviteReply(msgspec.Struct, frozen=True):
    """An invite. With ``has_key``, ``invite`` is a secret: it stays out of logs.

    Attributes:
        addresses: those that are in it.
        swarm: p2p.swarm_key.swarm_tag.
        expires_at: Unix time in seconds.
        names_others: it leads to other nodes too, because not everybody can dial this one.
        is_unconfirmed: no peer has dialled the addresses of this node that are in it.
        is_local: it leads to this machine only.
        problem: why there is no invite; empty when there is one.
    """

    peer: str
    swarm: str
    invite: str = ""
    addresses: tuple[str, ...] = ()
    has_key: bool = False
    expires_at: float | None = None
    names_others: bool = False
    is_unconfirmed: bool = False
    is_local: bool = False
    problem: str = ""

    def __repr__(self) -> str:
        return f"InviteReply(peer={self.peer!r}, swarm={self.swarm!r}, has_key={self.has_key}, …)"


class ConnectionView(msgspec.Struct, frozen=True):
    """One connection with a peer.

    Attributes:
        plane: ``data`` or ``control``.
        path: as p2p.seam.PathKind names it; empty when it is not known.
        address: of the other end, or of the relay before it.
        round_trip_ms: the best recent one; None before the first.
        age_s: of the connection.
        heard_s: since something came; None when that is not known.
        we_dialled: None when it is not known.
        num_resumed: how often it was lost and taken up again.
        is_suspect: it is silent, and may be dead.
    """

    plane: str
    path: str
    address: str
    age_s: float
    round_trip_ms: float | None = None
    heard_s: float | None = None
    we_dialled: bool | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    num_resumed: int = 0
    is_suspect: bool = False


class PeerView(msgspec.Struct, frozen=True):
    """One peer that this node is connected with or knows of.

    Attributes:
        operator: by its own word.
        serves: ``MODEL START:STOP`` for each shard in its record.
        standing: ``suspect`` when it is silent, ``banned``, or why else it is refused; empty when all is well.
        record_age_s: of its newest record, by its own clock; None when there is none, as of a user.
        record_left_s: until that expires.
        met_s: since this machine last dialled it with success; None when it never did.
    """

    peer: str
    operator: str = ""
    serves: tuple[str, ...] = ()
    connections: tuple[ConnectionView, ...] = ()
    standing: str = ""
    record_age_s: float | None = None
    record_left_s: float | None = None
    met_s: float | None = None


class PeersReply(msgspec.Struct, frozen=True):
    """The answer to ``GET /peers``: connected ones first, each list in the order of their ids."""

    peer: str
    swarm: str
    peers: tuple[PeerView, ...]


class Swarming(Protocol):
    """What a control socket asks for the swarm around a node."""

    def invite(self, request: InviteRequest) -> InviteReply: ...

    async def peers(self) -> PeersReply: ...
