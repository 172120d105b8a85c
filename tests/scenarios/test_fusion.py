"""Answers over fusion groups, with real servers, links and engine: the tokens are those of a pipeline, whatever fails.

Every node here is what `fusion-node join` wires, without libp2p and sockets; the user is SwarmClient itself.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fusion_node.client.generation import GenerationStats
from fusion_node.client.sampling import SamplingParams
from fusion_node.client.swarm import SwarmClient
from fusion_node.daemon.admission_core import Admission
from fusion_node.daemon.server import NodeServer
from fusion_node.engine.boundary import Boundary
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.shard_engine import ShardEngine
from fusion_node.engine.slice_engine import SliceEngine
from fusion_node.engine.sliced_stage import SlicedStage
from fusion_node.engine.stage import Stage
from fusion_node.errors import ConfigError, FusionError, NoRoute
from fusion_node.slices import ModelSlice
from fusion_node.store import ModelStore, StoredModel
from fusion_node.types import LayerRange, PeerId, group_id, members_of
from p2p.compression import FEATURE
from p2p.discovery import DiscoveryConfig
from p2p.grants import sign_release
from p2p.identity import Identity
from p2p.links import LinkPool
from p2p.memory import MemoryNetwork
from p2p.memory_discovery import MemoryDiscovery
from p2p.messages import FUSION_FEATURE, MASKS_FEATURE
from p2p.records import PROTOCOL_VERSION, NodeRecord, ShardRecord, sign_lease, sign_record
from tests.engine.tiny import TinyModel, tiny_model
from tests.scenarios.swarm import CPU, Clock, MemorySwarm

NUM_LAYERS = 4
PROMPT = "In the beginning was the word, and the word was said again and again."
NUM_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, repetition_penalty=1.3)
"""With a penalty, because such a small model says one token for ever otherwise, which would show nothing."""

SEEDED = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.9, top_p=0.95, seed=7)
FP32 = numerics_class("fp32")


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model(
        "llama", num_hidden_layers=NUM_LAYERS, num_attention_heads=6, num_key_value_heads=3, max_position_embeddings=512
    )


@pytest.fixture(scope="module")
def home(model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the same weights, and a tokenizer that reads characters."""
    folder = tmp_path_factory.mktemp("source") / "tiny"
    folder.mkdir()
    save_file(model.stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.config))
    words = ["[PAD]", "[BOS]", "[EOS]", "[UNK]", *(chr(code) for code in range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    home = tmp_path_factory.mktemp("home")
    ModelStore(home).pull(str(folder))
    return home


@dataclass
class Member:
    """A node of whole layers, or of a slice of them."""

    host: str
    identity: Identity
    server: NodeServer
    admission: Admission
    pool: LinkPool
    discovery: MemoryDiscovery
    is_up: bool = True

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    async def kill(self) -> None:
        """It is gone, with its links and its record."""
        self.is_up = False
        await self.pool.aclose("killed")
        await self.discovery.aclose()


class Fusion:
    """Nodes that serve one stored model, and its users."""

    def __init__(self, swarm: MemorySwarm, home: Path) -> None:
        self.swarm = swarm
        self.home = home
        self.stored: StoredModel = ModelStore(home).find("tiny")
        self.nodes: list[Member] = []
        self._numbers = itertools.count(1000)

    async def node(self, layers: str, slice_: str = "", *, ms: float = 1.0) -> Member:
        """Joins.

        Args:
            ms: what it says that a layer takes it.
        """
        held, place = LayerRange.parse(layers), ModelSlice.parse(slice_) if slice_ else None
        engine: ShardEngine | SliceEngine
        if place is None:
            engine = ShardEngine(
                [Stage.load(self.swarm.model, held, numerics=FP32, device=CPU)], kv_budget_bytes=1 << 24
            )
        else:
            engine = SliceEngine(
                SlicedStage.load(self.swarm.model, held, place, numerics=FP32, device=CPU), kv_budget_bytes=1 << 24
            )
        host, identity, clock = f"host{next(self._numbers)}", Identity.generate(), Clock()
        admission = Admission(
            peer=identity.peer_id,
            model_id=self.stored.model_id,
            layers=held,
            numerics=FP32.name,
            blocks=engine.blocks,
            first_layers=engine.first_layers,
            slice=place,
        )

        def record() -> bytes:
            now = time.time()
            shard = ShardRecord(
                self.stored.model_id, "tiny", held.start, held.stop, self.stored.num_layers, FP32.name,
                (ms / 1e3, ms / 1e3, ms / 1e3), admission.free_positions, slice=slice_,
            )  # fmt: skip
            made = NodeRecord(
                PROTOCOL_VERSION, identity.peer_id, int(now * 1000), now, now + 60.0, (address,), (), "cpu", 1 << 30,
                (shard,), len(admission.sessions), "test",
            )  # fmt: skip
            return sign_record(made, identity)

        server = NodeServer(
            engine,
            admission,
            own_record=record,
            sign_lease=lambda lease: sign_lease(lease, identity),
            sign_release=lambda release: sign_release(release, identity),
            clock=clock,
        )
        features = (FEATURE,) if place is None else (FEATURE, FUSION_FEATURE, MASKS_FEATURE)
        pool = LinkPool(
            MemoryNetwork(self.swarm.world, identity, host),
            identity.peer_id,
            on_frame=server.on_frame,
            on_closed=server.on_closed,
            features=features,
            recorder=self.swarm.recorder(host, identity),
        )
        server.attach(pool)
        address = await pool.listen(f"{host}:0")
        config = DiscoveryConfig(("127.0.0.1:0",), (), True, True)
        discovery = MemoryDiscovery(identity, config, self.swarm.discoveries, clock=time.time)
        await discovery.start()
        await discovery.announce(record(), [self.stored.model_id])
        made = Member(host, identity, server, admission, pool, discovery)

        async def close() -> None:
            if made.is_up:
                await server.drain(timeout_s=5.0)
                await made.kill()

        self.swarm.at_end(close)
        self.nodes.append(made)
        return made

    async def group(self, layers: str, *slices: str, ms: float = 1.0) -> list[Member]:
        return [await self.node(layers, each, ms=ms) for each in slices]

    async def client(self, topology: str = "fusion", **options: object) -> SwarmClient:
        connection = await self.swarm.user()
        made = SwarmClient("tiny", home=self.home, connection=connection, topology=topology, threads=1, **options)  # type: ignore[arg-type]
        await made.__aenter__()
        self.swarm.at_end(made.aclose)
        return made


@pytest.fixture
async def fusion(swarm: MemorySwarm, home: Path) -> Fusion:
    return Fusion(swarm, home)


@pytest.fixture(scope="module")
def boundary(model: TinyModel) -> Boundary:
    return Boundary.load(model, numerics=FP32, device=CPU)


async def answer(
    client: SwarmClient,
    params: SamplingParams = GREEDY,
    *,
    prompt: str = PROMPT,
    on_piece: Callable[[int], None] = lambda count: None,
) -> GenerationStats:
    generation = client.generate(prompt, params, raw=True)
    async with asyncio.timeout(60.0):
        count = 0
        async for _ in generation:
            count += 1
            on_piece(count)
    return generation.stats


async def by_pipeline(fusion: Fusion, *params: SamplingParams) -> list[list[int]]:
    """The tokens that two nodes of whole layers lead to."""
    for layers in ("0:1", "1:4"):
        await fusion.node(layers)
    client = await fusion.client("pipeline")
    answers = [(await answer(client, each)).token_ids for each in params]
    assert all(len(set(tokens)) > NUM_TOKENS / 2 for tokens in answers)
    return answers


def peers(stats: GenerationStats) -> list[PeerId]:
    return [stage.peer for stage in stats.stages]


def ids(nodes: Sequence[Member]) -> PeerId:
    return group_id([node.peer for node in nodes])


@pytest.mark.parametrize("weights", [("0/3", "1/3", "2/3"), ("0/3:1:2", "1/3:1:2", "2/3:1:2"), ("0/2", "1/2")])
async def test_group_answers_as_a_pipeline_does_token_for_token(fusion: Fusion, weights: tuple[str, ...]) -> None:
    greedy, seeded = await by_pipeline(fusion, GREEDY, SEEDED)
    nodes = await fusion.group("0:4", *weights)
    client = await fusion.client()
    for params, expected in ((GREEDY, greedy), (SEEDED, seeded)):
        stats = await answer(client, params)
        assert stats.token_ids == expected
        assert peers(stats) == [ids(nodes)]
        assert not stats.repairs


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_speculation_over_a_group_changes_no_token(fusion: Fusion, params: SamplingParams) -> None:
    [expected] = await by_pipeline(fusion, params)
    await fusion.group("0:4", "0/3", "1/3", "2/3", ms=20.0)  # so far away that guesses pay on a busy machine too
    client = await fusion.client(speculation="tree")
    num_right = 0
    for _ in range(8):
        stats = await answer(client, params)
        assert stats.token_ids == expected
        assert stats.speculation is not None
        num_right += stats.speculation.acceptance > 0.0
        if num_right:
            break  # else the machine was so busy that no guess was in time
    assert num_right


async def test_hybrid_of_groups_of_two_and_three_answers_the_same(fusion: Fusion) -> None:
    greedy, seeded = await by_pipeline(fusion, GREEDY, SEEDED)
    first = await fusion.group("0:1", "0/2", "1/2")
    second = await fusion.group("1:4", "0/3", "1/3", "2/3")
    client = await fusion.client()
    for params, expected in ((GREEDY, greedy), (SEEDED, seeded)):
        stats = await answer(client, params)
        assert stats.token_ids == expected
        assert peers(stats) == [ids(first), ids(second)]


async def test_node_of_whole_layers_before_and_behind_a_group(fusion: Fusion) -> None:
    [expected] = await by_pipeline(fusion, GREEDY)
    for node in fusion.nodes:
        await node.kill()
    first, last = await fusion.node("0:1"), await fusion.node("3:4")
    middle = await fusion.group("1:3", "0/2:1", "1/2:1")
    for speculation in ("off", "tree"):
        stats = await answer(await fusion.client("hybrid", speculation=speculation))
        assert stats.token_ids == expected
        assert peers(stats) == [first.peer, ids(middle), last.peer]


@pytest.mark.parametrize(("lost", "speculation"), [(0, "off"), (2, "off"), (1, "tree")])
async def test_member_that_is_killed_is_replaced_by_a_spare_and_the_answer_is_the_same(
    fusion: Fusion, lost: int, speculation: str
) -> None:
    [expected] = await by_pipeline(fusion, GREEDY)
    nodes = await fusion.group("0:4", "0/3", "1/3", "2/3")
    spare = await fusion.node("0:4", f"{lost}/3", ms=5.0)
    client = await fusion.client(speculation=speculation)
    killing: list[asyncio.Task[None]] = []

    def kill(count: int) -> None:
        if count == 5:
            killing.append(asyncio.ensure_future(nodes[lost].kill()))

    stats = await answer(client, on_piece=kill)
    await asyncio.gather(*killing)
    assert stats.token_ids == expected
    replaced = [*nodes[:lost], spare, *nodes[lost + 1 :]]
    assert peers(stats) == [ids(replaced)]
    [repair] = stats.repairs
    assert repair.kind == "patched"
    assert repair.peer == nodes[lost].peer


async def test_member_of_the_second_group_is_replaced_by_replay_from_the_first(fusion: Fusion) -> None:
    [expected] = await by_pipeline(fusion, GREEDY)
    first = await fusion.group("0:1", "0/2", "1/2")
    second = await fusion.group("1:4", "0/3", "1/3", "2/3")
    spare = await fusion.node("1:4", "1/3", ms=5.0)
    client = await fusion.client()
    killing: list[asyncio.Task[None]] = []

    def kill(count: int) -> None:
        if count == 5:
            killing.append(asyncio.ensure_future(second[1].kill()))

    stats = await answer(client, on_piece=kill)
    await asyncio.gather(*killing)
    assert stats.token_ids == expected
    assert peers(stats) == [ids(first), ids([second[0], spare, second[2]])]
    assert [repair.kind for repair in stats.repairs] == ["patched"]


@pytest.mark.parametrize("speculation", ["off", "tree"])
async def test_member_of_the_first_group_is_replaced_and_the_second_goes_on(fusion: Fusion, speculation: str) -> None:
    [expected] = await by_pipeline(fusion, GREEDY)
    first = await fusion.group("0:1", "0/2", "1/2")
    second = await fusion.group("1:4", "0/3", "1/3", "2/3")
    spare = await fusion.node("0:1", "0/2", ms=5.0)
    client = await fusion.client(speculation=speculation)
    killing: list[asyncio.Task[None]] = []

    def kill(count: int) -> None:
        if count == 5:
            killing.append(asyncio.ensure_future(first[0].kill()))

    stats = await answer(client, on_piece=kill)
    await asyncio.gather(*killing)
    assert stats.token_ids == expected
    assert peers(stats) == [ids([spare, first[1]]), ids(second)]
    assert [repair.kind for repair in stats.repairs] == ["patched"]


async def test_member_that_freezes_is_found_out_and_replaced(fusion: Fusion) -> None:
    [expected] = await by_pipeline(fusion, GREEDY)
    nodes = await fusion.group("0:4", "0/3", "1/3", "2/3")
    spare = await fusion.node("0:4", "1/3", ms=5.0)
    client = await fusion.client()

    def freeze(count: int) -> None:
        if count == 5:
            for host in {channel.host for channel in fusion.swarm.world.channels}:
                fusion.swarm.world.black_hole(nodes[1].host, host)

    stats = await answer(client, on_piece=freeze)
    assert stats.token_ids == expected
    assert peers(stats) == [ids([nodes[0], spare, nodes[2]])]
    assert {repair.peer for repair in stats.repairs} == {nodes[1].peer}


async def test_member_that_leaves_hands_its_place_over_while_the_answer_goes_on(fusion: Fusion) -> None:
    [expected] = await by_pipeline(fusion, GREEDY)
    nodes = await fusion.group("0:4", "0/3", "1/3", "2/3")
    spare = await fusion.node("0:4", "2/3", ms=5.0)
    client = await fusion.client()
    leaving: list[asyncio.Task[None]] = []

    def leave(count: int) -> None:
        if count == 4:
            leaving.append(asyncio.ensure_future(nodes[2].server.drain(timeout_s=5.0, grace_s=30.0)))

    stats = await answer(client, on_piece=leave)
    await asyncio.gather(*leaving)
    assert stats.token_ids == expected
    assert peers(stats) == [ids([nodes[0], nodes[1], spare])]
    assert [(repair.cause, repair.peer) for repair in stats.repairs] == [("draining", nodes[2].peer)]


async def test_without_a_spare_the_error_names_the_member_and_the_slice(fusion: Fusion) -> None:
    nodes = await fusion.group("0:4", "0/3", "1/3", "2/3")
    client = await fusion.client()
    killing: list[asyncio.Task[None]] = []

    def kill(count: int) -> None:
        if count == 4:
            killing.append(asyncio.ensure_future(nodes[1].kill()))

    with pytest.raises(FusionError) as told:
        await answer(client, on_piece=kill)
    await asyncio.gather(*killing)
    assert isinstance(told.value, NoRoute)
    assert nodes[1].peer[-8:] in str(told.value)
    assert "slice 1/3 of layers 0:4 is held by nobody" in str(told.value)


async def test_next_question_of_a_conversation_begins_with_what_the_group_has_kept(fusion: Fusion) -> None:
    await fusion.group("0:4", "0/3", "1/3", "2/3")
    client = await fusion.client()
    first = await answer(client)
    longer = PROMPT + " So it was."
    again = await answer(client, prompt=longer)
    assert first.cached_tokens == 0
    assert again.cached_tokens >= len(PROMPT) // 16 * 16
    alone = await answer(await fusion.client(prefix_cache=False), prompt=longer)
    assert again.token_ids == alone.token_ids


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"wire": "int8"}, "rows go to the members of a group by columns"),
        ({"numerics": "bf16"}, "members of a group do not compute in bf16: take fp32 or f16r32"),
        ({"numerics": "fp16+kv8"}, r"members of a group do not compute in fp16\+kv8"),
        ({"members": 1}, "name 2 to 16"),
        ({"topology": "pipeline", "members": 2}, "add --topology fusion"),
    ],
)
def test_what_groups_cannot_do_is_refused_at_once(
    home: Path, tmp_path: Path, options: dict[str, Any], complaint: str
) -> None:
    log = tmp_path / "user.audit"
    with pytest.raises(ConfigError, match=complaint):
        SwarmClient("tiny", home=home, mdns=False, audit=log, **{"topology": "fusion", **options})
    assert not log.exists(), "nothing was begun"


async def test_plan_of_a_swarm_of_slices_shows_its_members(fusion: Fusion) -> None:
    nodes = await fusion.group("0:4", "0/3", "1/3", "2/3")
    view = await (await fusion.client()).plan()
    [stage] = view.stages
    assert [member.peer for member in stage.members] == [node.peer for node in nodes]
    assert [member.columns for member in stage.members] == [(0, 16), (16, 32), (32, 48)]
    assert members_of(PeerId(stage.peer)) == tuple(node.peer for node in nodes)
