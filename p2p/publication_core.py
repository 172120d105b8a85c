"""When a node's record and its provider records go into the DHT.

The DHT answers *who*, not *how it is now*. A put or a provide costs a look-up, so neither follows every announcement: a
record is put every PUT_INTERVAL_S, provider records are sent every PROVIDE_INTERVAL_S. A newcomer's first look-ups know
few peers; so it publishes EARLY_PUBLISHES times in a row, and again when a new part of the swarm has been reached.

Guarantees: at most one publication is under way; one that failed is due again at the next announcement. No clock and
no I/O; times are seconds of one monotonic clock, handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusion_node.types import ModelId

PUT_INTERVAL_S = 40.0
"""Storing a record in the DHT costs a look-up, the largest part of what an idle node sends in a small swarm. At every
second announcement it is still there nearly always, and whoever finds it asks its node for the newest anyway."""

PROVIDE_INTERVAL_S = 120.0
"""Storers keep provider records for 600 s."""

EARLY_PUBLISHES = 3
"""As many times a newcomer publishes at every announcement, because its first look-ups knew few peers."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Put the own record, if ``put``, and provide the keys of these models; None stands for "a node of any model"."""

    put: bool
    provide: tuple[ModelId | None, ...]


class Publication:
    """What the DHT should hold of us, and when it is due again."""

    def __init__(self) -> None:
        self._model_ids: tuple[ModelId, ...] = ()
        self._put_at: float | None = None
        self._provided_at: dict[ModelId | None, float] = {}
        self._early_left = EARLY_PUBLISHES
        self._is_withdrawn = True
        self._is_under_way = False

    def want(self, model_ids: Sequence[ModelId]) -> None:
        """The node serves these models, and has a new record."""
        self._model_ids = tuple(model_ids)
        self._is_withdrawn = False

    def withdraw(self) -> None:
        self._is_withdrawn = True
        self._model_ids = ()

    def hurry(self) -> None:
        """A new part of the swarm has been reached: publish there too."""
        self._early_left = max(self._early_left, 1)

    def forget(self) -> None:
        """What was published is lost, and what is under way comes to nothing."""
        self._put_at = None
        self._provided_at.clear()
        self._early_left = EARLY_PUBLISHES
        self._is_under_way = False

    def next(self, now_s: float) -> Publish | None:
        """What is to be published now. ``done`` or ``forget`` must follow before there is more."""
        if self._is_withdrawn or self._is_under_way:
            return None
        is_early = self._early_left > 0
        self._early_left = max(0, self._early_left - 1)
        put = is_early or self._put_at is None or now_s - self._put_at >= PUT_INTERVAL_S
        provide = tuple(
            model_id
            for model_id in (None, *self._model_ids)
            if is_early or now_s - self._provided_at.get(model_id, float("-inf")) >= PROVIDE_INTERVAL_S
        )
        if not put and not provide:
            return None
        if put:
            self._put_at = now_s
        self._provided_at.update(dict.fromkeys(provide, now_s))
        self._is_under_way = True
        return Publish(put, provide)

    def done(self) -> None:
        self._is_under_way = False
