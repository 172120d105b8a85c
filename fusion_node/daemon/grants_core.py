"""What a node with a slice demands before it holds anything of a session: a grant of its user, that covers all of it.

Guarantees: a grant that has ended here opens nothing again, and is released once, until MAX_ENDED others have ended:
its user alone could bring it again.

Assumes: the caller has checked signature and dates (p2p.grants.open_grant), and who the session's user is.

States: none but what has ended. Timers: none.

Source: docs/protocol-data-plane.md, "Grants".
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from fusion_node.audit_records import name_of
from fusion_node.grants import Grant, Release, ReleaseReason
from fusion_node.slices import ModelSlice
from fusion_node.types import LayerRange, MonotonicS, PeerId

MAX_ENDED = 4096
"""Grants that are remembered after their end: 100 bytes each."""


@dataclass(frozen=True, slots=True)
class HeldGrant:
    """A grant that was accepted, and when it runs out by this node's own clock."""

    grant: Grant
    until: MonotonicS


@dataclass(frozen=True, slots=True)
class Over:
    """A grant under which nothing is held any more.

    Attributes:
        epoch: of the session's last plan here.
        num_positions: that had been committed.
    """

    session: bytes
    epoch: int
    held: HeldGrant
    why: ReleaseReason
    num_positions: int


def release_of(over: Over, *, issued_at: float) -> Release:
    """What a node says at the end of a grant, to be signed.

    Args:
        issued_at: Unix seconds.
    """
    grant = over.held.grant
    return Release(
        version=grant.version,
        grant=grant.grant,
        node=grant.node,
        user=grant.user,
        session=grant.session,
        why=over.why,
        start=grant.start,
        stop=grant.stop,
        member=grant.member,
        weights=grant.weights,
        num_positions=over.num_positions,
        issued_at=issued_at,
    )


class EndedGrants:
    """Which grants have ended here."""

    def __init__(self) -> None:
        self._ids: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def add(self, grant: Grant) -> None:
        """It is over."""
        self._ids[_key(grant)] = None
        while len(self._ids) > MAX_ENDED:
            self._ids.popitem(last=False)

    def __contains__(self, grant: Grant) -> bool:
        return _key(grant) in self._ids


def _key(grant: Grant) -> tuple[str, bytes]:
    # Another user may choose the same id.
    return grant.user, grant.grant


def problem_with(
    grant: Grant,
    *,
    user: PeerId,
    node: PeerId,
    session: bytes,
    model_id: str,
    layers: LayerRange,
    slice_: ModelSlice,
) -> str | None:
    """Why a grant does not cover what a session asks this node to hold, in words; None if it does."""
    if grant.user != user:
        return "it is another user's"
    if grant.node != node:
        return "it is for another node"
    if grant.session != name_of(session):
        return "it is for another session"
    if grant.model_id != model_id:
        return "it is for another model"
    if not (grant.start <= layers.start and layers.stop <= grant.stop):
        return f"it is for layers {grant.layers}, and not for {layers}"
    if grant.slice != slice_:
        return f"it is for slice {grant.slice}, and not for {slice_}"
    return None


def renews(new: Grant, held: Grant) -> bool:
    """Whether it is the same grant with a later end."""
    same = msgspec.structs.replace(new, issued_at=held.issued_at, expires_at=held.expires_at)
    return same == held and new.expires_at > held.expires_at
