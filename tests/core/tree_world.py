"""A user who grows a token tree on serving cores: it commits, cancels, and loses stages, all at random moments.

As in serving_world, a row says what made it: here the tokens of its node's path, and the stages that it came through.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fusion_node.types import PeerId
from p2p.messages import PEER_LOST, Cancel, OpenSession, Step, StepResult, TensorMeta
from tests.core.serving_world import KEY, ROW_SIZE, World, digest, embed

Path = tuple[int, ...]
"""Tokens from the first on."""

MAX_POSITIONS = 95
"""That the user fills: what all stages hold, committed and live."""


@dataclass
class TreeWorld(World):
    """Nodes get new names when all stages have folded; until then a repair goes by those that they had."""

    may_cancel: bool = True
    paths: dict[int, dict[int, Path]] = field(default_factory=lambda: {0: {0: ()}})
    """By epoch, what a name stood for."""
    numbering: int = 0
    """The epoch whose names are in use."""
    base: int = 0
    """Positions that were committed when they were given."""
    node_at: list[int] = field(default_factory=list)
    """Committed nodes by position."""
    committed: Path = ()
    num_told: int = 0
    """Positions that the stages were told to commit."""
    next_node: int = 1
    next_sequence: int = 0
    returned: dict[Path, int] = field(default_factory=dict)
    hints: list[tuple[PeerId, Cancel]] = field(default_factory=list)
    states: dict[tuple[int, int], object] = field(default_factory=dict)
    num_folded: int = 0
    rows_at: dict[tuple[int, Path], int] = field(default_factory=dict)

    def row_at(self, stage: int, path: Path) -> int:
        """What a stage makes of the last token of a path; the user, as stage -1, its embedding."""
        if stage < 0:
            return embed(path[-1])
        if (stage, path) not in self.rows_at:
            history = [self.row_at(stage - 1, path[: i + 1]) for i in range(len(path))]
            self.rows_at[stage, path] = digest(*self.ranges[stage], history)
        return self.rows_at[stage, path]

    # the tree

    @property
    def names(self) -> dict[int, Path]:
        return self.paths[self.numbering]

    @property
    def root(self) -> int:
        return self.node_at[-1] if self.node_at else 0

    def below(self, path: Path) -> list[int]:
        """Nodes that descend from a path."""
        return [n for n, p in self.names.items() if len(p) > len(path) and p[: len(path)] == path]

    def commit(self, node: int) -> None:
        """The user has chosen all tokens up to this live node."""
        path = self.names[node]
        name_of = {p: n for n, p in self.names.items()}
        self.node_at += [name_of[path[: i + 1]] for i in range(len(self.committed), len(path))]
        self.committed = path

    def grow(self) -> None:
        """New nodes on the root, on live ones or on each other; the last is committed at once if it is a correction."""
        rng, first, num_nodes = self.rng, self.next_node, self.rng.choice((1, 1, 2, 3, 4, 6))
        if self.num_told + len(self.below(self.committed[: self.num_told])) + num_nodes > MAX_POSITIONS:
            return
        is_chain, parents = rng.random() < 0.4, []
        for index in range(num_nodes):
            options = [self.root, *self.below(self.committed)[-6:], *range(first, first + index)]
            parents.append(first + index - 1 if is_chain and index else rng.choice(options))
        tokens = [rng.randrange(10**6) for _ in parents]
        for node, (parent, token) in enumerate(zip(parents, tokens, strict=True), first):
            self.names[node] = (*self.names[parent], token)
        self.next_node += num_nodes
        if rng.random() < 0.3:
            self.commit(first + num_nodes - 1)
        advance = self.root if len(self.committed) > self.num_told and rng.random() < 0.8 else 0
        self.num_told = len(self.committed) if advance else self.num_told
        step = Step(
            session=KEY,
            epoch=self.epoch,
            sequence=self.next_sequence,
            first_node=first,
            parent=parents[0],
            parents=() if is_chain else tuple(parents),
            advance=advance,
            want=tuple(range(first, self.next_node)),
            tensor=TensorMeta("f32", num_nodes, ROW_SIZE),
            timings=(),
        )
        self.next_sequence += 1
        self.post(self.user, self.nodes[0].peer, step, tuple(map(embed, tokens)))

    def cancel(self) -> None:
        """Tells some stages of the root, some of them twice; every word of it goes its own way."""
        if self.root and self.may_cancel and self.numbering == self.epoch:
            hint = Cancel(KEY, self.epoch, self.root)
            told = [node.peer for node in self.nodes if self.rng.random() < 0.7]
            self.hints += [(peer, hint) for peer in told for _ in range(self.rng.choice((1, 1, 2)))]

    @property
    def is_open(self) -> bool:
        return len(self.opened) == len(self.nodes)

    # a repair: the log of a folded session has an entry per position

    def opening(self, stage: int, envelope: bytes, *, resumes: bool) -> OpenSession:
        start = self.rng.randrange(self.base + 1)
        path = tuple(self.node_at[start:])
        fold = {"folds": True, "path_start": start, "path": path, "path_epoch": self.numbering} if resumes else {}
        return OpenSession(KEY, self.epoch, stage, envelope, resumes=resumes, **fold)  # type: ignore[arg-type]

    def replay(self) -> None:
        if self.epoch:
            self.num_folded += 1
            num = self.num_told = self.base = self.next_sequence = len(self.committed)
            self.numbering, self.next_node = self.epoch, num + 1
            self.paths[self.epoch] = {position: self.committed[:position] for position in range(num + 1)}
            self.node_at = list(range(1, num + 1))
            self.entries = [(position, 1) for position in range(num)]
            self.results = {
                p: self.returned[path] for p in range(num) if (path := self.committed[: p + 1]) in self.returned
            }
        super().replay()

    def rows(self, first: int, num_rows: int) -> tuple[int, ...]:
        return tuple(embed(token) for token in self.committed[first : first + num_rows])

    def got(self, message: StepResult, rows: tuple[int, ...]) -> None:
        for node, row in zip(message.nodes, rows, strict=True):
            path = self.paths[message.epoch][node]
            assert row == self.row_at(len(self.nodes) - 1, path)
            self.returned[path] = row
            if path == self.committed[: len(path)] and len(path) <= len(self.entries):
                self.results[len(path) - 1] = row

    # what chance does

    def step(self) -> bool:
        if self.hints and self.rng.random() < 0.7:
            peer, hint = self.hints.pop(self.rng.randrange(len(self.hints)))
            if peer in self.by_peer:
                self.by_peer[peer].receive(self.user, hint)
            return True
        is_something = super().step()
        for node in self.nodes:
            for session in node.admission.sessions:
                state = session.log.state()
                # With cancels a stage may have left rows out, which take no slot then: the tree is still the same.
                nodes = sorted({*state.live, *state.skipped}) if self.may_cancel else list(state.live.items())
                assert self.may_cancel or not state.skipped
                tree = (state.num_committed, state.root, state.last_node, nodes)
                assert self.states.setdefault((session.plan.epoch, state.next_sequence), tree) == tree
        return is_something

    def is_slow(self) -> bool:
        return self.rng.random() < 0.6

    def deliver(self, link: tuple[PeerId, PeerId]) -> None:
        message, rows = self.links[link][0]
        if isinstance(message, Step) and self.rng.random() < 0.1:
            self.links[link].appendleft((message, rows))
        super().deliver(link)

    def check(self) -> None:
        """Once nothing more happens."""
        assert self.is_open
        assert not self.expected
        assert {failed.code for failed in self.failures} <= {PEER_LOST}
        for stage, node in enumerate(self.nodes):
            (session,) = node.admission.sessions
            assert session.log.next_sequence == self.next_sequence
            assert session.log.num_committed == self.num_told
            assert session.num_unfinished == session.num_queued_rows == 0
            assert session.fold is None
            session.log.check_integrity()
            if stage < len(self.nodes) - 1:
                key = (self.user, KEY)
                assert node.outputs.num_positions(key) == self.num_told
                if self.num_told:
                    kept = node.outputs.rows(key, 0, self.num_told)
                    assert kept == tuple(self.row_at(stage, self.committed[: p + 1]) for p in range(self.num_told))
        for position in range(len(self.committed)):
            assert self.committed[: position + 1] in self.returned


def run_tree(world: TreeWorld, *, may_replace: bool = True) -> TreeWorld:
    """A session of some frames, whose stages are replaced, dead or alive, at any moment and while it is repaired."""
    rng, num_replaced = world.rng, 0
    world.settle()
    for _ in range(rng.randrange(5, 50)):
        if world.is_open and len(world.committed) < 60 and rng.random() < 0.6:
            for _ in range(rng.choice((1, 2, 5))):
                world.grow()
        live = world.below(world.committed)
        if live and rng.random() < 0.4:
            world.commit(rng.choice(live[:4]))
        if rng.random() < 0.3:
            world.cancel()
        if may_replace and num_replaced < 5 and rng.random() < 0.08:
            num_replaced += 1
            world.replace(rng.randrange(len(world.nodes)), is_dead=rng.random() < 0.7)
        for _ in range(rng.randrange(0, 14)):
            world.step()
    world.settle()
    return world
