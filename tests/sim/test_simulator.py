"""The parts of the simulator: what is modelled is modelled as it says."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import statistics
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fusion_node.cli.main import app
from fusion_node.errors import ConfigError
from fusion_node.simulator import arithmetic
from fusion_node.simulator.churn import Churn
from fusion_node.simulator.devices import DEVICES, MODELS
from fusion_node.simulator.heap import EventHeap
from fusion_node.simulator.leases import LeaseBook
from fusion_node.simulator.network import LINES, Nat, Network, Place, Way
from fusion_node.simulator.node import FINE_AFTER_S, Node
from fusion_node.simulator.planning import believed
from fusion_node.simulator.plots import check_available, write_plots
from fusion_node.simulator.report import percentiles, tokens_per_s
from fusion_node.simulator.settings import Settings, parse_partition
from fusion_node.simulator.world import FINE_BEFORE_S, NOTICE_S, PLACED_BY, World
from fusion_node.types import MonotonicS, PeerId
from p2p.records import PROTOCOL_VERSION, Lease

SMALL = Settings(nodes=12, users=1, hours=0.01, model="llama-8b", think_s=2.0, answer_tokens=5.0, membership="modelled")


# the heap


def test_events_of_one_time_happen_in_the_order_in_which_they_were_put_there() -> None:
    heap, happened = EventHeap(), []
    for name in "abc":
        heap.after(1.0, happened.append, name)
    heap.after(0.5, happened.append, "first")
    heap.at(-3.0, happened.append, "now")
    heap.run(2.0)
    assert happened == ["now", "first", "a", "b", "c"]
    assert heap.now == 2.0
    assert heap.num_events == 5


def test_digest_differs_by_when_what_and_about_what() -> None:
    def digest(delay_s: float, note: str) -> str:
        heap = EventHeap()
        heap.after(delay_s, heap.note, note)
        heap.run(5.0)
        return heap.digest()

    assert digest(1.0, "a") == digest(1.0, "a")
    assert len({digest(1.0, "a"), digest(1.5, "a"), digest(1.0, "b")}) == 3


# the network


def make_places(network: Network, count: int) -> list[Place]:
    chance = random.Random(5)
    return [network.place(chance) for _ in range(count)]


def test_paths_of_many_pairs_are_those_of_each_pair() -> None:
    network = Network(3, random.Random(1))
    places = make_places(network, 40)
    one_way_s, limit_Bps = network.paths_between(places[:20], places[20:])
    units = network.units_between(4, places[:20], places[20:])
    ways = set()
    for i, one in enumerate(places[:20]):
        for j, two in enumerate(places[20:]):
            path = network.path(one, two)
            ways.add(path.way)
            assert units[i, j] == network.unit(4, one, two) == network.unit(4, two, one)
            if path.way is not Way.NONE:
                assert one_way_s[i, j] == pytest.approx(path.one_way_s)
                assert limit_Bps[i, j] == (path.limit_Bps or math.inf)
    assert {Way.DIRECT, Way.PUNCHED, Way.RELAYED} <= ways


def test_relayed_pairs_are_slower_and_only_pairs_behind_nats_are_relayed() -> None:
    network = Network(3, random.Random(1))
    one, two = Place(1, 0, LINES[2], Nat.SYMMETRIC), Place(2, 2, LINES[2], Nat.CONE)
    relayed = network.path(one, two)
    one.nat = Nat.OPEN
    direct = network.path(one, two)
    assert direct.way is Way.DIRECT
    assert relayed.way in (Way.RELAYED, Way.NONE)
    if relayed.way is Way.RELAYED:
        assert relayed.one_way_s > direct.one_way_s


def test_large_messages_take_turns_on_an_uplink_and_small_ones_pass_by() -> None:
    network = Network(3, random.Random(1))
    sender, receiver = Place(1, 0, LINES[3], Nat.OPEN), Place(2, 0, LINES[0], Nat.OPEN)
    path = dataclasses.replace(network.path(sender, receiver), loss=0.0)
    first_s = network.delay(sender, receiver, path, 1.25e6, 0.0)
    second_s = network.delay(sender, receiver, path, 1.25e6, 0.0)
    small_s = network.delay(sender, receiver, path, 200.0, 0.0)
    assert first_s == pytest.approx(1.0 + path.one_way_s)
    assert second_s == pytest.approx(2.0 + path.one_way_s)
    assert small_s < 0.1


def test_losses_cost_retransmissions() -> None:
    network = Network(3, random.Random(1))
    sender, receiver = Place(1, 0, LINES[0], Nat.OPEN), Place(2, 0, LINES[0], Nat.OPEN)
    clean = dataclasses.replace(network.path(sender, receiver), loss=0.0)
    lossy = dataclasses.replace(clean, loss=0.2)
    delays = [network.delay(sender, receiver, lossy, 100.0, 0.0) for _ in range(500)]
    lost = sum(delay_s > 0.2 for delay_s in delays) / len(delays)
    assert 0.15 < lost < 0.25 + 0.05
    assert network.delay(sender, receiver, clean, 100.0, 0.0) < 0.2


# churn and devices


def test_lifetimes_have_the_mean_that_was_asked_for_and_most_are_much_shorter() -> None:
    churn, chance = Churn(7200.0), random.Random(2)
    lifetimes = [churn.lifetime_s(chance) for _ in range(40_000)]
    assert statistics.fmean(lifetimes) == pytest.approx(7200.0, rel=0.05)
    assert statistics.median(lifetimes) < 0.5 * 7200.0


def test_who_is_there_at_the_start_stays_for_longer_than_who_comes() -> None:
    """The mean residual life in equilibrium is E[X^2] / (2 E[X]): for a Weibull of this shape 2.3 mean lifetimes."""
    churn, chance = Churn(3600.0), random.Random(3)
    expected_s = churn.scale_s * math.gamma(1 + 2 / churn.shape) / (2 * math.gamma(1 + 1 / churn.shape))
    remaining = [churn.remaining_s(chance) for _ in range(40_000)]
    assert statistics.fmean(remaining) == pytest.approx(expected_s, rel=0.05)
    assert expected_s > 1.5 * 3600.0


def test_more_nodes_come_in_the_evening() -> None:
    churn, chance = Churn(3600.0, day_share=0.8), random.Random(4)
    hours = [0] * 24
    now = 0.0
    while now < 40 * 86400.0:
        now += churn.arrival_after_s(20, 0, 1.0, now, chance)
        hours[int(now / 3600.0) % 24] += 1
    # 20 h at UTC-5 is 1 h UTC.
    assert sum(hours[0:3]) > 3 * sum(hours[12:15])
    assert sum(hours) == pytest.approx(20 * 24 * 40, rel=0.1)


def test_nobody_comes_or_leaves_without_churn() -> None:
    churn, chance = Churn(math.inf), random.Random(1)
    assert churn.lifetime_s(chance) == churn.remaining_s(chance) == math.inf
    assert churn.arrival_after_s(10, 0, 0.5, 0.0, chance) == math.inf


@pytest.mark.parametrize("name", MODELS)
def test_more_rows_take_longer_and_no_device_holds_more_than_its_memory(name: str) -> None:
    shape = MODELS[name]
    for device in DEVICES:
        speed = device.speed(shape)
        assert 0 < speed.rows_1_s <= speed.rows_16_s <= speed.rows_256_s
        held = device.num_layers(shape)
        assert (
            held * shape.layer_bytes + device.kv_positions(shape, held) * shape.kv_bytes * held <= device.memory_bytes
        )
    assert sum(device.share for device in DEVICES) == pytest.approx(1.0)


# the model of the simulator


def answer(stages: list[tuple[int, int]], tokens: list[int], *, spoil: str = "") -> bytes:
    """The last row of a prompt through stages; one of whose rows may be treated in a wrong way on the second stage."""
    weights = arithmetic.Weights(8)
    rows = arithmetic.embed(tokens)
    for number, (start, stop) in enumerate(stages):
        chain = arithmetic.Chain()
        parts = [rows[at : at + arithmetic.ROW_BYTES] for at in range(0, len(rows), arithmetic.ROW_BYTES)]
        if number == 1:
            match spoil:
                case "lost":
                    del parts[1]
                case "repeated":
                    parts.insert(1, parts[1])
                case "swapped":
                    parts[0], parts[1] = parts[1], parts[0]
        rows = chain.forward(b"".join(parts), weights.of(start, stop))
    return rows[-arithmetic.ROW_BYTES :]


def test_result_is_the_same_however_the_layers_are_cut() -> None:
    whole = answer([(0, 8)], [5, 6, 7, 8])
    assert whole == answer([(0, 3), (3, 8)], [5, 6, 7, 8]) == answer([(0, 1), (1, 2), (2, 8)], [5, 6, 7, 8])
    assert whole != answer([(0, 7)], [5, 6, 7, 8])


@pytest.mark.parametrize("spoil", ["lost", "repeated", "swapped"])
def test_row_that_is_treated_wrongly_on_one_stage_changes_the_result(spoil: str) -> None:
    stages = [(0, 3), (3, 8)]
    assert answer(stages, [5, 6, 7, 8], spoil=spoil) != answer(stages, [5, 6, 7, 8])


def test_undisturbed_tokens_follow_from_prompt_seed_and_position() -> None:
    weights = arithmetic.Weights(8)

    def tokens(prompt: list[int], seed: int) -> list[int]:
        expected = arithmetic.Undisturbed(weights, prompt, seed=seed)
        return [expected.next_token() for _ in range(5)]

    assert tokens([1, 2, 3], 7) == arithmetic.Undisturbed(weights, [1, 2, 3], seed=7).next_tokens(5)
    assert len({tuple(tokens(p, s)) for p, s in (([1, 2, 3], 7), ([1, 2, 3], 8), ([3, 2, 1], 7))}) == 3
    first = arithmetic.token_of(answer([(0, 3), (3, 8)], [1, 2, 3]), seed=7, position=3)
    assert first == tokens([1, 2, 3], 7)[0]


def test_garbage_is_seen_in_any_row() -> None:
    rows = arithmetic.embed([1, 2])
    assert not arithmetic.is_garbage(rows)
    assert arithmetic.is_garbage(rows + arithmetic.garbage(1))
    assert arithmetic.is_garbage(memoryview(arithmetic.garbage(2) + rows))
    # Bytes of two rows that look like a row of garbage between them are none.
    across = b"\0" * 8 + arithmetic.garbage(1) + b"\0" * 8
    assert not arithmetic.is_garbage(across)
    assert arithmetic.is_garbage(across + arithmetic.garbage(1))


# leases and placement


def lease(session: int, positions: int, user: str = "u") -> Lease:
    return Lease(PROTOCOL_VERSION, "n", user, bytes([session]) * 16, 0, 0, 4, positions, 0.0, 60.0)


def test_book_sees_what_is_promised_twice_and_what_ends_early() -> None:
    book, now = LeaseBook(64, block_slots=16), MonotonicS(0.0)
    book.promised(lease(1, 40), MonotonicS(60.0), now=now)
    book.promised(lease(1, 40), MonotonicS(70.0), now=now)
    assert book.overlaps == 0
    book.promised(lease(2, 20), MonotonicS(60.0), now=now)
    assert book.overlaps == 1  # 48 and 32 of 64, in whole blocks
    book.closed(bytes([2]) * 16, PeerId("somebody else"))
    book.forgotten(bytes([2]) * 16, now=now)
    assert book.broken == 1
    book.closed(bytes([1]) * 16, PeerId("u"))
    book.forgotten(bytes([1]) * 16, now=now)
    book.promised(lease(3, 40), MonotonicS(60.0), now=now)
    book.user_gone(PeerId("u"))
    book.forgotten(bytes([3]) * 16, now=now)
    assert (book.overlaps, book.broken) == (1, 1)


@pytest.mark.parametrize("every", [1, 4])
def test_newcomers_take_what_is_missing_and_reckon_with_one_another(every: int) -> None:
    world = World(dataclasses.replace(SMALL, nodes=24, users=0, mean_lifetime_s=math.inf, stage_layers=every))
    for node in list(world.live):
        if node.layers.start < 16:
            world.kill(node)
    held = {layer for node in world.live for layer in range(node.layers.start, node.layers.stop)}
    missing = set(range(16)) - held
    assert len(missing) > 8
    joined = [world.join() for _ in range(4)]
    world.heap.run(10.0)
    assert not any(node.is_serving for node in joined)
    world.heap.run(60.0)
    assert all(node.is_serving for node in joined)
    taken = [set(range(node.layers.start, node.layers.stop)) for node in joined]
    assert missing & taken[0]
    # Not all the same, although all looked before any of them had said what it would take.
    assert len({frozenset(each) for each in taken}) > 1
    assert all(node.layers.start % every == 0 for node in joined)


def test_newcomer_looks_at_the_same_nodes_again_and_at_who_came_since() -> None:
    world = World(dataclasses.replace(SMALL, nodes=60, users=0, mean_lifetime_s=math.inf))
    newcomer = world.join()
    known: list[Node] = []
    before = {host.peer for host in world.seen_by(newcomer, known)}
    assert len(before) == PLACED_BY
    assert {host.peer for host in world.seen_by(newcomer, known)} == before
    gone = known[5]
    world.kill(gone)
    other = world.join()
    after = {host.peer for host in world.seen_by(newcomer, known)}
    assert after > {*before, other.peer} - {gone.peer}
    assert len(after) == PLACED_BY + 1
    assert gone.peer not in after


@pytest.mark.parametrize("is_honest", [True, False])
def test_users_believe_what_steps_took_and_not_what_a_node_claims(is_honest: bool) -> None:
    world = World(dataclasses.replace(SMALL, liars_share=1.0 - is_honest, mean_lifetime_s=math.inf, answer_tokens=30.0))
    world.run()
    (user,) = world.users.values()
    served = [world.nodes[each.peer] for each in user.claims.measurements(world.heap.now)]
    assert served
    for node in served:
        speed = believed(node, user.claims, world.heap.now).speed
        if is_honest:
            assert speed.rows_1_s < 2 * node.claimed_speed.rows_1_s
        else:
            assert speed.rows_1_s > 2 * node.claimed_speed.rows_1_s


def rows_through(rows: bytes, chunks: list[int]) -> bytes:
    chain, out, at = arithmetic.Chain(), b"", 0
    for count in chunks:
        size = count * arithmetic.ROW_BYTES
        out += chain.forward(rows[at : at + size], arithmetic.Weights(8).of(2, 7))
        at += size
    assert len(chain) == sum(chunks)
    return out


def test_rows_are_the_same_in_large_and_in_small_chunks() -> None:
    tokens = [random.Random(3).randrange(arithmetic.VOCABULARY) for _ in range(100)]
    rows = b"".join(arithmetic.embed([token]) for token in tokens)
    assert arithmetic.embed(tokens) == rows
    assert rows_through(rows, [100]) == rows_through(rows, [1] * 100) == rows_through(rows, [30, 7, 63])
    assert not arithmetic.is_garbage(rows)
    assert arithmetic.is_garbage(rows + arithmetic.garbage(1) + rows)


# large steps


def disturbed(tokens_per_event: int) -> World:
    world = World(
        Settings(
            nodes=30,
            users=4,
            hours=0.02,
            model="llama-8b",
            seed=2,
            mean_lifetime_s=900.0,
            hangs_per_hour=12.0,
            resets_per_hour=12.0,
            garbage_share=0.0,
            liars_share=0.0,
            think_s=2.0,
            answer_tokens=300.0,
            membership="modelled",
            tokens_per_event=tokens_per_event,
        )
    )
    world.run()
    return world


def test_large_steps_between_faults_take_as_long_and_have_the_same_repairs() -> None:
    """Answers are as fast, and stalls of the same order; events are some times fewer."""
    fine, coarse = disturbed(1), disturbed(64)
    for world in (fine, coarse):
        assert world.metrics.wrong_tokens == world.metrics.lease_overlaps == world.metrics.broken_leases == 0
        assert len(world.metrics.stalls) >= 3
    rates = [statistics.median(tokens_per_s(world.metrics)) for world in (fine, coarse)]
    assert rates[1] == pytest.approx(rates[0], rel=0.2)
    stalls = [statistics.median(stall.seconds for stall in world.metrics.stalls) for world in (fine, coarse)]
    assert stalls[0] / 3 < stalls[1] < 3 * stalls[0]
    assert coarse.heap.num_events < fine.heap.num_events / 2


def test_steps_are_small_around_what_befalls_a_node() -> None:
    world = World(dataclasses.replace(SMALL, users=0, mean_lifetime_s=math.inf, garbage_share=0.0))
    node, other = world.live[:2]
    peers = [node.peer, other.peer]
    assert world.quiet_s(peers) == NOTICE_S - FINE_BEFORE_S
    node.due.append(20.0)
    assert world.quiet_s(peers) == 20.0 - FINE_BEFORE_S
    assert world.quiet_s([other.peer]) == NOTICE_S - FINE_BEFORE_S
    world.heap.run(19.5)
    assert world.quiet_s(peers) == 0.0
    world.heap.run(30.0)
    world.freeze(node, 5.0)
    assert world.quiet_s(peers) == 0.0
    world.heap.run(35.0 + FINE_AFTER_S - 0.5)
    assert world.quiet_s(peers) == 0.0
    world.heap.run(36.0 + FINE_AFTER_S)
    assert world.quiet_s(peers) > 0.0


# settings, reports, the command


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"model": "gpt-9"}, "unknown model"),
        ({"nodes": 0}, "nodes"),
        ({"users": -1}, "users"),
        ({"hours": math.nan}, "hours"),
        ({"mean_lifetime_s": 5.0}, "--churn"),
        ({"liars_share": 1.5}, "liars share"),
        ({"power_share": 0.7, "drain_share": 0.7}, "above 1 together"),
        ({"hangs_per_hour": -1.0}, "hangs per hour"),
        ({"tokens_per_event": 0}, "tokens per event"),
        ({"candidates": 0}, "candidates"),
        ({"stage_layers": 99}, "layers"),
        ({"partitions": (parse_partition("20:10:0.5"),)}, "START must be below STOP"),
        ({"partitions": (parse_partition("10:20:1.5"),)}, "between 0 and 1"),
    ],
)
def test_settings_that_make_no_world_are_refused_with_what_is_wrong(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        World(dataclasses.replace(SMALL, **wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "1:2", "a:b:c", "1:2:3:4"])
def test_partition_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="START:STOP:SHARE"):
        parse_partition(text)


def test_percentiles_are_those_of_the_nearest_rank() -> None:
    assert percentiles([]) == {}
    assert percentiles([3.0])["p99"] == 3.0
    assert percentiles([float(n) for n in range(100)])["p50"] == 50.0


def test_command_prints_tables_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    few = ["--nodes", "12", "--users", "2", "--hours", "0.02", "--model", "llama-8b", "--membership", "modelled"]
    result = CliRunner().invoke(app, ["simulate", *few, "--think", "2", "--seed", "5", "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "tokens/s of an answer" in result.output
    report = json.loads(path.read_text())
    assert report["name"] == "simulate"
    assert all(check["ok"] for check in report["checks"])
    assert report["data"]["requests"]["answered"] > 0
    assert report["data"]["trace_digest"] in result.output
    ejections = report["data"]["ejections"]
    assert ejections["wrong"] <= ejections["live"] <= sum(ejections["by_standing"].values())
    assert "live nodes replaced" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--churn", "often"], "hours that a node stays"),
        (["--churn", "-1"], "hours that a node stays"),
        (["--partition", "soon"], "START:STOP:SHARE"),
        (["--model", "gpt-9"], "unknown model"),
        (["--json", "/no/such/folder/x.json"], "there is no folder"),
    ],
)
def test_command_refuses_bad_values_before_it_simulates(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["simulate", "--hours", "0.001", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)


def test_plots_without_matplotlib_are_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"fusion-node\[bench\]"):
        check_available()


def test_plots_are_drawn_of_any_world_even_an_empty_one(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    world = World(dataclasses.replace(SMALL, users=0, partitions=(parse_partition("5:10:0.5"),)))
    world.run()
    paths = write_plots(world, tmp_path / "plots")
    assert [path.name for path in paths] == ["tokens-per-second.png", "stalls.png", "swarm.png"]
    assert all(path.stat().st_size > 5_000 for path in paths)
