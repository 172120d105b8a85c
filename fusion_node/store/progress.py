"""How the store tells how far it is, without knowing what a terminal is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told about one piece of work after another. Called from one thread at a time, maybe not the caller's."""

    def start(self, what: str, total_bytes: int | None) -> None:
        """A piece of work begins; ``total_bytes`` is None when its size is unknown. The one before is done."""

    def advance(self, num_bytes: int) -> None:
        """Another ``num_bytes`` of the current piece are done."""


class NoProgress:
    """Ignores everything."""

    def start(self, what: str, total_bytes: int | None) -> None:
        pass

    def advance(self, num_bytes: int) -> None:
        pass
