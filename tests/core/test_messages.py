"""The messages of the data plane: known answers, limits, and bytes from strangers."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_node.slices import Dims, exchange_width, exchanges, split
from fusion_node.wire import WireError, encode_header
from p2p.messages import (
    MAX_NODES_PER_STEP,
    MAX_PARTIALS,
    MAX_TAPPED_NODES,
    MAX_TAPS,
    MAX_UNIT_ROWS,
    AnyMessage,
    Cancel,
    CloseSession,
    OpenSession,
    Partials,
    PartialsEntry,
    Resend,
    SessionOpened,
    SessionRefused,
    StageTiming,
    StatusReply,
    StatusRequest,
    Step,
    StepResult,
    StepTaps,
    TensorMeta,
    alias_of,
    decode_message,
    encode_message,
)
from p2p.noise_core import TAG_BYTES
from tests.vectors.make_data_plane import MESSAGES

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "data_plane.json").read_text())
SESSION = bytes(16)


def step(**changes: object) -> Step:
    fields = {
        "session": SESSION,
        "epoch": 0,
        "sequence": 0,
        "first_node": 5,
        "parent": 4,
        "parents": (),
        "advance": 0,
        "want": (5, 6),
        "tensor": TensorMeta("f32", 2, 1),
        "timings": (),
    }
    return Step(**{**fields, **changes})  # type: ignore[arg-type]


def decode(message: AnyMessage, payload: bytes = bytes(8)) -> tuple[AnyMessage, memoryview]:
    return decode_message(encode_message(message) + payload)


def test_every_message_has_a_vector_and_matches_it() -> None:
    assert {type(message) for message, _ in MESSAGES} == set(get_args(AnyMessage))
    for (message, payload), vector in zip(MESSAGES, VECTORS["messages"], strict=True):
        frame = bytes.fromhex(vector["frame"])
        assert encode_message(message) + payload == frame
        assert decode_message(frame) == (message, payload)


def test_chain_and_tree_are_accepted() -> None:
    assert decode(step())[0] == step()
    tree = step(parent=0, parents=(4, 5))
    assert decode(tree)[0] == tree


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"tensor": TensorMeta("f32", 0, 1)}, "payload|without nodes"),
        ({"tensor": TensorMeta("f32", 3, 1)}, "payload has 8 bytes"),
        ({"tensor": TensorMeta("int7", 2, 1)}, "encoding"),
        ({"tensor": TensorMeta("", 2, 1)}, "encoding"),
        ({"tensor": TensorMeta("f32", 2, 1, "zs1")}, "cannot stand for"),  # not smaller than what it stands for
        ({"tensor": TensorMeta("f32", 2, 65, "zs1")}, "cannot stand for"),  # 65 times larger
        ({"tensor": TensorMeta("f32", 2, 2, "lz4")}, "compression"),
        ({"parents": (4,)}, "one parent per node"),
        ({"parents": (4, 5, 6)}, "one parent per node"),
        ({"parents": (4, 6)}, "hangs on itself"),
        ({"parents": (5, 5)}, "hangs on itself"),
        ({"parent": 5}, "hangs on itself"),
        ({"first_node": 0}, "out of range"),
        ({"first_node": 2**32 - 1}, "out of range"),
        ({"want": (7,)}, "wanted row"),
        ({"want": (4,)}, "wanted row"),
        ({"want": (5, 5)}, "ascending order"),
        ({"want": (6, 5)}, "ascending order"),
    ],
)
def test_inconsistent_step_is_refused(changes: dict[str, object], what: str) -> None:
    with pytest.raises(WireError, match=what):
        decode(step(**changes))


def test_step_without_nodes_is_refused() -> None:
    with pytest.raises(WireError, match="without nodes"):
        decode(step(tensor=TensorMeta("f32", 0, 1), want=()), b"")


def test_step_may_bring_rows_for_some_of_its_nodes_or_none() -> None:
    nine = step(want=(5, 13), tensor=TensorMeta("f32", 2, 1), num_nodes=9, live=b"\x01\x01")
    assert decode(nine)[0] == nine
    assert nine.node_count == 9
    none = step(want=(), tensor=TensorMeta("f32", 0, 1), num_nodes=2, live=b"\0")
    assert decode(none, b"")[0] == none
    assert step().node_count == 2


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_nodes": 2}, "one bit per node"),
        ({"live": b"\x03"}, "one bit per node"),
        ({"num_nodes": 9, "live": b"\x03"}, "one bit per node"),
        ({"num_nodes": 3, "live": b"\x03\x00"}, "one bit per node"),
        ({"num_nodes": 3, "live": b"\x01"}, "bits are set"),
        ({"num_nodes": 3, "live": b"\x07"}, "bits are set"),
        ({"num_nodes": 3, "live": b"\x09"}, "bits are set"),
        ({"num_nodes": 3, "live": b"\x05", "parents": (4, 5)}, "one parent per node"),
        ({"num_nodes": 3, "live": b"\x05", "want": (8,)}, "wanted row"),
        ({"num_nodes": 3, "live": b"\x05", "want": (), "stop_stage": 1}, "replayed entry lacks rows"),
        ({"num_nodes": 3, "live": b"\x05", "want": (), "stop_stage": 1, "covers": 2}, "replayed entry lacks rows"),
        ({"num_nodes": 3, "live": b"\x05", "first_node": 2**32 - 2}, "out of range"),
    ],
)
def test_step_whose_rows_and_nodes_do_not_fit_is_refused(changes: dict[str, object], what: str) -> None:
    with pytest.raises(WireError, match=what):
        decode(step(**changes))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"resumes": False}, "only a session that is resumed"),
        ({"folds": False}, "nothing is folded along"),
        ({"folds": False, "path": ()}, "nothing is folded along"),
        ({"folds": False, "path": (), "path_start": 0, "path_epoch": 1}, "nothing is folded along"),
        ({"path": (7, 7)}, "ascending order"),
        ({"path": (8, 7)}, "ascending order"),
        ({"path": (0, 7)}, "ascending order"),
        ({"prefix": bytes(3)}, "id of a session"),
    ],
)
def test_fold_that_contradicts_itself_is_refused(changes: dict[str, object], what: str) -> None:
    fold: dict[str, object] = {"resumes": True, "folds": True, "path_start": 3, "path": (7, 9)}
    with pytest.raises(WireError, match=what):
        decode(OpenSession(SESSION, 1, 0, b"plan", **(fold | changes)), b"")  # type: ignore[arg-type]


def test_result_needs_a_row_per_node() -> None:
    with pytest.raises(WireError, match="one row per node"):
        decode(StepResult(SESSION, 0, 0, (1,), TensorMeta("f32", 2, 1), ()))


def test_step_may_ask_for_the_rows_of_layers_of_some_of_its_nodes() -> None:
    asking = step(tap=b"\x02")
    assert decode(asking)[0] == asking
    nine = step(want=(5,), tensor=TensorMeta("f32", 2, 1), num_nodes=9, live=b"\x01\x01", tap=b"\xff\x01")
    assert decode(nine)[0] == nine


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"tap": b"\x04"}, "one bit per node"),
        ({"tap": b"\x01\x00"}, "one bit per node"),
        ({"tap": b"\x00"}, "of no node"),
        ({"tap": b"\x01", "want": (), "stop_stage": 1}, "replayed"),
        ({"tap": b"\x01", "want": (), "stop_stage": 1, "covers": 2}, "replayed"),
        ({"num_nodes": 9, "live": b"\x03\x00", "tap": b"\x01"}, "one bit per node"),
    ],
)
def test_step_that_asks_for_rows_of_layers_of_what_is_not_in_it_is_refused(
    changes: dict[str, object], what: str
) -> None:
    with pytest.raises(WireError, match=what):
        decode(step(**changes))


def test_rows_of_layers_are_asked_for_of_so_many_nodes_and_no_more() -> None:
    for num_nodes, fits in ((MAX_TAPPED_NODES, True), (MAX_TAPPED_NODES + 1, False)):
        bits = (2**num_nodes - 1).to_bytes(16, "little")
        asking = step(want=(), tensor=TensorMeta("f32", 128, 1), tap=bits)
        with contextlib.nullcontext() if fits else pytest.raises(WireError, match="too many"):
            assert decode(asking, bytes(512))[0] == asking
        taps = StepTaps(SESSION, 0, 0, 3, tuple(range(num_nodes)), TensorMeta("f32", num_nodes, 1))
        with contextlib.nullcontext() if fits else pytest.raises(WireError):
            assert decode(taps, bytes(4 * num_nodes))[0] == taps
    with pytest.raises(WireError, match="one row per node"):
        decode(StepTaps(SESSION, 0, 0, 3, (1,), TensorMeta("f32", 2, 1)))
    with pytest.raises(WireError):
        decode(StepTaps(SESSION, 0, 0, 3, (), TensorMeta("f32", 0, 1)), b"")
    for nodes in ((5, 5), (6, 5)):
        with pytest.raises(WireError, match="ascending order"):
            decode(StepTaps(SESSION, 0, 0, 3, nodes, TensorMeta("f32", 2, 1)))


@pytest.mark.parametrize("taps", [(3, 3), (4, 3), (0, 3), (4097,), tuple(range(1, MAX_TAPS + 2))])
def test_layers_whose_rows_are_asked_for_are_few_and_in_order(taps: tuple[int, ...]) -> None:
    with pytest.raises(WireError):
        decode(OpenSession(SESSION, 0, 0, b"plan", taps=taps), b"")


def test_payload_where_none_belongs_is_refused() -> None:
    with pytest.raises(WireError, match="none belongs"):
        decode(StatusRequest(1), b"x")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_counter_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(WireError, match="finite"):
        decode(StatusReply(1, b"", {"x": value}), b"")


@pytest.mark.parametrize(
    "message",
    [
        StatusRequest(2**32),
        StatusRequest(-1),
        SessionRefused(SESSION, 0, 128, "code", ""),
        SessionRefused(SESSION, 0, 0, "c" * 33, ""),
        SessionRefused(SESSION, 0, 0, "code", "r" * 513),
        SessionRefused(bytes(15), 0, 0, "code", ""),
        Cancel(SESSION, 0, 0),
        step(num_nodes=MAX_NODES_PER_STEP + 1, live=bytes(MAX_NODES_PER_STEP // 8 + 1)),
        step(timings=(StageTiming(1, 2, 2**32),)),
        OpenSession(SESSION, 0, 0, b"", b"p"),
        OpenSession(SESSION, 0, 0, b"", bytes(15), 16),
        OpenSession(SESSION, 0, 0, b"", bytes(17), 16),
        OpenSession(SESSION, 0, 0, b"", SESSION, 2**32),
        OpenSession(SESSION, 0, 0, b"", SESSION, -1),
        SessionOpened(SESSION, 0, 0, 1.0, 2**32),
        CloseSession(SESSION, 0, 1),  # type: ignore[arg-type]
        OpenSession(SESSION, 0, 0, b"", member=16),
        OpenSession(SESSION, 0, 0, b"", member=-1),
        OpenSession(SESSION, 0, 0, b"", mask_keys=bytes(32)),
        OpenSession(SESSION, 0, 0, b"", mask_keys=bytes(95)),
        OpenSession(SESSION, 0, 0, b"", mask_keys=bytes(16 * 32)),
        OpenSession(SESSION, 0, 0, b"", member=3, mask_keys=bytes(64)),
        StatusReply(1, bytes(16 * 1024 + 1), {}),
        StatusReply(1, b"", {str(n): 0.0 for n in range(129)}),
        StatusReply(1, b"", {"n" * 65: 0.0}),
    ],
)
def test_field_beyond_its_limit_is_refused(message: AnyMessage) -> None:
    with pytest.raises(WireError):
        decode(message, b"")


def test_step_of_the_largest_tree_is_accepted_and_one_more_node_refused() -> None:
    for num_nodes, fits in ((MAX_NODES_PER_STEP, True), (MAX_NODES_PER_STEP + 1, False)):
        first = 2**32 - num_nodes - 1
        largest = step(
            first_node=first,
            parents=tuple(range(first - 1, first + num_nodes - 1)),
            want=tuple(range(first, first + num_nodes)),
            tensor=TensorMeta("f16", num_nodes, 1),
        )
        if fits:
            assert decode(largest, bytes(2 * num_nodes))[0] == largest
        else:
            with pytest.raises(WireError):
                decode(largest, bytes(2 * num_nodes))


def test_unknown_tag_is_refused_and_further_fields_of_a_known_one_are_not() -> None:
    with pytest.raises(WireError):
        decode_message(encode_header(["hello", 1]))
    assert decode_message(encode_header(["status?", 1, "from a later version"]))[0] == StatusRequest(1)


def test_messages_without_the_fields_of_prefix_reuse_mean_none() -> None:
    for fields, meant in (
        (["open", SESSION, 0, 1, b"plan"], OpenSession(SESSION, 0, 1, b"plan", b"", 0)),
        (["opened", SESSION, 0, 1, 30.0], SessionOpened(SESSION, 0, 1, 30.0, 0)),
        (["open", SESSION, 0, 1, b"plan"], OpenSession(SESSION, 0, 1, b"plan", member=0)),
        (["close", SESSION, 0], CloseSession(SESSION, 0, retain=False)),
        (["opened", SESSION, 0, 1, 30.0, 0, b"", 0, 0, 0], SessionOpened(SESSION, 0, 1, 30.0, taps=())),
    ):
        assert decode_message(encode_header(fields))[0] == meant


def test_open_without_keys_of_masks_is_what_it_was_before_there_were_any_and_no_text_of_it_shows_keys() -> None:
    opening = OpenSession(SESSION, 3, 1, b"plan", taps=(2, 5), member=1, grant=b"grant")
    before = ["open", SESSION, 3, 1, b"plan", b"", 0, False, False, 0, (), 0, (2, 5), 1, b"grant"]
    assert encode_message(opening) == encode_header(before)
    masked = msgspec.structs.replace(opening, mask_keys=b"k" * 64)
    assert encode_message(masked) == encode_header([*before, b"k" * 64])
    assert "kkkk" not in repr(masked)


def partials(*entries: tuple[int, int, int], layer: int = 3, exchange: int = 1) -> Partials:
    return Partials(layer, exchange, tuple(PartialsEntry(*entry) for entry in entries))


def test_partials_have_rows_of_one_width_of_several_sessions() -> None:
    message = partials((7, 1, 2), (7, 3, 1), (8, 1, 1))
    assert message.num_rows == 4
    for width in (1, 5):
        assert decode(message, bytes(4 * 4 * width))[0] == message


@pytest.mark.parametrize(
    ("message", "num_bytes", "what"),
    [
        (partials((7, 1, 2)), 0, "rows of one width"),
        (partials((7, 1, 2)), 4, "rows of one width"),
        (partials((7, 1, 2)), 10, "rows of one width"),
        (partials((7, 1, 1), (7, 1, 1)), 8, "twice"),
        (partials(), 8, "valid"),
        (partials((7, 0, 1)), 8, "valid"),
        (partials((7, 2**32, 1)), 8, "valid"),
        (partials((2**32, 1, 1)), 8, "valid"),
        (partials((7, 1, 0)), 8, "valid"),
        (partials((7, 1, MAX_UNIT_ROWS + 1)), 4 * (MAX_UNIT_ROWS + 1), "valid"),
        (partials((7, 1, 1), layer=4097), 8, "valid"),
        (partials((7, 1, 1), exchange=5), 8, "valid"),
        (partials(*((7, node, 1) for node in range(1, MAX_PARTIALS + 2))), 4 * (MAX_PARTIALS + 1), "valid"),
    ],
)
def test_partials_that_cannot_be_are_refused(message: Partials, num_bytes: int, what: str) -> None:
    with pytest.raises(WireError, match=what):
        decode(message, bytes(num_bytes))


def test_sessions_of_each_plan_have_an_alias_of_their_own() -> None:
    assert len({alias_of(bytes([id_]) * 16, epoch) for id_ in range(10) for epoch in range(10)}) == 100
    assert all(0 <= alias_of(bytes([id_]) * 16, 1) < 2**32 for id_ in range(100))


@pytest.mark.parametrize(("num_members", "num_rows"), [(2, 1), (3, 1), (4, 1), (2, 16), (3, 16), (4, 16)])
def test_exchange_of_a_layer_of_the_built_in_model_costs_few_bytes_beside_the_values(
    num_members: int, num_rows: int
) -> None:
    dims = Dims(hidden=576, heads=9, kv_heads=3, head_dim=64, channels=1536)
    for to in split(dims, (1,) * num_members):
        num_sent = num_values = 0
        for kind in exchanges(dims):
            width = exchange_width(dims, to, kind)
            message = partials((alias_of(SESSION, 0), 70_000, num_rows), layer=200, exchange=kind)
            frame = len(encode_message(message)) + 4 * num_rows * width
            assert decode(message, bytes(4 * num_rows * width))[0] == message
            # The head of a chunk, the tag of a segment, and a masked WebSocket header.
            num_sent += frame + 5 + TAG_BYTES + (8 if frame + 21 < 2**16 else 14)
            num_values += 4 * num_rows * width
        assert num_sent <= 1.05 * num_values


@given(data=st.binary(max_size=400))
def test_random_bytes_decode_or_are_refused(data: bytes) -> None:
    for frame in (data, len(data).to_bytes(4, "little") + data):
        with contextlib.suppress(WireError):
            decode_message(frame)


@given(
    which=st.integers(0, len(MESSAGES) - 1),
    changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.integers(0, 8),
)
def test_mutated_frames_decode_or_are_refused(which: int, changes: list[tuple[int, int]], cut: int) -> None:
    message, payload = MESSAGES[which]
    frame = bytearray(encode_message(message) + payload)
    for place, value in changes:
        frame[place % len(frame)] = value
    try:
        decoded, _ = decode_message(frame[: len(frame) - cut])
    except WireError:
        return
    assert isinstance(decoded, get_args(AnyMessage))


@given(value=st.recursive(st.none() | st.integers(0, 2**32) | st.text(max_size=5) | st.binary(max_size=20), st.lists))
def test_other_msgpack_is_refused(value: object) -> None:
    body = msgspec.msgpack.encode(value)
    with contextlib.suppress(WireError):
        decode_message(len(body).to_bytes(4, "little") + body)


def resend(**changes: object) -> Resend:
    fields = {
        "session": SESSION,
        "epoch": 1,
        "sequence": 4,
        "covers": 3,
        "first_position": 10,
        "num_positions": 5,
        "want_last": False,
        "stop_stage": 2,
    }
    return Resend(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "payload", "reason"),
    [
        (step(want=(), covers=2), bytes(8), "several"),
        (step(want=(), covers=0), bytes(8), "several"),
        (step(want=(), covers=2, stop_stage=1, parents=(4, 5)), bytes(8), "several"),
        (step(stop_stage=1), bytes(8), "returns no rows"),
        (resend(stop_stage=None), b"", "several"),
        (resend(covers=0, stop_stage=None), b"", "several"),
        (resend(covers=1, want_last=True), b"", "returns no rows"),
        (resend(first_position=2**32 - 5), b"", "range"),
    ],
)
def test_replays_that_contradict_themselves_are_refused(message: AnyMessage, payload: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode(message, payload)


def test_replays_that_end_at_a_stage_may_stand_for_any_number_of_entries() -> None:
    for covers in (0, 1, 7):
        assert decode(step(want=(), covers=covers, stop_stage=1))[0] == step(want=(), covers=covers, stop_stage=1)
        assert decode(resend(covers=covers), b"")[0] == resend(covers=covers)
    single = resend(covers=1, want_last=True, stop_stage=None, first_position=2**32 - 6)
    assert decode(single, b"")[0] == single
