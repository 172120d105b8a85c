"""Drafts from a small language model with the target's tokens, computed on the user's own machine.

The model is a stage of all its layers with a boundary (fusion_node.engine.stage, .boundary), so whatever architecture
the engine serves can draft. One answer's text and the paths beyond it are one token tree in one KV pool, kept by the
same log that stages keep: a call computes all new nodes of all paths in one forward with a tree mask, and what was
computed for paths that the text has taken is never computed again. A node's candidates depend on its own path only, as
if it had been computed alone.

A prompt is computed when the first paths are asked for, at most MAX_CHUNK_ROWS tokens per call: until the model has
caught up it proposes nothing, and holds nobody up.

Shapes: T tokens of one forward, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fusion_node.engine.architectures import load_config, max_positions
from fusion_node.engine.block_manager_core import SlotMove
from fusion_node.engine.boundary import Boundary
from fusion_node.engine.drafts import Proposals, SharedNoise, Verified
from fusion_node.engine.kv_cache import KVPool
from fusion_node.engine.numerics import NumericsClass
from fusion_node.engine.session_log_core import SessionLog, StepRows
from fusion_node.engine.stage import Stage, StepInput
from fusion_node.engine.weights import OnTensor, TensorSource
from fusion_node.errors import ConfigError, LocalProtocolError
from fusion_node.types import LayerRange

MAX_CHUNK_ROWS = 512
"""Of a prompt in one call."""

MAX_TREE_ROWS = 384
"""Live nodes beyond the text. Deeper or wider trees are not drafted on until the text has grown."""

MAX_KEPT_CANDIDATES = 16
"""Per node; more are never asked for."""

LEAST_SHARE = 1e-6
"""Of a candidate, so that none has none."""

MAX_PADDING = 1024
"""Token ids by which vocabularies of one tokenizer may differ: models of one family are padded to different sizes."""


@dataclass(slots=True, eq=False, repr=False)
class _Node:
    """The end of the text, or of a path beyond it.

    Attributes:
        parent: None for the text's end as it was at the begin.
        id: in the log; None until it is computed.
        row_D: the model's last hidden state, until it is made into candidates.
    """

    token: int
    parent: _Node | None
    id: int | None = None
    row_D: torch.Tensor | None = None
    candidates: list[tuple[int, float]] | None = None
    after: dict[int, _Node] = field(default_factory=dict)


class DraftModel:
    """A causal language model that drafts for another: its weights, shared by all answers."""

    def __init__(self, stage: Stage, boundary: Boundary, *, name: str, vocabulary: int, max_positions: int) -> None:
        self.stage = stage
        self.boundary = boundary
        self.name = name
        self.vocabulary = vocabulary
        self.max_positions = max_positions

    @classmethod
    def load(
        cls,
        source: TensorSource,
        *,
        vocabulary: int,
        numerics: NumericsClass,
        device: torch.device,
        on_tensor: OnTensor | None = None,
    ) -> DraftModel:
        """Reads a whole model.

        Args:
            vocabulary: of the target: its number of token ids. That both mean the same tokens is up to the caller
                (fusion_node.client.drafting.check_same_tokens).

        Raises:
            ConfigError: the vocabularies differ by more than padding, or the architecture is not supported.
            ResourceExhausted: the device has no room for the weights.
            StoreCorrupted: a tensor does not match the manifest.
        """
        config = load_config(source)
        if abs(config.vocab_size - vocabulary) > MAX_PADDING:
            raise ConfigError(
                f"{source.name} cannot draft: it has {config.vocab_size} token ids and the model {vocabulary}; "
                "choose a draft model of the same family"
            )
        layers = LayerRange(0, config.num_hidden_layers)
        stage = Stage.load(source, layers, numerics=numerics, device=device, on_tensor=on_tensor)
        boundary = Boundary.load(source, numerics=numerics, device=device)
        return cls(
            stage,
            boundary,
            name=source.name,
            vocabulary=min(vocabulary, config.vocab_size),
            max_positions=max_positions(config),
        )

    def drafter(self, num_positions: int) -> DraftModelDrafter:
        """For one answer that, with its prompt, has at most so many tokens."""
        return DraftModelDrafter(self, min(num_positions, self.max_positions))


class DraftModelDrafter:
    """A Drafter (fusion_node.client.drafting) over a model that other answers use too.

    Not thread-safe, nor is the model: one thread computes the drafts of all answers.
    """

    def __init__(self, model: DraftModel, num_positions: int) -> None:
        self._model = model
        self._num_positions = num_positions
        self._noise: SharedNoise | None = None
        self._pool: KVPool | None = None
        self._text: list[int] = []
        self._num_computed = 0
        """Tokens of the text that the log has."""
        self._tail = 0
        """The log's node of the last of them."""
        self._root = _Node(-1, None)
        """The end of the text."""
        self._log = self._new_log()

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def num_rows_computed(self) -> int:
        """That went through the model since ``begin``: every token of the text and every node once."""
        return self._log.last_node

    def begin(self, prompt: Sequence[int], noise: SharedNoise | None = None) -> None:
        """See Drafter.

        Raises:
            ResourceExhausted: the device has no room for the KV.
        """
        self._noise = noise
        self._text, self._num_computed, self._tail = list(prompt), 0, 0
        self._root, self._log = _Node(-1, None), self._new_log()
        self._pool = self._model.stage.new_pool(self._log.max_positions)

    def extend(self, verified: Verified) -> None:
        """See Drafter."""
        for token in verified.tokens:
            self._text.append(token)
            self._root = self._root.after.get(token) or _Node(token, None)
            self._root.parent = None  # what is above it is not needed any more
            if self._root.id is not None:
                self._num_computed += 1
                self._tail = self._root.id

    def propose(self, paths: Sequence[Sequence[int]], width: int) -> Proposals:
        """See Drafter.

        Raises:
            ResourceExhausted: the device has no room for what the forward needs beside the KV.
        """
        missing = self._text[self._num_computed :]
        if not self._text or len(self._text) >= self._num_positions or not self._are_known(missing):
            return [[] for _ in paths]
        if len(missing) > MAX_CHUNK_ROWS:
            self._compute(missing[:MAX_CHUNK_ROWS], [])
            return [[] for _ in paths]
        if missing and self._num_live > MAX_TREE_ROWS // 2:
            # What this leaves behind is in the way of what is asked for.
            self._compute(missing, [])
            missing = []
        room = self._room()
        asked: list[tuple[_Node, int] | None] = []
        new: list[_Node] = []
        for path in paths:
            node, steps = self._walk(path, new)
            is_short = len(self._text) + len(path) < self._num_positions
            if is_short and len(new) + len(steps) <= room and self._are_known([step.token for step in steps]):
                new += steps
                asked.append((node, len(self._text) + len(path)))
            else:
                asked.append(None)
        if missing or new:
            self._compute(missing, new)
        self._score([item for item in asked if item is not None])
        return [[] if item is None else (item[0].candidates or [])[:width] for item in asked]

    def close(self) -> None:
        """See Drafter."""
        self._noise = self._pool = None
        self._text, self._root = [], _Node(-1, None)

    def _new_log(self) -> SessionLog:
        return SessionLog(self._num_positions + MAX_CHUNK_ROWS + MAX_TREE_ROWS)

    def _are_known(self, tokens: Sequence[int]) -> bool:
        return all(0 <= token < self._model.vocabulary for token in tokens)

    @property
    def _num_live(self) -> int:
        return self._log.num_slots - self._log.num_committed

    def _room(self) -> int:
        """How many nodes may be computed beyond the text."""
        if self._num_live > MAX_TREE_ROWS // 2:
            # Many of them are dead already, which the log is told with the next rows at the latest.
            self._apply([])
        return MAX_TREE_ROWS - self._num_live

    def _walk(self, path: Sequence[int], new: Sequence[_Node]) -> tuple[_Node, list[_Node]]:
        """The path's node, and the nodes that have to be computed for it beside those that are going to be."""
        node, steps = self._root, []
        for token in path:
            after = node.after.get(token)
            if after is None:
                after = node.after[token] = _Node(token, node)
            if after.id is None and after not in new:
                steps.append(after)
            node = after
        return node, steps

    def _compute(self, missing: Sequence[int], new: Sequence[_Node]) -> None:
        """One forward: what the text lacks, then nodes beyond it, parents first."""
        first = self._log.last_node + 1
        parents = [self._tail, *range(first, first + len(missing) - 1)] if missing else []
        if missing:
            self._num_computed += len(missing)
            self._tail = first + len(missing) - 1
            if self._num_computed == len(self._text):
                self._root.id = self._tail
        for index, node in enumerate(new, start=first + len(missing)):
            node.id = index
            parents.append(self._id_of(node.parent))
        step = self._apply(parents)
        rows_TD = self._model.boundary.embed([*missing, *(node.token for node in new)])
        runs = (range(step.first_slot + len(rows_TD)),)
        (hidden_TD,) = self._model.stage.forward([StepInput(step, rows_TD, runs)], self._kv)
        if self._root.id is not None and missing:
            self._root.row_D = hidden_TD[len(missing) - 1]
        for row_D, node in zip(hidden_TD[len(missing) :], new, strict=True):
            node.row_D = row_D

    def _apply(self, parents: Sequence[int]) -> StepRows:
        """Registers the next nodes, drops what the text has not taken, and closes the gaps that it leaves."""
        log = self._log
        step = log.apply(
            log.next_sequence,
            first_node=log.last_node + 1,
            num_rows=len(parents),
            parent=self._tail,
            parents=parents,
            advance=self._tail,
        )
        if not isinstance(step, StepRows) or len(step.live_rows) != len(parents):
            raise LocalProtocolError(f"the draft model's own log refuses its nodes: {step}")
        if step.move is not None:
            pairs = [(s, t) for t, s in enumerate(step.move.sources, start=step.move.first_slot) if s != t]
            if pairs:
                self._kv.move(SlotMove(tuple(s for s, _ in pairs), tuple(t for _, t in pairs)))
        return step

    @property
    def _kv(self) -> KVPool:
        if self._pool is None:
            raise LocalProtocolError("the draft model was asked before an answer began")
        return self._pool

    def _id_of(self, node: _Node | None) -> int:
        if node is None or node.id is None:
            raise LocalProtocolError("a draft hangs on a node that was not computed")
        return node.id

    def _score(self, asked: Sequence[tuple[_Node, int]]) -> None:
        """Candidates of the nodes that have none yet; with each the position of what follows it."""
        todo = {node: position for node, position in asked if node.candidates is None}
        rows = [node.row_D for node in todo if node.row_D is not None]
        if not rows:
            return
        scores_TV = self._model.boundary.logits(torch.stack(rows))[:, : self._model.vocabulary]
        if self._noise is not None:
            noise_TV = np.stack([self._noise.at(position)[: scores_TV.shape[1]] for position in todo.values()])
            scores_TV = scores_TV / np.float32(self._noise.temperature) + noise_TV
        for node, candidates in zip(todo, best_candidates(torch.from_numpy(scores_TV)), strict=True):
            node.candidates, node.row_D = candidates, None


def best_candidates(scores_TV: torch.Tensor) -> list[list[tuple[int, float]]]:
    """Per row the tokens with the highest scores, best first, each with its share of the softmax of all."""
    values_TK, ids_TK = scores_TV.topk(min(MAX_KEPT_CANDIDATES, scores_TV.shape[1]), dim=1)
    shares_TK = torch.exp(values_TK - scores_TV.logsumexp(dim=1, keepdim=True)).clamp(LEAST_SHARE, 1.0)
    return [list(zip(i, s, strict=True)) for i, s in zip(ids_TK.tolist(), shares_TK.tolist(), strict=True)]
