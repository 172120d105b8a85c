"""What a user allows the member of a fusion group to hold, and what the member says that it has deleted of it.

Both are statements that travel signed (p2p.grants) and lie in audit logs as they travelled, so that they name a session
as logs do and not by its id, with which digests in logs are keyed.

Source: docs/protocol-data-plane.md, "Signed statements"; docs/fusion.md, "Grants".
"""

from __future__ import annotations

import enum
from typing import Annotated, TypeAlias

import msgspec

from fusion_node.slices import MAX_MEMBERS, MAX_WEIGHT, ModelSlice
from fusion_node.types import LayerRange

GRANT_ID_BYTES = 16

GrantId: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=GRANT_ID_BYTES, max_length=GRANT_ID_BYTES)]
PeerText: TypeAlias = Annotated[str, msgspec.Meta(min_length=52, max_length=52)]
ModelText: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
SessionName: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$", max_length=16)]
Layer: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=4096)]
Member: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_MEMBERS - 1)]
Weights: TypeAlias = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=1, le=MAX_WEIGHT)], ...], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)
]
Time: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e11)]


class ReleaseReason(enum.StrEnum):
    """Why a member has deleted what it held."""

    CLOSED = "closed"
    """Its user has closed the session."""
    REVOKED = "revoked"
    """Its user has revoked the grant."""
    EXPIRED = "expired"
    """The grant has run out."""
    ENDED = "ended"
    """The member itself has ended it: an error, its lease, a lack of room, or it leaves."""


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """The user allows a node to hold a slice of the states of these layers, for one session. Signed by the user.

    ``session`` is fusion_node.audit_records.name_of its id. Times are Unix time.
    """

    version: int
    grant: GrantId
    user: PeerText
    node: PeerText
    session: SessionName
    model_id: ModelText
    start: Layer
    stop: Layer
    member: Member
    weights: Weights
    issued_at: Time
    expires_at: Time

    @property
    def slice(self) -> ModelSlice:
        return ModelSlice(self.member, self.weights)

    @property
    def layers(self) -> LayerRange:
        return LayerRange(self.start, self.stop)


class Release(msgspec.Struct, frozen=True, array_like=True):
    """A node says that it has deleted what it held under a grant. Signed by the node: its word, and no proof.

    ``num_positions`` of the session had been committed there.
    """

    version: int
    grant: GrantId
    node: PeerText
    user: PeerText
    session: SessionName
    why: ReleaseReason
    start: Layer
    stop: Layer
    member: Member
    weights: Weights
    num_positions: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    issued_at: Time

    def is_of(self, grant: Grant) -> bool:
        """Whether it is about all that was granted."""
        return (
            self.grant == grant.grant
            and (self.node, self.user, self.session) == (grant.node, grant.user, grant.session)
            and (self.start, self.stop, self.member, self.weights)
            == (grant.start, grant.stop, grant.member, grant.weights)
        )
