"""Drafts from the target's own hidden states: heads of one layer or a few that guess what the target will say next.

A head takes a row that the swarm has returned with the token that was chosen from it, and guesses the token after that;
for every token further on its own output stands for the row. Which arithmetic is between is in draft_head_kinds. Here
is the tree: the text's pairs of row and token are the head's context, each with its keys and values, and nodes beyond
it see the context, and their own ancestors.

Once a path has been taken, its pairs come with the target's true rows and replace what was guessed; nodes that hang on
it stay as they were computed. Where a row has not come the context has a gap, and nothing is drafted until the newest
one is there. Rows of the prompt are of use, and not needed.

Shapes: T rows of one call, D hidden size, k rows that a head takes per position, S slots, N query heads, K KV heads,
H head dim, W draft vocabulary.

Source: EAGLE, Li et al. 2024 (arXiv 2401.15077 and 2406.16858); EAGLE-3, Li et al. 2025 (arXiv 2503.01840). Trees are
grown by fusion_node.client.speculation_core instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from fusion_node.engine.boundary import Boundary
from fusion_node.engine.draft_head_kinds import HeadKind, load_kind
from fusion_node.engine.draft_model import best_candidates
from fusion_node.engine.drafts import Proposals, SharedNoise, Verified

MAX_CHUNK_ROWS = 512
"""Pairs of the text in one call."""

MAX_TREE_NODES = 256
"""Live nodes beyond the text."""


@dataclass(slots=True, eq=False, repr=False)
class _Node:
    """The end of the text, or of a path beyond it.

    Attributes:
        slot: of its keys and values; None of the end of the text, whose are in the context.
        out_D: what the head puts out; None until it is computed.
    """

    token: int
    parent: _Node | None
    slot: int | None = None
    out_D: torch.Tensor | None = None
    candidates: list[tuple[int, float]] | None = None
    after: dict[int, _Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, repr=False)
class _Pair:
    """A token of the text, and what the target's layers said where it was chosen; one position before its own."""

    features_kD: torch.Tensor
    token: int
    position: int


class DraftHead:
    """A head with the boundary of its target: shared by all answers.

    Args:
        num_layers: of the target.
    """

    def __init__(self, kind: HeadKind, boundary: Boundary, *, num_layers: int) -> None:
        self.kind = kind
        self.boundary = boundary
        self.num_layers = num_layers

    @classmethod
    def load(
        cls, folder: Path, boundary: Boundary, *, hidden_size: int, vocabulary: int, num_layers: int, model_id: str = ""
    ) -> DraftHead:
        """Reads a head: one that ``fusion-node draft train`` made, or a published EAGLE, EAGLE-2 or EAGLE-3 checkpoint.

        Args:
            boundary: of the target, and the sizes that follow are the target's.

        Raises:
            ConfigError: there is none, it is of another kind or of another target, or its files are not sound.
        """
        kind = load_kind(
            folder,
            boundary,
            hidden_size=hidden_size,
            vocabulary=vocabulary,
            num_layers=num_layers,
            model_id=model_id,
        )
        return cls(kind, boundary, num_layers=num_layers)

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Rows that it takes beside those that the last stage returns."""
        return tuple(layer for layer in self.kind.feature_layers if layer != self.num_layers)

    def drafter(self, num_positions: int) -> DraftHeadDrafter:
        """For one answer that, with its prompt, has at most so many tokens."""
        return DraftHeadDrafter(self, num_positions)


class DraftHeadDrafter:
    """A Drafter (fusion_node.client.drafting) over a head that other answers use too. Not thread-safe."""

    def __init__(self, head: DraftHead, num_positions: int) -> None:
        self._head = head
        self._kind = head.kind
        self._num_positions = num_positions
        self._noise: SharedNoise | None = None
        self._text: list[int] = []
        self._root = _Node(-1, None)
        """The end of the text."""
        self._pending: list[_Pair] = []
        self._num_context = 0
        """Slots of the context, behind those of the tree."""
        self._free: list[int] = []
        self._start(())

    @property
    def name(self) -> str:
        return self._kind.name

    def begin(self, prompt: Sequence[int], noise: SharedNoise | None = None) -> None:
        """See Drafter."""
        self._noise = noise
        self._start(prompt)

    def extend(self, verified: Verified) -> None:
        """See Drafter."""
        features_TkD = self._features(verified)
        for index, token in enumerate(verified.tokens):
            if features_TkD is not None and self._text and 0 <= token < self._kind.vocabulary:
                self._pending.append(_Pair(features_TkD[index], token, len(self._text) - 1))
            self._text.append(token)
            self._root = self._root.after.get(token) or _Node(token, None)
            self._root.parent = self._root.slot = self._root.out_D = self._root.candidates = None
        used = {node.slot for node in self._below(self._root)}
        self._free = [slot for slot in range(MAX_TREE_NODES) if slot not in used]

    def propose(self, paths: Sequence[Sequence[int]], width: int) -> Proposals:
        """See Drafter.

        Raises:
            ResourceExhausted: the device has no room for it.
        """
        if not self._catch_up():
            return [[] for _ in paths]
        asked: list[tuple[_Node, int] | None] = []
        for path in paths:
            is_short = len(self._text) + len(path) < self._num_positions
            is_known = all(0 <= token < self._kind.vocabulary for token in path)
            asked.append((self._walk(path), len(path)) if is_short and is_known else None)
        self._compute([item[0] for item in asked if item is not None])
        self._score([item for item in asked if item is not None])
        return [[] if item is None else (item[0].candidates or [])[:width] for item in asked]

    def close(self) -> None:
        """See Drafter."""
        self._noise = None
        self._start(())

    def _start(self, text: Sequence[int]) -> None:
        kind, num_slots = self._kind, MAX_TREE_NODES + (self._num_positions if text else 0)
        shape = (kind.num_layers, kind.num_kv_heads, num_slots, kind.head_dim)
        self._text = list(text)
        self._root = _Node(-1, None)
        self._pending = []
        # Zeros: what is masked is multiplied by nothing, but must be a number.
        self._keys_LKSH = torch.zeros(shape, dtype=kind.dtype, device=kind.device)
        self._values_LKSH = torch.zeros_like(self._keys_LKSH)
        self._num_context = 0
        self._free = list(range(MAX_TREE_NODES))

    def _features(self, verified: Verified) -> torch.Tensor | None:
        """What the head takes of the target, ``[T, k, D]``; None when something of it has not come."""
        layers = []
        for layer in self._kind.feature_layers:
            if layer == self._head.num_layers:
                rows_TD = verified.rows_TD
            elif verified.taps_TLD is not None and layer in verified.tap_layers:
                rows_TD = verified.taps_TLD[:, verified.tap_layers.index(layer)]
            else:
                rows_TD = None
            if rows_TD is None:
                return None
            layers.append(torch.from_numpy(np.ascontiguousarray(rows_TD)))
        return torch.stack(layers, dim=1)

    def _below(self, root: _Node) -> list[_Node]:
        found, todo = [], list(root.after.values())
        while todo:
            node = todo.pop()
            found.append(node)
            todo += node.after.values()
        return found

    @torch.inference_mode()
    def _catch_up(self) -> bool:
        """Takes pairs of the text into the context. Returns whether the end of the text is there."""
        pairs, self._pending = self._pending[:MAX_CHUNK_ROWS], self._pending[MAX_CHUNK_ROWS:]
        pairs = pairs[: self._num_positions - self._num_context]
        if pairs:
            first = MAX_TREE_NODES + self._num_context
            self._num_context += len(pairs)
            sees_TS = torch.zeros((len(pairs), first + len(pairs)), dtype=torch.bool)
            sees_TS[:, MAX_TREE_NODES:] = torch.ones_like(sees_TS[:, MAX_TREE_NODES:]).tril(first - MAX_TREE_NODES)
            features_TkD = torch.stack([pair.features_kD for pair in pairs]).to(self._kind.device)
            embedded_TD = self._kind.embed([pair.token for pair in pairs])
            out_TD = self._run(
                self._kind.start(features_TkD, embedded_TD),
                embedded_TD,
                [pair.position for pair in pairs],
                list(range(first, first + len(pairs))),
                sees_TS,
            )
            if pairs[-1].position == len(self._text) - 2:
                self._root.out_D = out_TD[-1]
        return self._root.out_D is not None

    def _walk(self, path: Sequence[int]) -> _Node:
        node = self._root
        for token in path:
            after = node.after.get(token)
            if after is None:
                after = node.after[token] = _Node(token, node)
            node = after
        return node

    @torch.inference_mode()
    def _compute(self, ends: Sequence[_Node]) -> None:
        """All nodes that the ends need, one generation after the other: each takes what its parent put out."""
        generations: dict[int, dict[_Node, None]] = {}
        for end in ends:
            missing: list[_Node] = []
            node: _Node | None = end
            while node is not None and node.out_D is None:
                missing.append(node)
                node = node.parent
            for depth, node in enumerate(reversed(missing)):
                generations.setdefault(depth, {})[node] = None
        for depth in sorted(generations):
            nodes = [node for node in generations[depth] if node.parent is not None and node.parent.out_D is not None]
            # Where there are no slots left, nothing is drafted on until the text has grown.
            nodes = nodes[: len(self._free)]
            if not nodes:
                continue
            sees_TS = torch.zeros((len(nodes), MAX_TREE_NODES + self._num_context), dtype=torch.bool)
            sees_TS[:, MAX_TREE_NODES:] = True
            positions = []
            for index, node in enumerate(nodes):
                node.slot = self._free.pop()
                above = self._slots_of(node)
                sees_TS[index, above] = True
                positions.append(len(self._text) - 2 + len(above))
            embedded_TD = self._kind.embed([node.token for node in nodes])
            hidden_TD = torch.stack([node.parent.out_D for node in nodes])  # type: ignore[union-attr, misc]
            out_TD = self._run(
                self._kind.next(hidden_TD, embedded_TD),
                embedded_TD,
                positions,
                [node.slot for node in nodes if node.slot is not None],
                sees_TS,
            )
            for node, out_D in zip(nodes, out_TD, strict=True):
                node.out_D = out_D

    def _slots_of(self, node: _Node) -> list[int]:
        """Of a node and what is above it, up to the end of the text."""
        slots = []
        above: _Node | None = node
        while above is not None and above is not self._root:
            if above.slot is not None:
                slots.append(above.slot)
            above = above.parent
        return slots

    def _run(
        self,
        hidden_TD: torch.Tensor,
        embedded_TD: torch.Tensor,
        positions: Sequence[int],
        slots: Sequence[int],
        sees_TS: torch.Tensor,
    ) -> torch.Tensor:
        """The head's layers for rows that take these slots. Returns ``[T, D]``."""
        device, num_slots = self._kind.device, sees_TS.shape[1]
        index = torch.tensor(slots, device=device)
        mask_TS = torch.zeros(sees_TS.shape, dtype=self._kind.dtype).masked_fill_(~sees_TS, -torch.inf).to(device)

        def attend(
            layer: int, query_NTH: torch.Tensor, keys_KTH: torch.Tensor, values_KTH: torch.Tensor
        ) -> torch.Tensor:
            self._keys_LKSH[layer].index_copy_(1, index, keys_KTH)
            self._values_LKSH[layer].index_copy_(1, index, values_KTH)
            num_kv_heads, num_tokens = keys_KTH.shape[0], keys_KTH.shape[1]
            # The query heads of a KV head stand as more queries of one, as in fusion_node.engine.attention.
            folded = query_NTH.reshape(1, num_kv_heads, -1, query_NTH.shape[2])
            out = F.scaled_dot_product_attention(
                folded,
                self._keys_LKSH[layer, None, :, :num_slots],
                self._values_LKSH[layer, None, :, :num_slots],
                attn_mask=mask_TS.repeat(folded.shape[2] // num_tokens, 1),
            )
            return out.reshape(query_NTH.shape).transpose(0, 1)

        return self._kind.layers(hidden_TD, embedded_TD, torch.tensor(positions, device=device), attend)

    @torch.inference_mode()
    def _score(self, asked: Sequence[tuple[_Node, int]]) -> None:
        """Candidates of the nodes that have none yet; with each its depth."""
        todo = {node: depth for node, depth in asked if node.candidates is None and node.out_D is not None}
        if not todo:
            return
        outs_TD = torch.stack([node.out_D for node in todo if node.out_D is not None])
        scores_TW = self._kind.logits(outs_TD, [depth + 1 for depth in todo.values()]).cpu()
        token_ids = self._kind.token_ids
        if self._noise is not None:
            noise = [self._noise.at(len(self._text) + depth)[: self._kind.vocabulary] for depth in todo.values()]
            noise_TV = torch.from_numpy(np.stack(noise))
            scores_TW = scores_TW / self._noise.temperature
            scores_TW += noise_TV[:, : scores_TW.shape[1]] if token_ids is None else noise_TV[:, token_ids]
        for node, found in zip(todo, best_candidates(scores_TW), strict=True):
            node.candidates = [(int(token_ids[i]), share) for i, share in found] if token_ids is not None else found
