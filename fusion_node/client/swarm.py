"""SwarmClient: a model that a swarm serves, used as if it were here.

The tokenizer, the embedding, the final norm, the LM head and the sampling run in this process; nodes see rows of hidden
state and nothing else. Shapes: T tokens, D hidden size, V vocabulary.

Above 600 lines: the client, with all that it may be told, and an answer on its way are read together.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import structlog

from fusion_node.client.answer import AnswerShell, EncodedRows
from fusion_node.client.answer_core import AnswerCore, MakePlan
from fusion_node.client.answer_routes import Answer, AnswerRoutes, Work
from fusion_node.client.claims_file import path_of
from fusion_node.client.connection import MeasuredNode, SwarmConnection, ways_in
from fusion_node.client.drafting import GumbelNoise, check_same_tokens
from fusion_node.client.generation import Generation, GenerationStats, RepairReport, StageReport
from fusion_node.client.grants_core import GrantBook, GrantReport
from fusion_node.client.groups_core import Groups
from fusion_node.client.ownership_file import OwnershipFile
from fusion_node.client.plan_view import PlanView, view_of
from fusion_node.client.prefix_cache_core import MIN_POSITIONS, PrefixCache
from fusion_node.client.routing import Router
from fusion_node.client.row_chooser import RowChooser, decode_tap, exact_rows
from fusion_node.client.sampling import SamplingParams, choose_token
from fusion_node.client.speculation import TREE_POSITIONS, Drafts, MakeDrafter, SpeculationReport, modes_of
from fusion_node.client.speculation_core import SpeculationCore
from fusion_node.client.speculative_answer import SpeculativeShell
from fusion_node.client.text_stream import TextStream
from fusion_node.client.tokenizer import ChatMessage, Tokenizer
from fusion_node.client.user_rules import UserRules, check_masked_sums, check_members, objective_of, topology_of
from fusion_node.engine.architectures import first_layers, load_config, max_positions
from fusion_node.engine.boundary import Boundary
from fusion_node.engine.device import choose_device, prepare_thread, set_threads
from fusion_node.engine.draft_head import DraftHead
from fusion_node.engine.draft_head_files import CONFIG_FILE
from fusion_node.engine.draft_model import DraftModel
from fusion_node.engine.numerics import NumericsClass, numerics_class
from fusion_node.engine.shipped_heads import shipped_head
from fusion_node.engine.sliced_layer import fusion_dims
from fusion_node.engine.tensor_codec import RowsNotFinite, decode_rows, encode_rows
from fusion_node.errors import ConfigError, ContextTooLong, NoPeers, UnknownModel
from fusion_node.grants import GRANT_ID_BYTES
from fusion_node.mask_keys import SECRET_BYTES
from fusion_node.store import ModelStore, StoredModel
from fusion_node.types import LayerRange, MonotonicS, PeerId, UnixS, members_of
from fusion_node.wire import WireError, printable
from p2p.bans import FILE_NAME as BAN_FILE_NAME
from p2p.grants import open_release, sign_grant
from p2p.identity import Identity, public_key_of, short
from p2p.link_emulation_core import LineShape
from p2p.messages import (
    INT8,
    MAX_TAPS,
    SESSION_BYTES,
    CloseSession,
    OpenSession,
    SessionReleased,
    TensorMeta,
    row_bytes,
)
from p2p.records import PROTOCOL_VERSION, Lease, Plan, PlanStage, Refusal, open_lease, sign_plan
from p2p.swarm_key import SwarmKey
from p2p.tensor_wire import decompress
from scheduler.ownership import Ownership
from scheduler.plans import Topology
from scheduler.speculation import ModePolicy

PLAN_TTL_S = 3600.0

RELEASED_S = 1.0
"""For members of groups to say that they have deleted what they held, when nothing else is waited for any more."""

OWNERSHIP_EVERY_S = 1.0
"""Between two looks at the ownership file while an answer is under way."""

SAVE_EVERY_S = 60.0
"""Between two answers after which what was measured of nodes is written: what a killed process has learned is lost."""

NO_DRAFT = "none"
"""As a draft model: not even the head that comes with the program."""

T = TypeVar("T")

log = structlog.get_logger(__name__)

__all__ = ["Generation", "GenerationStats", "RepairReport", "StageReport", "SwarmClient"]


class SwarmClient:
    """A user of one model in a swarm.

    Example::

        async with SwarmClient("smollm2-135m", peers=["/ip4/…"]) as swarm:
            async for piece in swarm.generate("What is a peer-to-peer network?"):
                print(piece, end="", flush=True)

    Args:
        model: name or id of a model in the local store; only its tokenizer, embedding, norm and head are used.
        peers: multiaddrs or invites to enter the swarm by.
        home: folder of the store; None is the default place.
        numerics: class that nodes must serve, and that the boundary computes in.
        wire: ``int8`` sends rows between machines with eight bits per value, which loses a little of them at every hop
            (docs/numerics.md says how much); None sends what the numerics class computes, to the bit.
        device: for the boundary.
        threads: torch threads of this process; None leaves torch's choice.
        mdns: whether to look for nodes on the local network and on this machine.
        swarm_key: of a private swarm, or its file; an invite among ``peers`` may hold it instead.
        identity: who to be, where nodes have an allow-list; None makes one that nobody can link with an earlier one.
        prefix_cache: ask the nodes to keep the KV of an answer for some minutes, and begin an answer whose prompt
            begins like an earlier one with what they kept. Other users do not get at it.
        background: nobody waits for the answers: nodes compute them with what others leave.
        objective: of routes: ``latency`` (seconds per token), ``throughput`` (of many sessions at a time), or
            ``first-token`` (seconds until it).
        rules: who may serve, and what a route may look like; None: anybody, anyhow.
        ownership: who may hold which part of the model's states: rules, or the file that has them (docs/fusion.md),
            which is read again when it changes. They replace those of ``rules``.
        topology: what serves a part of the model: ``pipeline``, one node each; ``fusion``, groups of nodes of which
            none is ever sent a whole hidden state; ``hybrid``, what is faster.
        members: of each group, exactly; None: any number from 2 on.
        masked_sums: members of groups, of which there must be 3 or more in each, learn of what the others contribute
            their sum alone (docs/fusion.md). Needs ``topology="fusion"``.
        puzzle_bits: what the identities of nodes must have paid; None is 0 on one machine and among members of a
            private swarm, and otherwise what nodes pay unless told otherwise.
        speculation: ``auto`` guesses ahead where that is faster, ``tree`` and ``chain`` only in that way, ``off``
            never. It does not change what an answer says.
        draft_model: name or id of a small model in the local store with the same tokenizer, that guesses as well; or
            the folder of a draft head that was made for the model (docs/drafting.md). None: the head that comes with
            the program, if there is one for the model; ``"none"``: not that one either.
        drafters: what guesses, in the place of what needs no model.
        tap_layers: whose rows ``drafters`` read beside those that the last stage returns: n is the row after n layers.
        emulated_line: how slow a line to pretend on this side (p2p.link_emulation); nodes do so on theirs if told
            (``join --emulate-rtt``). None: none.
        audit: file to record in what is sent to nodes and comes from them, for `fusion-node audit` (docs/audit.md).
        connection: an existing connection; it is used and not closed.

    Raises:
        UnknownModel, ConfigError: at once; everything else when used.
    """

    def __init__(
        self,
        model: str,
        *,
        peers: Sequence[str] = (),
        home: Path | None = None,
        numerics: str = "fp32",
        wire: str | None = None,
        device: str = "cpu",
        threads: int | None = None,
        mdns: bool = True,
        prefix_cache: bool = True,
        background: bool = False,
        swarm_key: SwarmKey | Path | None = None,
        identity: Identity | None = None,
        objective: str = "latency",
        rules: UserRules | None = None,
        ownership: Ownership | Path | None = None,
        topology: str = "pipeline",
        members: int | None = None,
        masked_sums: bool = False,
        puzzle_bits: int | None = None,
        speculation: str = "off",
        draft_model: str | None = None,
        drafters: Sequence[MakeDrafter] | None = None,
        tap_layers: Sequence[int] = (),
        emulated_line: LineShape | None = None,
        audit: Path | None = None,
        connection: SwarmConnection | None = None,
    ) -> None:
        if audit is not None and connection is not None:
            raise ConfigError("a connection that exists already cannot be recorded from its beginning")
        self._modes = modes_of(speculation)
        if draft_model is not None and draft_model != NO_DRAFT and self._modes is None:
            raise ConfigError("a draft model is of no use without speculation: leave one of the two out")
        self._priority = 1 if background else 0
        self.model = ModelStore(home).find(model)
        self._draft_source: StoredModel | Path | None = None
        if draft_model is None:
            if self._modes is not None and drafters is None:
                self._draft_source = shipped_head(self.model.model_id)
        elif draft_model != NO_DRAFT:
            self._draft_source = _draft_source(ModelStore(home), draft_model)
        self._numerics = numerics_class(numerics)
        self._wire = _wire_encoding(wire)
        self._wire_dtype = self._wire or self._numerics.wire_dtype
        self._ownership_file = OwnershipFile(ownership) if isinstance(ownership, Path) else None
        owned = ownership if self._ownership_file is None else self._ownership_file.rules
        rules = rules or UserRules()
        if isinstance(owned, Ownership):
            rules = replace(rules, ownership=owned)
        elif owned is not None:
            what = type(owned).__name__
            raise ConfigError(f"ownership is a {what}: give the file as a pathlib.Path, or rules as an Ownership")
        config = load_config(self.model)
        self.topology = topology_of(topology)
        check_members(members, self.topology)
        check_masked_sums(masked_sums, self.topology, members)
        self._masks = masked_sums
        self._dims = None
        if self.topology is not Topology.PIPELINE:
            _check_can_fuse(self._numerics, self._wire)
            self._dims = fusion_dims(config)
        self.num_layers: int = config.num_hidden_layers
        if len(set(tap_layers)) > MAX_TAPS or not all(0 < layer <= self.num_layers for layer in tap_layers):
            raise ConfigError(f"tap_layers: name at most {MAX_TAPS} of the layers from 1 to {self.num_layers}")
        self._device = choose_device(device)
        self._threads = threads
        self._owns_connection = connection is None
        key = SwarmKey.load(swarm_key) if isinstance(swarm_key, Path) else swarm_key
        self.connection = connection or SwarmConnection(
            ways_in(peers, mdns=mdns, home=ModelStore(home).home, swarm_key=key),
            identity=identity,
            mdns=mdns,
            home=ModelStore(home).home,
            swarm_key=key,
            bans=ModelStore(home).home / BAN_FILE_NAME,
            puzzle_bits=puzzle_bits,
            emulated_line=emulated_line,
            audit=audit,
        )
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="boundary", initializer=prepare_thread)
        self._loading: asyncio.Future[tuple[Boundary, Tokenizer]] | None = None
        self._prefixes: PrefixCache[Answer] | None = PrefixCache() if prefix_cache else None
        self._first_layers = first_layers(config)
        self._hidden_size: int = config.hidden_size
        self._vocabulary: int = config.vocab_size
        self._exact_rows = 1
        """Whose logits may be computed together where answers are speculated on; known once the boundary is loaded."""
        self._policies: list[ModePolicy] = []
        """Of answers that are over, where others may learn of them: what each mode brings is known from the beginning
        then."""
        self._drafts = None
        if self._modes is not None:
            self._drafts = Drafts(config.vocab_size, drafters, tap_layers=tap_layers, remembers=prefix_cache)
        self.grants = GrantBook(
            self.connection.identity.peer_id,
            sign=lambda grant: sign_grant(grant, self.connection.identity),
            open_release=lambda envelope, now: open_release(envelope, now=now),
            new_id=partial(secrets.token_bytes, GRANT_ID_BYTES),
        )
        self.connection.on_released.append(self._released)
        self._has_released = asyncio.Event()
        """Set, and replaced by another, when a release has come."""
        self._shells: set[AnswerShell] = set()
        """Of answers under way."""
        self._reading_ownership = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        """The ownership file, while answers are under way."""
        self.max_context = max_positions(config)
        self._eos_ids = _eos_ids(self.model)
        self._router = Router(
            self.connection,
            self.model,
            numerics=self._numerics.name,
            num_layers=self.num_layers,
            first_layers=self._first_layers,
            row_bytes=row_bytes(self._wire_dtype, self._hidden_size) or 0,
            objective=objective_of(objective),
            rules=rules,
            topology=self.topology,
            num_members=members,
            masks=masked_sums,
            dims=self._dims,
            claims_path=path_of(ModelStore(home).home, self.model.model_id, self._numerics.name),
        )

    async def __aenter__(self) -> Self:
        self._loading = asyncio.get_running_loop().run_in_executor(self._compute, self._load)
        try:
            if self._owns_connection:
                await self.connection.start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Leaves the swarm. Answers that are still running end with an error."""
        self._router.save()
        if self._prefixes is not None:
            self._tell_unneeded(entry for entry in self._prefixes.entries if entry.ended_at is not None)
        await self.wait_released()
        if self._released in self.connection.on_released:
            self.connection.on_released.remove(self._released)
        if self._owns_connection:
            await self.connection.aclose()
        if self._loading is not None:
            await asyncio.wait((self._loading,))
        self._compute.shutdown(wait=False)
        if self._drafts is not None:
            self._drafts.close()

    async def wait_loaded(self) -> None:
        """Returns when the boundary and the tokenizer are in memory; answers wait for that by themselves.

        Raises:
            StoreCorrupted: they cannot be read.
        """
        await self._loaded()

    def generate(self, prompt: str, params: SamplingParams | None = None, *, raw: bool = False) -> Generation:
        """Answers a prompt, as one message of a chat when the model has a chat template.

        Args:
            raw: the prompt is text to be continued, and no template is applied.

        Returns:
            An async iterable of text. Errors come out of the iteration: NoPeers, NoRoute, ContextTooLong, PeerError.
        """
        return self._generation(prompt if raw else [{"role": "user", "content": prompt}], params, plain_fallback=True)

    def chat(self, messages: Sequence[ChatMessage], params: SamplingParams | None = None) -> Generation:
        """Answers a conversation; see generate."""
        return self._generation(messages, params, plain_fallback=False)

    async def encode(self, prompt: str, *, raw: bool = False) -> list[int]:
        """The token ids that generate would start from."""
        _, tokenizer = await self._loaded()
        return self._encode(tokenizer, prompt if raw else [{"role": "user", "content": prompt}], plain_fallback=True)

    async def find_route(self, num_positions: int) -> tuple[tuple[MeasuredNode, LayerRange], ...]:
        """The nodes that would serve a session now.

        Raises:
            NoPeers, NoRoute: see there.
        """
        await self._read_ownership()
        return (await self._router.route(num_positions)).stages

    async def plan(self, *, prompt_tokens: int = 64, max_tokens: int = 256) -> PlanView:
        """Who would serve an answer of that length now, why, how long each part takes, and why the others would not.

        Nothing is opened or computed at nodes. Where there is no route, the view says why.

        Raises:
            ConfigError: the ownership file has become wrong.
            ContextTooLong: the prompt alone is as long as the model's context.
            NoPeers: nobody of the swarm can be reached.
        """
        await self._loaded()
        await self._read_ownership()
        max_tokens = self._room(prompt_tokens, max_tokens)
        return view_of(
            await self._router.explain(prompt_tokens + max_tokens, num_prompt=prompt_tokens),
            model=self.model,
            numerics=self._numerics.name,
            num_layers=self.num_layers,
            objective=self._router.objective,
            rules=self._router.rules,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            topology=self.topology,
            dims=self._dims,
            masks=self._masks,
        )

    @property
    def revoked(self) -> frozenset[PeerId]:
        """Whom ``revoke`` was called for, and not ``allow_again`` since."""
        return self._router.rules.revoked

    def revoke(self, peer: PeerId) -> None:
        """Withdraws all that a node may hold of this client's answers, at once; to be called on the event loop.

        What it has of those that are over and of those that are under way it is told to drop; those that are under way
        go on with others in its place, and say the same. No route has it any more until ``allow_again``. Where nobody
        can take its place, an answer ends with NoRoute or PeerRevoked, which names what is missing. Once more has no
        effect. A node that nobody knows is left out of routes too.

        Raises:
            ConfigError: it is no peer id.
        """
        try:
            public_key_of(peer)
        except ValueError as error:
            raise ConfigError(f"{printable(peer, limit=80)!r} is not a peer id") from error
        if self._router.is_revoked(peer):
            return
        log.info("revoked", peer=short(peer))
        self._router.revoke(peer)
        for order in self.grants.revoke(peer):
            if self.connection.links.is_connected(peer):
                self.connection.links.send(peer, order)
        if self._prefixes is not None:
            self._forget(
                [
                    entry
                    for entry in self._prefixes.entries
                    if any(peer in members_of(place) for place, _ in entry.stages)
                ]
            )
        for shell in tuple(self._shells):
            shell.revoke(peer)

    def allow_again(self, peer: PeerId) -> None:
        """Routes may have a node that was revoked. What it had is gone all the same."""
        self._router.allow_again(peer)

    async def wait_released(self, timeout_s: float = RELEASED_S) -> None:
        """Returns when all members of groups have said that they have deleted what they were told to, or after so long.

        Who is not connected any more is not waited for, nor what is kept for the next question. ``stats.grants`` of the
        answers, and ``grants``, have what they said.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(map(self.connection.links.is_connected, self.grants.awaited())):
                    await self._has_released.wait()

    # inside

    def _released(self, peer: PeerId, message: SessionReleased) -> None:
        report = self.grants.receive(peer, message, now=UnixS(time.time()))
        if report is None:
            log.debug("a release that does not count", peer=short(peer), session=message.session.hex()[:8])
            return
        self._has_released.set()
        self._has_released = asyncio.Event()

    def _renew_grants(self) -> None:
        for peer, message in self.grants.renewals(UnixS(time.time())):
            if self.connection.links.is_connected(peer):
                self.connection.links.send(peer, message)

    def _generation(
        self, prompt: str | Sequence[ChatMessage], params: SamplingParams | None, *, plain_fallback: bool
    ) -> Generation:
        stats = GenerationStats()
        return Generation(self._run(prompt, params or SamplingParams(), stats, plain_fallback), stats)

    def _load(self) -> tuple[Boundary, Tokenizer]:
        set_threads(self._threads)
        boundary = Boundary.load(self.model, numerics=self._numerics, device=self._device)
        self._router.user_step_s = _step_seconds(boundary)
        if self._drafts is not None:
            self._exact_rows = exact_rows(boundary, self._vocabulary)
        tokenizer = Tokenizer(self.model.path)
        source = self._draft_source
        if isinstance(source, Path) and self._drafts is not None:
            head = self._load_head(source, boundary, self._drafts.tap_layers)
            self._drafts.add(head.drafter, tap_layers=head.tap_layers)
        elif isinstance(source, StoredModel) and self._drafts is not None:
            check_same_tokens(Tokenizer(source.path).vocabulary, tokenizer.vocabulary, name=source.name)
            draft_model = DraftModel.load(
                source, vocabulary=self._vocabulary, numerics=self._numerics, device=self._device
            )
            self._drafts.add(draft_model.drafter)
        return boundary, tokenizer

    def _load_head(self, folder: Path, boundary: Boundary, other_taps: Sequence[int]) -> DraftHead:
        head = DraftHead.load(
            folder,
            boundary,
            hidden_size=self._hidden_size,
            vocabulary=self._vocabulary,
            num_layers=self.num_layers,
            model_id=self.model.model_id,
        )
        num_taps = len({*head.tap_layers, *other_taps})
        if num_taps > MAX_TAPS:
            raise ConfigError(
                f"with {folder} drafters take rows of {num_taps} inner layers, and nodes return those of {MAX_TAPS} "
                "at most: take another head, or train one with --features three"
            )
        return head

    async def _loaded(self) -> tuple[Boundary, Tokenizer]:
        if self._loading is None:
            raise RuntimeError("use SwarmClient with `async with`")
        return await asyncio.shield(self._loading)

    async def _run(
        self,
        prompt: str | Sequence[ChatMessage],
        params: SamplingParams,
        stats: GenerationStats,
        plain_fallback: bool,
    ) -> AsyncGenerator[str, None]:
        began = time.perf_counter()
        _, tokenizer = await self._loaded()
        await self._read_ownership()
        # A prompt of a megabyte takes a second, in which heartbeats and other answers must go on.
        ids = await asyncio.to_thread(self._encode, tokenizer, prompt, plain_fallback)
        max_tokens = self._room(len(ids), params.max_tokens)
        stats.prompt_tokens = len(ids)
        stats.seed = params.seed if params.seed is not None else secrets.randbits(63)
        text = TextStream(tokenizer.decode, params.stop)
        async with AsyncExitStack() as stack:
            answer = await self._begin(stack, ids)
            work = Work(answer, params, stats)
            first_at: float | None = None
            num_positions = len(ids) + max_tokens
            if self._drafts is None:
                found = self._tokens(work, num_positions)
            else:
                found = self._speculated_tokens(work, num_positions, self._drafts)
            async with aclosing(found) as tokens:
                async for token in tokens:
                    now = time.perf_counter()
                    if first_at is None:
                        first_at, stats.time_to_first_token_s = now, now - began
                    if token in self._eos_ids and not params.ignore_eos:
                        stats.finish_reason = "stop"
                        break
                    stats.decode_s = now - first_at
                    stats.completion_tokens += 1
                    stats.token_ids.append(token)
                    if piece := text.push(token):
                        yield piece
                    if text.stopped_by is not None:
                        stats.finish_reason = "stop"
                        break
        if piece := text.finish():
            yield piece
        stats.finish_reason = stats.finish_reason or "length"
        self._router.save(not_within_s=SAVE_EVERY_S)

    async def _begin(self, stack: AsyncExitStack, ids: list[int]) -> Answer:
        """Waits for an answer that is about to have computed the same beginning, if there is one."""
        all_ids = list(ids)
        answer = Answer(ids=all_ids, all_ids=all_ids, num_prompt=len(ids))
        if self._prefixes is not None:
            # One that has been, and is computed anew over another route, is not waited for: its event is set already.
            while (other := self._prefixes.find_opening(ids)) is not None and not other.prefilled.is_set():
                await other.prefilled.wait()
            stack.enter_context(self._remembered(self._prefixes, answer))
        return answer

    @contextmanager
    def _remembered(self, prefixes: PrefixCache[Answer], answer: Answer) -> Iterator[None]:
        """Others may begin like this answer, and once it is over as long as its nodes keep it."""
        self._tell_unneeded(prefixes.begin(answer))
        try:
            yield
        finally:
            answer.prefilled.set()
            is_kept = answer.is_kept and answer.num_computed >= MIN_POSITIONS
            # What was withdrawn while the session was being closed came too late for it.
            is_allowed = not (self._router.has_revoked(answer.planned) or self._router.breaches(answer.planned))
            if is_kept and is_allowed:
                self._tell_unneeded(prefixes.end(answer, now=MonotonicS(time.monotonic())))
            else:
                prefixes.forget(answer)
                if is_kept:
                    self._tell_unneeded([answer])

    def _tell_unneeded(self, answers: Iterable[Answer]) -> None:
        """Their nodes need not keep them. One that cannot be told drops them in time."""
        for answer in answers:
            for node in (member for peer, _ in answer.stages for member in members_of(peer)):
                self.grants.ended(answer.session, node)
                if self.connection.links.is_connected(node):
                    self.connection.links.send(node, CloseSession(answer.session, epoch=answer.epoch))

    async def _on_compute(self, work: Callable[..., T], *arguments: object) -> T:
        """Runs on the compute thread."""
        try:
            future = asyncio.get_running_loop().run_in_executor(self._compute, work, *arguments)
        except RuntimeError as error:
            raise NoPeers("the client was closed while it answered") from error
        return await future

    def _encode(self, tokenizer: Tokenizer, prompt: str | Sequence[ChatMessage], plain_fallback: bool) -> list[int]:
        if isinstance(prompt, str):
            return tokenizer.encode(prompt)
        if plain_fallback and not tokenizer.has_chat_template:
            return tokenizer.encode("\n".join(str(message["content"]) for message in prompt))
        return tokenizer.encode_chat(prompt)

    def _room(self, prompt_tokens: int, max_tokens: int) -> int:
        if prompt_tokens >= self.max_context:
            raise ContextTooLong(
                f"the prompt has {prompt_tokens} tokens, but the context of {self.model.name} ends at "
                f"{self.max_context}: shorten the prompt"
            )
        if prompt_tokens == 0:
            raise ConfigError("the prompt is empty: write at least one character")
        return min(max_tokens, self.max_context - prompt_tokens)

    def _backlog_s(self, peer: PeerId) -> float:
        """How long what waits for a peer takes to get there, or for any member of a group; 0 where nothing waited."""
        return max(map(self.connection.links.backlog_s, members_of(peer)))

    @asynccontextmanager
    async def _under_way(self, shell: AnswerShell) -> AsyncIterator[None]:
        """An answer that ``revoke``, and the ownership file, have to tell."""
        self._shells.add(shell)
        if self._watching is None and self._ownership_file is not None:
            self._watching = asyncio.create_task(self._watch_ownership())
        try:
            async with shell:
                yield
        finally:
            self._shells.discard(shell)
            if self._watching is not None and not self._shells:
                self._watching.cancel()
                self._watching = None

    async def _watch_ownership(self) -> None:
        while True:
            await asyncio.sleep(OWNERSHIP_EVERY_S)
            with suppress(ConfigError):  # of a file in the middle of being written too: what held before, holds
                await self._read_ownership()

    async def _read_ownership(self) -> None:
        """Has the rules of the ownership file hold, if it has changed: who may not hold what they have any more is
        revoked.

        Raises:
            ConfigError: it is wrong; the rules that it had before hold.
        """
        file = self._ownership_file
        if file is None:
            return
        async with self._reading_ownership:
            await asyncio.to_thread(file.refresh)
            # Whatever a look found for which an answer waited that was over before it: that look is not repeated.
            if file.rules != self._router.rules.ownership:
                self._own(file.rules)
        if file.problem is not None:
            raise ConfigError(str(file.problem))

    def _own(self, ownership: Ownership) -> None:
        log.info("other rules on ownership", rules="; ".join(ownership.in_words()) or "none")
        self._router.own(ownership)
        if self._prefixes is not None:
            self._forget([each for each in self._prefixes.entries if self._router.breaches(each.planned)])
        for shell in tuple(self._shells):
            shell.obey()

    def _forget(self, answers: Iterable[Answer]) -> None:
        """Has nodes drop what they keep of answers that are over."""
        ended = [each for each in answers if each.ended_at is not None]
        for each in ended:
            if self._prefixes is not None:
                self._prefixes.forget(each)
        self._tell_unneeded(ended)

    def _groups(self, stats: GenerationStats) -> Groups:
        def told(reports: tuple[GrantReport, ...]) -> None:
            stats.grants = reports

        def grant(place: PlanStage, index: int, message: OpenSession) -> bytes:
            return self.grants.issue(
                place,
                index,
                session=message.session,
                epoch=message.epoch,
                model_id=self.model.model_id,
                now=UnixS(time.time()),
                on_change=told,
            )

        return Groups(
            self._hidden_size,
            wire_dtype=self._wire_dtype,
            decompress=lambda payload, tensor: decompress(payload, tensor).data,
            open_lease=_open_lease,
            grant=grant,
            on_closed=self.grants.ended,
            on_refused=self.grants.refused,
            mask_secret=secrets.token_bytes(SECRET_BYTES) if self._masks else b"",
        )

    def _core_of(
        self, routes: AnswerRoutes, answer: Answer, make_plan: MakePlan, speculation: SpeculationCore | None = None
    ) -> AnswerCore:
        return AnswerCore(
            num_prompt=answer.num_prompt,
            row_size=self._hidden_size,
            wire_dtype=self._wire_dtype,
            make_plan=make_plan,
            new_session=partial(secrets.token_bytes, SESSION_BYTES),
            open_lease=_open_lease,
            backlog_s=self._backlog_s,
            is_allowed=lambda places: not routes.breaches(places),
            speculation=speculation,
            taps=self._drafts.tap_layers if speculation is not None and self._drafts is not None else (),
        )

    async def _tokens(self, work: Work, num_positions: int) -> AsyncGenerator[int, None]:
        """The tokens of an answer, however its nodes fare, until it has so many positions."""
        boundary, _ = await self._loaded()
        answer = work.answer
        routes = AnswerRoutes(self._router, self._prefixes, work, num_positions)
        groups = self._groups(work.stats)
        core = self._core_of(routes, answer, partial(self._make_plan, groups, num_positions))

        async def embed(start: int, stop: int) -> EncodedRows:
            return await self._on_compute(self._embed, boundary, answer.all_ids[start:stop])

        shell = AnswerShell(
            self.connection,
            core,
            routes,
            embed=embed,
            on_compute=self._on_compute,
            on_event=partial(routes.note, core),
            groups=groups,
            on_time=self._renew_grants,
        )
        shell.retain = self._prefixes is not None
        try:
            async with self._under_way(shell):
                while (position := len(answer.all_ids)) < num_positions:
                    tensor, payload = await shell.next_row()
                    is_last = position == num_positions - 1
                    began = time.perf_counter()
                    try:
                        token, rows = await self._on_compute(self._advance, boundary, work, tensor, payload, is_last)
                    except _RowRefused as error:
                        shell.result_unfit(str(error))
                        continue
                    self._router.observe_user_step(time.perf_counter() - began)
                    answer.prefilled.set()
                    if rows is not None:
                        shell.append(position, rows)
                    yield token
        finally:
            answer.is_kept = shell.is_kept

    async def _speculated_tokens(self, work: Work, num_positions: int, drafts: Drafts) -> AsyncGenerator[int, None]:
        """The same tokens, of which those that come next are guessed while the nodes compute."""
        boundary, _ = await self._loaded()
        answer, params = work.answer, work.params
        num_reserved = num_positions + min(TREE_POSITIONS, num_positions)
        routes = AnswerRoutes(self._router, self._prefixes, work, num_positions, num_reserved=num_reserved)
        policy = self._policies.pop() if self._policies else ModePolicy(self._modes or ())
        speculation = SpeculationCore(
            last_token=answer.all_ids[-1],
            num_prompt=answer.num_prompt,
            stop_position=num_positions,
            stop_tokens=frozenset() if params.ignore_eos else self._eos_ids,
            max_positions=num_reserved,
            next_sequence=0,
            policy=policy,
            wants_taps=bool(drafts.tap_layers),
        )

        groups = self._groups(work.stats)

        def make_plan(session: bytes, epoch: int, stages: tuple[PlanStage, ...]) -> tuple[Plan, bytes]:
            if epoch == 0:  # later plans of a session have to reserve what its first one did
                speculation.max_positions = routes.num_reserved
            return self._make_plan(groups, speculation.max_positions, session, epoch, stages)

        core = self._core_of(routes, answer, make_plan, speculation)
        noise = None
        if params.temperature > 0:
            noise = GumbelNoise(seed=work.stats.seed, temperature=params.temperature, vocabulary=self._vocabulary)
        drafting = drafts.begin(answer.all_ids, noise, num_positions)

        async def embed(start: int, stop: int) -> EncodedRows:
            return await self._on_compute(self._embed, boundary, answer.all_ids[start:stop])

        def row_s(peer: PeerId) -> float:
            members = members_of(peer)
            rates_Bps = [self.connection.links.delivery_rate_Bps(member) for member in members]
            share = (row_bytes(self._wire_dtype, self._hidden_size) or 0) / len(members)
            return max(share / rate_Bps if rate_Bps else 0.0 for rate_Bps in rates_Bps)

        shell = SpeculativeShell(
            self.connection,
            core,
            routes,
            embed=embed,
            on_compute=self._on_compute,
            on_event=partial(routes.note, core),
            groups=groups,
            on_time=self._renew_grants,
            speculation=speculation,
            chooser=RowChooser(
                boundary,
                answer.all_ids,
                params,
                seed=work.stats.seed,
                as_dtype=self._numerics.wire_dtype,
                max_rows=self._exact_rows,
                on_compute=self._on_compute,
                observe_step=self._router.observe_user_step,
            ),
            drafting=drafting,
            embed_tokens=partial(self._embed, boundary),
            on_commit=answer.all_ids.append,
            row_s=row_s,
            decode_tap=partial(decode_tap, as_dtype=self._numerics.wire_dtype),
        )
        shell.retain = self._prefixes is not None
        try:
            async with self._under_way(shell):
                for _ in range(num_positions - answer.num_prompt):
                    token = await shell.next_token()
                    answer.prefilled.set()
                    yield token
        finally:
            answer.is_kept = shell.is_kept
            work.stats.speculation = SpeculationReport.of(speculation)
            shell.text.finish()
            drafting.close()
            if self._prefixes is not None:
                policy.paused()
                self._policies.append(policy)

    def _make_plan(
        self, groups: Groups, num_positions: int, session: bytes, epoch: int, stages: tuple[PlanStage, ...]
    ) -> tuple[Plan, bytes]:
        """As its own session sees it, with an id for each group, and as nodes do, to whom it is its first member."""
        now = time.time()
        plan = Plan(
            version=PROTOCOL_VERSION,
            user=self.connection.identity.peer_id,
            session=session,
            epoch=epoch,
            model_id=self.model.model_id,
            numerics=self._numerics.name,
            max_positions=num_positions,
            issued_at=now,
            expires_at=now + PLAN_TTL_S,
            stages=stages,
            priority=self._priority,
            wire=self._wire,
            masks=self._masks,
        )
        groups.begin(plan)
        if groups.are_used:
            first = tuple(msgspec.structs.replace(stage, peer=stage.places[0].peer) for stage in stages)
            return plan, sign_plan(msgspec.structs.replace(plan, stages=first), self.connection.identity)
        return plan, sign_plan(plan, self.connection.identity)

    # on the compute thread

    def _embed(self, boundary: Boundary, ids: Sequence[int]) -> tuple[TensorMeta, memoryview]:
        return encode_rows(boundary.embed(ids), self._wire_dtype)

    def _advance(
        self, boundary: Boundary, work: Work, tensor: TensorMeta, payload: memoryview, is_last: bool
    ) -> tuple[int, tuple[TensorMeta, memoryview] | None]:
        """From a returned row to the next token and, unless nothing follows, that token's embedding."""
        try:
            rows_TD = decode_rows(tensor, payload, as_dtype=self._numerics.wire_dtype)
        except (RowsNotFinite, WireError) as error:
            raise _RowRefused(str(error)) from error
        logits_V = boundary.logits(rows_TD)[0]
        seen = work.answer.all_ids
        token = choose_token(logits_V, work.params, seed=work.stats.seed, position=len(seen), seen=seen)
        seen.append(token)
        ends = is_last or (token in self._eos_ids and not work.params.ignore_eos)
        return token, None if ends else self._embed(boundary, [token])


def _draft_source(store: ModelStore, name: str) -> StoredModel | Path:
    """A model of the store, or else a folder of that name, as of a draft head.

    Raises:
        UnknownModel: there is neither.
    """
    try:
        return store.find(name)
    except UnknownModel:
        folder = Path(name)
        if (folder / CONFIG_FILE).is_file():
            return folder
        raise


class _RowRefused(Exception):
    """A row that came back is unfit: its sender's fault, unlike anything that goes wrong afterwards."""


def _step_seconds(boundary: Boundary) -> float:
    """What this process needs for one token: the shortest of three, since the first one warms up."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        boundary.logits(boundary.embed([0]))
        times.append(time.perf_counter() - began)
    return min(times)


def _open_lease(envelope: bytes) -> Lease | Refusal:
    return open_lease(envelope, now=UnixS(time.time()))


def _check_can_fuse(numerics: NumericsClass, wire: str) -> None:
    """Raises ConfigError where members of a group could not compute together."""
    if wire:
        raise ConfigError("rows go to the members of a group by columns, which --wire int8 does not: leave it out")
    if numerics.name.partition("+")[0] not in ("fp32", "f16r32"):
        raise ConfigError(f"members of a group do not compute in {numerics.name}: take fp32 or f16r32")


def _wire_encoding(wire: str | None) -> str:
    """What a plan says for it.

    Raises:
        ConfigError: there is no such encoding.
    """
    if wire is None:
        return ""
    if wire != "int8":
        raise ConfigError(f"unknown encoding {wire!r} for the wire: int8, or none for the exact one")
    return INT8


def _eos_ids(model: StoredModel) -> frozenset[int]:
    """Token ids that end an answer; the generation config overrides the model's, as in transformers."""
    settings = model.config
    if any(file.name == "generation_config.json" for file in model.manifest.files):
        settings = settings | msgspec.json.decode(model.read_file("generation_config.json"), type=dict)
    value = settings.get("eos_token_id")
    return frozenset(value if isinstance(value, list) else [] if value is None else [value])
