"""Makes ``data_plane.json``: known answers of the data plane, for this and for other implementations.

    python tests/vectors/make_data_plane.py

All keys are fixed; Ed25519 signatures are deterministic, so the file is the same on every machine. Change it only
together with PROTOCOL_VERSION. Bytes are hexadecimal.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import msgspec

from fusion_node.audit_records import name_of
from fusion_node.grants import Grant, Release, ReleaseReason
from fusion_node.types import UnixS
from p2p.grants import sign_grant, sign_release
from p2p.identity import Identity
from p2p.link_messages import Ack, AnyLinkMessage, Goodbye, Hello, Ping, Pong, encode_link_message
from p2p.messages import (
    AnyMessage,
    Assign,
    Assigned,
    BandwidthProbe,
    BandwidthReport,
    Cancel,
    CloseSession,
    OpenSession,
    Partials,
    PartialsEntry,
    RenewGrant,
    Replayed,
    Resend,
    RevokeGrant,
    SessionClosed,
    SessionDraining,
    SessionFailed,
    SessionOpened,
    SessionProgress,
    SessionQuery,
    SessionRefused,
    SessionReleased,
    StageTiming,
    StatusReply,
    StatusRequest,
    Step,
    StepResult,
    StepTaps,
    TensorMeta,
    alias_of,
    encode_message,
)
from p2p.noise_core import MAX_SEGMENT_PLAIN_BYTES, Handshake, Sealer
from p2p.records import (
    PROTOCOL_VERSION,
    Assignment,
    NodeRecord,
    Plan,
    PlanMember,
    PlanStage,
    ShardRecord,
    sign_assignment,
    sign_plan,
    sign_record,
)
from p2p.transfer_core import Lane, Transfer

PATH = Path(__file__).with_name("data_plane.json")
NOW = UnixS(1_800_000_000.0)

INITIATOR, RESPONDER = Identity.from_seed(bytes(range(32))), Identity.from_seed(bytes(range(32, 64)))
STATIC = {"initiator": bytes([1]) * 32, "responder": bytes([2]) * 32}
EPHEMERAL = {"initiator": bytes([3]) * 32, "responder": bytes([4]) * 32}
SESSION = bytes(range(16))

RECORD = NodeRecord(
    version=PROTOCOL_VERSION,
    peer=INITIATOR.peer_id,
    sequence=7,
    issued_at=NOW,
    expires_at=NOW + 90.0,
    data_addresses=("192.0.2.1:4001",),
    libp2p_addresses=("/ip4/192.0.2.1/tcp/4002",),
    device="cpu",
    memory_free_bytes=8 * 2**30,
    shards=(
        ShardRecord(
            model_id="ab" * 32,
            model_name="smollm2-135m",
            start=0,
            stop=10,
            num_layers=30,
            numerics="f32",
            seconds_per_layer=(0.003, 0.004, 0.02),
            kv_free_tokens=4096,
        ),
    ),
    num_sessions=1,
    software="fusion-node/0.1.0",
)
PLAN = Plan(
    version=PROTOCOL_VERSION,
    user=RESPONDER.peer_id,
    session=SESSION,
    epoch=0,
    model_id="ab" * 32,
    numerics="f32",
    max_positions=2048,
    issued_at=NOW,
    expires_at=NOW + 3600.0,
    stages=(
        PlanStage(INITIATOR.peer_id, 0, 10, ("192.0.2.1:4001",)),
        PlanStage(RESPONDER.peer_id, 10, 30, ("192.0.2.2:4001", "[2001:db8::1]:4001")),
    ),
)
GROUP_PLAN = msgspec.structs.replace(
    PLAN,
    stages=(
        PlanStage(
            INITIATOR.peer_id,
            0,
            30,
            (),
            members=(
                PlanMember(INITIATOR.peer_id, ("192.0.2.1:4001",)),
                PlanMember(RESPONDER.peer_id, ("192.0.2.2:4001",), ("/ip4/192.0.2.2/tcp/4002",)),
            ),
            weights=(2, 1),
        ),
    ),
)
MESSAGES: tuple[tuple[AnyMessage, bytes], ...] = (
    (StatusRequest(2), b""),
    (StatusReply(2, b"record", {"sessions": 1.0}), b""),
    (BandwidthProbe(5, 1, 8), bytes(range(16))),
    (BandwidthProbe(6, 0, 1, 262144), b""),
    (BandwidthReport(5, 229376, 0.25), b""),
    (BandwidthReport(6, 0, 0.0, "the node is busy"), b""),
    (OpenSession(SESSION, 0, 1, b"plan"), b""),
    (OpenSession(SESSION, 0, 1, b"plan", bytes(range(16, 32)), 48), b""),
    (SessionOpened(SESSION, 0, 1, 30.0), b""),
    (SessionOpened(SESSION, 0, 1, 30.0, 48), b""),
    (OpenSession(SESSION, 1, 1, b"plan", resumes=True), b""),
    (
        OpenSession(
            SESSION, 2, 1, b"plan", resumes=True, folds=True, path_start=640, path=(651, 653, 700), path_epoch=1
        ),
        b"",
    ),
    (SessionOpened(SESSION, 1, 1, 30.0, 0, b"lease", 7, 640, 640), b""),
    (Resend(SESSION, 1, 0, 7, 0, 256, False, 1), b""),
    (Resend(SESSION, 1, 7, 1, 640, 1, True), b""),
    (Replayed(SESSION, 1, 1, 7, 640), b""),
    (SessionQuery(SESSION, 1, 1), b""),
    (SessionProgress(SESSION, 1, 1, 9, 8, 30.0, 0.25, b"lease"), b""),
    (SessionProgress(SESSION, 1, 1, 9, 9, 30.0, 0.0, b"lease", backlog_s=12.5), b""),
    (SessionDraining(SESSION, 1, 1, 20.0, "the node is shutting down"), b""),
    (SessionRefused(SESSION, 0, 1, "no-memory", "no KV left"), b""),
    (SessionRefused(SESSION, 0, 1, "member-unreachable", "no way there", RESPONDER.peer_id), b""),
    (
        Step(SESSION, 0, 3, 5, 4, (), 0, (6,), TensorMeta("f32", 2, 2), (StageTiming(10, 20),)),
        bytes(range(16)),
    ),
    (Step(SESSION, 0, 4, 7, 0, (6, 7, 7), 6, (7, 8, 9), TensorMeta("f16", 3, 2), ()), bytes(range(12))),
    (Step(SESSION, 1, 0, 1, 0, (), 2, (), TensorMeta("f32", 2, 2), (), 7, 1), bytes(range(16))),
    (
        Step(
            SESSION,
            0,
            5,
            10,
            0,
            (9, 8, 10, 10, 11, 11, 12, 12, 13),
            9,
            (10, 18),
            TensorMeta("f16", 3, 2),
            (StageTiming(10, 20, 35),),
            num_nodes=9,
            live=b"\x05\x01",
        ),
        bytes(range(12)),
    ),
    (Step(SESSION, 0, 6, 19, 14, (), 0, (), TensorMeta("f16", 0, 2), (), num_nodes=2, live=b"\x00"), b""),
    (Cancel(SESSION, 0, 12), b""),
    (OpenSession(SESSION, 0, 1, b"plan", taps=(12, 20)), b""),
    (SessionOpened(SESSION, 0, 1, 30.0, taps=(12, 20)), b""),
    (
        Step(
            SESSION,
            0,
            7,
            21,
            14,
            (14, 21, 21),
            0,
            (21, 22, 23),
            TensorMeta("f16", 2, 2),
            (),
            num_nodes=3,
            live=b"\x05",
            tap=b"\x03",
        ),
        bytes(range(8)),
    ),
    (StepTaps(SESSION, 0, 7, 12, (21,), TensorMeta("f16", 1, 2)), bytes(range(4))),
    (StepResult(SESSION, 0, 3, (6,), TensorMeta("bf16", 1, 4), ()), bytes(range(8))),
    (StepResult(SESSION, 0, 4, (7, 8), TensorMeta("i8b32", 2, 3), ()), bytes(range(10))),
    (StepResult(SESSION, 0, 5, (9,), TensorMeta("f32", 1, 16, "zs1"), ()), bytes(range(40))),
    (SessionFailed(SESSION, 0, 1, "peer", "the next stage is gone", RESPONDER.peer_id), b""),
    (SessionFailed(SESSION, 0, 1, "peer-lost", "the next stage is gone", RESPONDER.peer_id, True), b""),
    (OpenSession(SESSION, 0, 1, b"plan", member=2), b""),
    (OpenSession(SESSION, 0, 1, b"plan", member=2, mask_keys=bytes(range(64))), b""),
    (Partials(11, 0, (PartialsEntry(alias_of(SESSION, 0), 21, 1),)), bytes(range(8))),
    (
        Partials(11, 3, (PartialsEntry(alias_of(SESSION, 0), 21, 1), PartialsEntry(alias_of(SESSION, 1), 70_000, 2))),
        bytes(range(24)),
    ),
    (OpenSession(SESSION, 0, 1, b"plan", member=2, grant=b"grant"), b""),
    (RenewGrant(SESSION, 1, b"grant"), b""),
    (RevokeGrant(SESSION, 1, bytes(range(32, 48))), b""),
    (SessionReleased(SESSION, 1, b"release"), b""),
    (CloseSession(SESSION, 0), b""),
    (CloseSession(SESSION, 0, retain=True), b""),
    (SessionClosed(SESSION, 0), b""),
    (Assign(7, b"assignment"), b""),
    (Assigned(7), b""),
    (Assigned(8, "this node takes no assignments"), b""),
)
ASSIGNMENT = Assignment(
    version=PROTOCOL_VERSION,
    scheduler=RESPONDER.peer_id,
    node=INITIATOR.peer_id,
    sequence=3,
    model_id="ab" * 32,
    start=10,
    stop=20,
    issued_at=NOW,
    expires_at=NOW + 60.0,
)

GRANT = Grant(
    version=PROTOCOL_VERSION,
    grant=bytes(range(32, 48)),
    user=RESPONDER.peer_id,
    node=INITIATOR.peer_id,
    session=name_of(SESSION),
    model_id="ab" * 32,
    start=0,
    stop=30,
    member=0,
    weights=(2, 1),
    issued_at=NOW,
    expires_at=NOW + 1800.0,
)
RELEASE = Release(
    version=PROTOCOL_VERSION,
    grant=GRANT.grant,
    node=INITIATOR.peer_id,
    user=RESPONDER.peer_id,
    session=GRANT.session,
    why=ReleaseReason.CLOSED,
    start=0,
    stop=30,
    member=0,
    weights=(2, 1),
    num_positions=640,
    issued_at=NOW + 1.0,
)


LINK_MESSAGES: tuple[AnyLinkMessage, ...] = (
    Hello(bytes(range(8)), b"", 1, (0, 0, 0, 0), (262144, 2097152, 4194304, 4194304), (), ("zstd",)),
    Hello(bytes(range(8, 16)), bytes(range(8)), 1, (0, 0, 0, 0), (262144, 2097152, 4194304, 4194304), (0, 0, 0, 0)),
    Ack((10, 20, 30, 40), (262154, 2097172, 4194334, 4194344)),
    Ping(1),
    Pong(1),
    Goodbye("draining"),
)
LONGEST_CONTENT = bytes(i % 251 for i in range(MAX_SEGMENT_PLAIN_BYTES))
LONG = StepResult(SESSION, 0, 5, (9,), TensorMeta("f32", 1, 25), ())


def transfer() -> dict[str, Any]:
    """Two frames of different lanes over a link, and what is sent again over the next one; chunks of 64 bytes."""
    sender, receiver = Transfer(), Transfer()
    sender.resume(receiver.ack()[0], receiver.ack()[1])
    position = receiver.begin_link()
    sender.queue(Lane.PREFILL, SESSION, encode_message(LONG), bytes(range(100)))
    first = [sender.next_segment(64)]
    sender.queue(Lane.CONTROL, None, encode_message(StatusRequest(2)))
    while (plain := sender.next_segment(64)) is not None:
        first.append(plain)
    for plain in first[:-1]:  # the link is lost before the last one arrives
        assert plain is not None
        receiver.receive(position, plain)
    received, granted = receiver.ack()
    sender.resume(received, granted)
    again = sender.next_segment(64)
    assert again is not None
    frame = receiver.receive(receiver.begin_link(), again)
    assert frame == encode_message(LONG) + bytes(range(100))
    return {
        "first_link": [plain.hex() for plain in first if plain is not None],
        "received": received,
        "next_link": [again.hex()],
    }


def hello_pair() -> dict[str, Any]:
    """Hellos on a second link, of which the first was written before what it says was overtaken by an acknowledgement.

    So the side that answers begins its prefill lane later than the one that dialled has asked for.
    """
    dialling, answering = Transfer(), Transfer()
    answering.resume(*dialling.ack())
    dialling.resume(*answering.ack())
    position = dialling.begin_link()
    for _ in range(2):
        answering.queue(Lane.PREFILL, SESSION, encode_message(LONG), bytes(range(100)))
    first, second = answering.next_segment(), answering.next_segment()
    assert first is not None
    assert second is not None
    dialling.receive(position, first)
    said, new_position = dialling.tell(), dialling.begin_link()
    dialling.receive(position, second)
    answering.acked(*dialling.ack())
    starts = answering.resume(*said)
    dialling.expect(new_position, starts)
    assert starts != said[0]
    tokens = bytes(range(8)), bytes(range(8, 16))
    hellos = Hello(*tokens, 2, *said), Hello(*tokens[::-1], 2, *answering.ack(), starts)
    return {
        side: {"fields": _plain(hello), "content": encode_link_message(hello).hex()}
        for side, hello in zip(("dialling", "answering"), hellos, strict=True)
    }


def handshake() -> tuple[Handshake, Handshake, list[bytes]]:
    """Both sides after a handshake with fixed keys, and the three messages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # noiseprotocol warns, rightly, of an ephemeral key that is handed in
        ours, theirs = (
            Handshake(
                identity,
                initiator=role == "initiator",
                static_private=STATIC[role],
                ephemeral_private=EPHEMERAL[role],
            )
            for role, identity in (("initiator", INITIATOR), ("responder", RESPONDER))
        )
    first = ours.start()
    second = theirs.receive(first)
    third = ours.receive(second)
    theirs.receive(third)
    return ours, theirs, [first, second, third]


def vectors() -> dict[str, Any]:
    """The content of the file."""
    ours, _, messages = handshake()
    assert ours.keys is not None
    sealer = Sealer(ours.keys.sending_key)
    return {
        "protocol_version": PROTOCOL_VERSION,
        "identities": [
            {"seed": identity.seed.hex(), "peer_id": identity.peer_id} for identity in (INITIATOR, RESPONDER)
        ],
        "handshake": {
            "static_private": {role: key.hex() for role, key in STATIC.items()},
            "ephemeral_private": {role: key.hex() for role, key in EPHEMERAL.items()},
            "messages": [message.hex() for message in messages],
            "initiator_sending_key": ours.keys.sending_key.hex(),
            "initiator_receiving_key": ours.keys.receiving_key.hex(),
        },
        "segments": [
            {
                "type": type(message).__name__,
                "fields": _plain(message),
                "content": encode_link_message(message).hex(),
                "sealed": sealer.seal(encode_link_message(message)).hex(),
            }
            for message in LINK_MESSAGES
        ],
        # Goes on after those; its content are the bytes i mod 251.
        "longest_segment": {
            "content_bytes": MAX_SEGMENT_PLAIN_BYTES,
            "sealed_sha256": hashlib.sha256(sealer.seal(LONGEST_CONTENT)).hexdigest(),
        },
        "transfer": _plain(transfer()),
        "hello_pair": hello_pair(),
        "messages": [
            {
                "type": type(message).__name__,
                "fields": _plain(message),
                "frame": (encode_message(message) + payload).hex(),
            }
            for message, payload in MESSAGES
        ],
        "record": {"opened_at": NOW + 1, "envelope": sign_record(RECORD, INITIATOR).hex(), "fields": _plain(RECORD)},
        "plan": {"opened_at": NOW + 1, "envelope": sign_plan(PLAN, RESPONDER).hex(), "fields": _plain(PLAN)},
        "group_plan": {
            "opened_at": NOW + 1,
            "envelope": sign_plan(GROUP_PLAN, RESPONDER).hex(),
            "fields": _plain(GROUP_PLAN),
        },
        "assignment": {
            "opened_at": NOW + 1,
            "envelope": sign_assignment(ASSIGNMENT, RESPONDER).hex(),
            "fields": _plain(ASSIGNMENT),
        },
        "grant": {"opened_at": NOW + 1, "envelope": sign_grant(GRANT, RESPONDER).hex(), "fields": _plain(GRANT)},
        "release": {
            "opened_at": NOW + 1,
            "envelope": sign_release(RELEASE, INITIATOR).hex(),
            "fields": _plain(RELEASE),
        },
    }


def _plain(value: Any) -> Any:
    """Structs as objects with field names, bytes as hexadecimal."""
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value


if __name__ == "__main__":
    PATH.write_text(json.dumps(vectors(), indent=1) + "\n")
