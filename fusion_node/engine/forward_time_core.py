"""How long a forward of so many rows takes: a line that is learned from the forwards themselves.

Guarantees: the estimate never falls with the number of rows and is never negative; one slow forward among five of its
size (a page fault, another program) hardly moves it, three do.

Assumes: forwards of the same layers. The length of the contexts is left out.

No states and no timers. Source: weighted least squares through medians; the line is the roofline of a decoder with
its corner cut off (weights are read once whatever the rows, arithmetic grows with them). Still ugly: attention over
long contexts shows as a slow change of the line rather than as a term of its own.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

SAMPLES = 5
"""Forwards remembered per size: a median that three new ones can move."""

_MIN_SPREAD = 1.5
"""Ratio of the largest to the smallest size below which a slope would be noise."""


@dataclass(slots=True)
class ForwardTime:
    """Seconds of a forward as ``fixed_s + row_s * rows``.

    Until two sizes were seen, all of the time is put down to the rows: that overstates what one more row costs, so
    that whoever plans with it starts with small forwards and learns from them.

    Attributes:
        fixed_s: seconds of a forward without rows.
        row_s: seconds that each row adds.
    """

    fixed_s: float = 0.0
    row_s: float = 0.0
    _sizes: dict[int, deque[tuple[int, float]]] = field(default_factory=dict)
    """By the number of bits of the number of rows: sizes 1, 2-3, 4-7, …"""

    @property
    def is_known(self) -> bool:
        """Whether anything was learned yet."""
        return bool(self._sizes)

    def predict(self, num_rows: int) -> float:
        """Seconds for a forward of ``num_rows``; 0 while nothing is known."""
        return self.fixed_s + self.row_s * num_rows

    def learn(self, num_rows: int, seconds: float) -> None:
        """Takes a measured forward. What no clock can have measured is left out."""
        if num_rows < 1 or not 0.0 < seconds < float("inf"):
            return
        self._sizes.setdefault(num_rows.bit_length(), deque(maxlen=SAMPLES)).append((num_rows, seconds))
        self._fit()

    def _fit(self) -> None:
        points = [
            (sum(rows for rows, _ in samples) / len(samples), statistics.median(s for _, s in samples))
            for samples in self._sizes.values()
        ]
        sizes = [rows for rows, _ in points]
        # Weighted by 1 / seconds**2: a tenth too much is as bad for a small forward as for a large one.
        weights = [1 / (seconds * seconds) for _, seconds in points]
        total = sum(weights)
        mean_rows = sum(w * rows for w, (rows, _) in zip(weights, points, strict=True)) / total
        mean_s = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
        if max(sizes) < _MIN_SPREAD * min(sizes):
            self.fixed_s, self.row_s = 0.0, mean_s / mean_rows
            return
        variance = sum(w * (rows - mean_rows) ** 2 for w, (rows, _) in zip(weights, points, strict=True))
        covariance = sum(w * (rows - mean_rows) * (s - mean_s) for w, (rows, s) in zip(weights, points, strict=True))
        self.row_s = max(0.0, covariance / variance)
        self.fixed_s = mean_s - self.row_s * mean_rows
        if self.fixed_s < 0.0:
            self.fixed_s = 0.0
            self.row_s = sum(w * rows * s for w, (rows, s) in zip(weights, points, strict=True)) / sum(
                w * rows * rows for w, (rows, _) in zip(weights, points, strict=True)
            )
