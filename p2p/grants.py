"""Signs and checks grants and releases: fusion_node.grants.

Guarantees: as p2p.records: a statement is accepted only from the key that it names, within its lifetime, below a size.

Source: docs/protocol-data-plane.md, "Signed statements".
"""

from __future__ import annotations

from fusion_node.grants import Grant, Release
from fusion_node.types import UnixS
from p2p.identity import Identity
from p2p.records import MAX_CLOCK_SKEW_S, Refusal, check_dates, open_statement, sign_statement

MAX_GRANT_BYTES = 512
"""Also of a release. With 16 members it is 400, and logs hold it as hexadecimal text."""

MAX_GRANT_TTL_S = 3600.0

_GRANT_DOMAIN = b"fusion-node/grant/1:"
_RELEASE_DOMAIN = b"fusion-node/release/1:"


def sign_grant(grant: Grant, identity: Identity) -> bytes:
    """The grant as a signed envelope, ready for the wire."""
    return sign_statement(grant, _GRANT_DOMAIN, identity)


def sign_release(release: Release, identity: Identity) -> bytes:
    """The release as a signed envelope, ready for the wire."""
    return sign_statement(release, _RELEASE_DOMAIN, identity)


def open_grant(envelope: bytes, *, now: UnixS) -> Grant | Refusal:
    """Checks size, form, signature and dates of a grant."""
    grant = open_statement(envelope, Grant, _GRANT_DOMAIN, MAX_GRANT_BYTES, lambda each: each.user)
    if isinstance(grant, Refusal):
        return grant
    if not grant.start < grant.stop or not grant.member < len(grant.weights):
        return Refusal.MALFORMED
    return check_dates(grant.issued_at, grant.expires_at, now, MAX_GRANT_TTL_S) or grant


def open_release(envelope: bytes, *, now: UnixS) -> Release | Refusal:
    """Checks size, form and signature of a release, and that it is not of times to come. It does not run out."""
    release = open_statement(envelope, Release, _RELEASE_DOMAIN, MAX_GRANT_BYTES, lambda each: each.node)
    if isinstance(release, Refusal):
        return release
    if not release.start < release.stop or not release.member < len(release.weights):
        return Refusal.MALFORMED
    return Refusal.FUTURE_DATED if release.issued_at > now + MAX_CLOCK_SKEW_S else release
