"""Choosing the next token, on the user's side only.

The token is the arg max of the processed log-probabilities plus Gumbel noise, which draws from exactly the softmax
distribution (the Gumbel-max trick). The noise is a function of (seed, position) and nothing else, so for a given seed
the text is the same whatever the timing, the nodes or the number of attempts.

Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fusion_node.errors import ConfigError

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Attributes:
        max_tokens: of the answer.
        temperature: 0 takes the most probable token (greedy).
        top_p: keep the smallest set of tokens whose probability reaches this.
        top_k: keep this many tokens; None keeps all.
        min_p: drop tokens below this fraction of the most probable one's probability.
        repetition_penalty: above 1 makes tokens that occurred in prompt or answer less likely.
        seed: of the noise; None draws one per call.
        stop: the answer ends before the first of these strings.
        ignore_eos: go on after an end-of-sequence token (for measuring).

    Raises:
        ConfigError: when a value is out of its range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = field(default=(), repr=False)
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks = (
            (self.max_tokens >= 1, "max_tokens must be at least 1"),
            (0.0 <= self.temperature <= 100.0, "temperature must be between 0 and 100"),
            (0.0 < self.top_p <= 1.0, "top_p must be above 0 and at most 1"),
            (self.top_k is None or self.top_k >= 1, "top_k must be at least 1"),
            (0.0 <= self.min_p <= 1.0, "min_p must be between 0 and 1"),
            (0.01 <= self.repetition_penalty <= 100.0, "repetition_penalty must be between 0.01 and 100"),
            (self.seed is None or 0 <= self.seed < 2**63, "seed must be between 0 and 2^63 - 1"),
            (len(self.stop) <= 16, "at most 16 stop strings"),
            (all(self.stop), "a stop string is empty"),
        )
        for ok, message in checks:
            if not ok:
                raise ConfigError(message)


def choose_token(
    logits_V: Logits, params: SamplingParams, *, seed: int, position: int, seen: Sequence[int] | set[int]
) -> int:
    """The next token.

    Args:
        seed: of the noise; not used when greedy.
        position: of the token to be chosen, within prompt and answer.
        seen: token ids of prompt and answer, for the repetition penalty.
    """
    scores = logits_V.astype(np.float64)
    if params.repetition_penalty != 1.0:
        _penalise(scores, seen, params.repetition_penalty)
    if params.temperature == 0.0:
        return int(scores.argmax())
    # The best one at 0, so that nothing but the hopeless overflows, to minus infinity, at a temperature of almost 0.
    scores -= scores.max()
    with np.errstate(over="ignore"):
        scores /= params.temperature
    scores = _keep_probable(scores, params)
    return int((scores + gumbel_noise(seed, position, len(scores))).argmax())


def gumbel_noise(seed: int, position: int, size: int) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise for every token of the vocabulary, from a counter-based generator.

    Source: Maddison, Tarlow & Minka, "A* Sampling", 2014, §2; Philox: Salmon et al., SC'11.
    """
    uniform = np.random.Generator(np.random.Philox(key=[seed, position])).random(size)
    # random() is in [0, 1): 0 would be -inf, which loses nothing, but warns.
    return -np.log(-np.log(np.maximum(uniform, np.finfo(np.float64).tiny)))


def _penalise(scores: npt.NDArray[np.float64], seen: Sequence[int] | set[int], penalty: float) -> None:
    """Source: Keskar et al., "CTRL", 2019, §4.1, in the form that transformers applies."""
    ids = np.fromiter(set(seen), dtype=np.int64)
    ids = ids[ids < len(scores)]
    values = scores[ids]
    scores[ids] = np.where(values < 0, values * penalty, values / penalty)


def _keep_probable(scores: npt.NDArray[np.float64], params: SamplingParams) -> npt.NDArray[np.float64]:
    """Sets what top-k, top-p and min-p drop to minus infinity; at least the most probable token stays."""
    if params.top_k is not None and params.top_k < len(scores):
        limit = np.partition(scores, -params.top_k)[-params.top_k]
        scores = np.where(scores < limit, -np.inf, scores)
    if params.top_p < 1.0:
        order = np.argsort(-scores, kind="stable")
        probabilities = _softmax(scores[order])
        before = np.cumsum(probabilities) - probabilities
        scores = scores.copy()
        scores[order[before >= params.top_p]] = -np.inf
    if params.min_p > 0.0:
        scores = np.where(scores < scores.max() + math.log(params.min_p), -np.inf, scores)
    return scores


def _softmax(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    exps = np.exp(scores - scores.max())
    result: npt.NDArray[np.float64] = exps / exps.sum()
    return result
