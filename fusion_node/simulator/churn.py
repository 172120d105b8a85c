"""Who stays how long, and who comes when.

Lifetimes are Weibull with a shape below one: most of those who come leave soon, and most of those who are there have
been for long and stay. Source: Stutzbach and Rejaie, "Understanding Churn in Peer-to-Peer Networks", IMC 2006: session
lengths of Gnutella, Kad and BitTorrent are fitted by Weibull distributions (shapes 0.34 to 0.59 in their BitTorrent
traces) and by log-normal ones, and neither by exponential nor by Pareto ones. SHAPE is the largest of these. The mean
is a choice: machines that are left on to serve stay longer than the minutes of people who download a file.

Arrivals are Poisson, with a rate that follows the hour of the day in each region: highest in the evening, when private
machines are on. The swarm begins in equilibrium: whoever is there at the start is some way into a lifetime of which
long ones are the more likely, in proportion to their length.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from fusion_node.simulator.network import UTC_OFFSET_HOURS

SHAPE = 0.59
PEAK_HOUR = 20.0
HOUR_S = 3600.0
MIN_LIFETIME_S = 30.0
"""Who is gone sooner was never seen."""


@dataclass(frozen=True, slots=True)
class Churn:
    """How nodes come and go.

    Attributes:
        mean_lifetime_s: infinity: nobody leaves, and nobody comes.
        day_share: how far the rate of arrivals swings about its mean within a day, 0 to 1.
    """

    mean_lifetime_s: float
    day_share: float = 0.4
    shape: float = SHAPE

    @property
    def scale_s(self) -> float:
        return self.mean_lifetime_s / math.gamma(1 + 1 / self.shape)

    def lifetime_s(self, chance: random.Random) -> float:
        """Of one that comes now."""
        if math.isinf(self.mean_lifetime_s):
            return math.inf
        return max(MIN_LIFETIME_S, chance.weibullvariate(self.scale_s, self.shape))

    def remaining_s(self, chance: random.Random) -> float:
        """Of one that is there when the world begins.

        A lifetime chosen in proportion to its length, whose power of ``shape`` is Gamma distributed with
        ``1 + 1/shape``; a uniform part of it is left.
        """
        if math.isinf(self.mean_lifetime_s):
            return math.inf
        whole_s = self.scale_s * chance.gammavariate(1 + 1 / self.shape, 1.0) ** (1 / self.shape)
        return float(whole_s * chance.random())

    def arrival_after_s(self, num_nodes: int, region: int, share: float, now: float, chance: random.Random) -> float:
        """Until the next one comes in a region that has this share of ``num_nodes`` on average.

        Source: thinning, Lewis and Shedler, 1979.
        """
        if math.isinf(self.mean_lifetime_s) or share <= 0.0:
            return math.inf
        mean_rate = num_nodes * share / self.mean_lifetime_s
        highest = mean_rate * (1 + self.day_share)
        at = now
        while True:
            at += chance.expovariate(highest)
            hour = at / HOUR_S + UTC_OFFSET_HOURS[region]
            rate = mean_rate * (1 + self.day_share * math.cos((hour - PEAK_HOUR) / 24 * 2 * math.pi))
            if chance.random() * highest < rate:
                return at - now
