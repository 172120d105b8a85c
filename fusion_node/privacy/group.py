"""What a member of a fusion group can make of what it was sent.

Contributions are outputs of linear maps that everybody knows, so each is as many equations in its sender's part of a
state as the receiver has outputs. Where there are no fewer than unknowns, the receiver has the state whole; at layer 0
the nearest row of the embedding is then the token. A masked contribution by itself says nothing. Of those of all others
a member has the sum, which are equations in what they have together.

Shapes: T tokens, D hidden size, R equations, I unknowns, X values of a view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fusion_node.engine.node_views import GroupTruth, MemberView
from fusion_node.engine.public_model import LayerStates, PublicModel
from fusion_node.privacy.attacks import Floats, relative_error, solve
from fusion_node.privacy.findings import NEAREST_EMBEDDING, Solved, Tally
from fusion_node.privacy.matching import Seen
from fusion_node.slices import Dims, Exchange

LABELS = {
    Exchange.QKV: "Q, K and V",
    Exchange.O: "attention outputs",
    Exchange.GATE_UP: "gates and ups",
    Exchange.DOWN: "MLP outputs",
}

_STATES = {
    Exchange.QKV: "hidden state before the layer",
    Exchange.O: "what the heads put out",
    Exchange.GATE_UP: "hidden state before the MLP",
    Exchange.DOWN: "what is inside of the MLP",
}
"""What contributions are a linear map of. The others' parts of a hidden state are all that a member lacks of it."""

SOLVED, SUMS_SOLVED = "all columns, solved for from contributions", "all columns, solved for from sums"
RANDOM, SHUFFLED = "control: random numbers", "control: its columns of another token"


def solved_exchanges(dims: Dims) -> tuple[Exchange, ...]:
    """Those that are solved. Of experts none: every row has equations of its own there, and queries, keys and values
    say as much."""
    return (Exchange.QKV, Exchange.O) if dims.num_experts else tuple(LABELS)


class GroupAttack:
    """On one prompt.

    Args:
        view: what the attacker has.
        truth: against which it is measured; no attack reads it.
        states: the truth of what is inside of layers, of all that are looked at.
    """

    def __init__(
        self,
        model: PublicModel,
        view: MemberView,
        truth: GroupTruth,
        states: Mapping[int, LayerStates],
        tally: Tally,
        rng: np.random.Generator,
    ) -> None:
        self._model = model
        self._view = view
        self._truth = truth
        self._states = states
        self._tally = tally
        self._rng = rng
        self._others = [column for column in range(model.dims.hidden) if column not in view.own.columns]
        self._before: dict[int, Floats] = {}
        """As solved for from contributions, by layer."""
        self._middle: dict[int, Floats] = {}
        """As solved for from sums."""

    @property
    def own_name(self) -> str:
        return f"its own {len(self._view.own.columns)} of {self._model.dims.hidden} columns"

    def solve(self) -> None:
        """Takes everything that came for equations."""
        exchanges = solved_exchanges(self._model.dims)
        for layer in self._states:
            self._before[layer] = self._solve_state(layer, Exchange.QKV)
            self._solve_inner(layer, Exchange.O)
            if Exchange.GATE_UP in exchanges:
                self._solve_state(layer, Exchange.GATE_UP)
                self._solve_inner(layer, Exchange.DOWN)
            self._solve_masked(layer, Exchange.QKV)
            self._solve_sums(layer, Exchange.QKV)
            if Exchange.GATE_UP in exchanges:
                self._solve_masked(layer, Exchange.GATE_UP)
                self._middle[layer] = self._solve_sums(layer, Exchange.GATE_UP)

    def read(self, token_ids: Sequence[int]) -> list[int]:
        """Takes rows before layer 0 for the tokens with the nearest embedding, and returns those of the solved ones."""
        solved_TD = self._solve_state(0, Exchange.QKV) if 0 not in self._before else self._before[0]
        random_TD = self._solve_state(0, Exchange.QKV, is_control=True)
        self._nearest(self.own_name, self._view.columns_Td[0], self._view.own.columns, token_ids)
        found = self._nearest(SOLVED, solved_TD, range(self._model.dims.hidden), token_ids)
        self._nearest(RANDOM, random_TD[:, self._others], self._others, token_ids, is_control=True)
        return found

    def views(self) -> list[Seen]:
        """What matching is to tell tokens apart by, from the widest to the narrowest, and a control."""
        view, layers = self._view, self._states
        columns, kv_head = slice(view.own.columns.start, view.own.columns.stop), view.own.kv_heads[0]
        own = {n: view.columns_Td[n] for n in layers}
        keys, values = ({n: kept[n][0] for n in layers} for kept in (view.keys_KTH, view.values_KTH))
        squares = {n: np.log(view.summed(n, Exchange.QKV)[:, -1:]) for n in layers}
        # Every position has what the one before it has, which says nothing of its own token.
        shuffled = {n: np.roll(rows_Td, 1, axis=0) for n, rows_Td in own.items()}
        return [
            Seen(SOLVED, self._before, lambda s: s.before_TD),
            Seen(SUMS_SOLVED, self._middle, lambda s: s.middle_TD),
            Seen(self.own_name, own, lambda s: s.before_TD[:, columns]),
            Seen("keys of one of its heads", keys, lambda s: s.keys_KTH[kv_head]),
            Seen("values of one of its heads", values, lambda s: s.values_KTH[kv_head]),
            Seen("one number, the sum of squares", squares, lambda s: _log_squares(s.before_TD)),
            Seen(SHUFFLED, shuffled, lambda s: s.before_TD[:, columns], is_control=True),
        ]

    def _nearest(
        self, name: str, rows_Td: Floats, columns: Sequence[int], true: Sequence[int], *, is_control: bool = False
    ) -> list[int]:
        found: list[int] = self._model.nearest_tokens(rows_Td, columns).tolist()
        self._tally.note_read(name, NEAREST_EMBEDDING, 0, self._model.vocabulary, found, true, is_control=is_control)
        return found

    def _true_state(self, layer: int, exchange: Exchange) -> Floats:
        return (self._truth.before_TD if exchange is Exchange.QKV else self._truth.middle_TD)[layer]

    def _own_state(self, layer: int, exchange: Exchange) -> Floats:
        """``[T, D]`` with the own columns in their places, and nothing in the others."""
        own_Td = (self._view.columns_Td if exchange is Exchange.QKV else self._view.middle_Td)[layer]
        state_TD = np.zeros((len(own_Td), self._model.dims.hidden), np.float32)
        state_TD[:, self._view.own.columns.start : self._view.own.columns.stop] = own_Td
        return state_TD

    def _solve_state(self, layer: int, exchange: Exchange, *, is_control: bool = False) -> Floats:
        """A hidden state ``[T, D]``: each other member's columns from what that one contributed."""
        state_TD = self._own_state(layer, exchange)
        for k in self._view.others:
            columns = self._view.bounds[k].columns
            block_RI = self._model.block(layer, exchange, self._view.own, columns)
            outputs_TR = self._view.received[layer, exchange, k][:, : len(block_RI)]
            if is_control:
                outputs_TR = (self._rng.standard_normal(outputs_TR.shape) * outputs_TR.std()).astype(np.float32)
            place = slice(columns.start, columns.stop)
            state_TD[:, place] = found_TI = solve(block_RI, outputs_TR)
            error = relative_error(found_TI, self._true_state(layer, exchange)[:, place])
            sent = RANDOM if is_control else f"contributions to {LABELS[exchange]}"
            self._tally.note_solved(
                Solved(sent, _STATES[exchange], layer, len(block_RI), len(columns), error, is_control)
            )
        return state_TD

    def _solve_masked(self, layer: int, exchange: Exchange) -> None:
        """Each other member's columns from what that one contributed under masks, where there are any."""
        for k in self._view.others if self._view.masked else ():
            columns = self._view.bounds[k].columns
            block_RI = self._model.block(layer, exchange, self._view.own, columns)
            found_TI = solve(block_RI, self._view.masked[layer, exchange, k][:, : len(block_RI)])
            true_TI = self._true_state(layer, exchange)[:, columns.start : columns.stop]
            sent, error = f"masked contributions to {LABELS[exchange]}", relative_error(found_TI, true_TI)
            self._tally.note_solved(
                Solved(sent, _STATES[exchange], layer, len(block_RI), len(columns), error, is_masked=True)
            )

    def _solve_sums(self, layer: int, exchange: Exchange) -> Floats:
        """A hidden state ``[T, D]``: all other members' columns together, from the sums of what they contributed."""
        state_TD = self._own_state(layer, exchange)
        others = self._others
        block_RD = self._model.block(layer, exchange, self._view.own, range(self._model.dims.hidden))
        rest_TR = self._view.others_summed.get((layer, exchange))
        if rest_TR is None:
            rest_TR = self._view.summed(layer, exchange) - self._view.contributed[layer, exchange]
        state_TD[:, others] = found_TI = solve(block_RD[:, others], rest_TR[:, : len(block_RD)])
        error = relative_error(found_TI, self._true_state(layer, exchange)[:, others])
        sent = f"sums of {LABELS[exchange]} alone"
        self._tally.note_solved(Solved(sent, _STATES[exchange], layer, len(block_RD), len(others), error))
        return state_TD

    def _solve_inner(self, layer: int, exchange: Exchange) -> None:
        """What other members' heads or channels made, from what they contributed to the own columns."""
        states, head_dim = self._states[layer], self._model.dims.head_dim
        for k in self._view.others:
            bounds = self._view.bounds[k]
            inputs, true_TX = bounds.channels, states.inner_TF
            if exchange is Exchange.O:
                inputs = range(bounds.heads.start * head_dim, bounds.heads.stop * head_dim)
                true_TX = states.attended_TX
            if true_TX is None:
                continue
            block_RI = self._model.block(layer, exchange, self._view.own, inputs)
            found_TI = solve(block_RI, self._view.received[layer, exchange, k])
            error = relative_error(found_TI, true_TX[:, inputs.start : inputs.stop])
            sent = f"contributions to {LABELS[exchange]}"
            self._tally.note_solved(Solved(sent, _STATES[exchange], layer, len(block_RI), len(inputs), error))


def _log_squares(rows_BD: Floats) -> Floats:
    squares_B1: Floats = np.log(np.square(rows_BD).sum(axis=1, keepdims=True))
    return squares_B1
