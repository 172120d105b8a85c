"""Keys of the masks between members of a group: what each two of them share in one session under one plan.

The user draws one secret for an answer, and derives all keys of it: each of another plan, opening, stage or pair is
another one. Members are sent their own keys only. The user, who has the whole state anyway, knows all.

Source: docs/protocol-data-plane.md, "Masked sums".
"""

from __future__ import annotations

import hashlib
import struct

from fusion_node.slices import MASK_KEY_BYTES

SECRET_BYTES = 32

_WHAT = struct.Struct("<16sIIBBB")


def mask_keys(
    secret: bytes, *, session: bytes, epoch: int, opening: int, stage: int, num_members: int, member: int
) -> bytes:
    """The keys that a member shares with each other one, in the order of the members.

    Args:
        secret: SECRET_BYTES at random.
        opening: how often groups of the answer were asked to begin before this: no two openings have one key then.
    """
    pairs = [(min(member, other), max(member, other)) for other in range(num_members) if other != member]
    return b"".join(
        hashlib.blake2b(
            _WHAT.pack(session, epoch, opening, stage, *pair),
            digest_size=MASK_KEY_BYTES,
            key=secret,
            person=b"fusion-masks",
        ).digest()
        for pair in pairs
    )
