"""What is measured: the engine with all layers, driven as a node drives it, with the user's side in the same thread.

No network and no event loop. The partner is transformers alone, with the same weights, types and threads, in the same
process; the two take turns.

Shapes: T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import BaseStreamer
from transformers.utils import logging as hf_logging

from fusion_node.engine.boundary import Boundary
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.session_log_core import SessionLog, StepRows
from fusion_node.engine.shard_engine import ShardEngine
from fusion_node.engine.stage import Stage
from fusion_node.engine.weights import TensorSource
from fusion_node.types import LayerRange

Work = tuple["Session", StepRows, torch.Tensor]
"""A session, its step, and the rows that the step came with."""


class Session:
    """One sequence: its log, and the name of its block table."""

    def __init__(self, key: int, max_positions: int) -> None:
        self.key = key
        self._log = SessionLog(max_positions)
        self._last_node = 0

    def step(self, num_rows: int, parents: Sequence[int] = ()) -> StepRows:
        """The next step; all before it is committed, and a chain commits itself, as in a plain answer.

        Args:
            parents: of a tree, per row the row that it hangs on; -1 is the last row of the step before.
        """
        first, last = self._last_node + 1, self._last_node
        applied = self._log.apply(
            self._log.next_sequence,
            first_node=first,
            num_rows=num_rows,
            parent=last,
            parents=[last if row < 0 else first + row for row in parents],
            advance=last if parents else last + num_rows,
        )
        assert isinstance(applied, StepRows), applied
        self._last_node += num_rows
        return applied


class Rig:
    """A model's layers and its boundary on one device."""

    def __init__(self, engine: ShardEngine, boundary: Boundary) -> None:
        self.engine = engine
        self.boundary = boundary
        self.device = engine.stages[0].device
        self.forward_s = 0.0
        """Seconds of all forwards up to now."""
        self._keys = itertools.count()

    @classmethod
    def load(cls, source: TensorSource, *, device: torch.device, num_positions: int, numerics: str = "fp32") -> Rig:
        """Loads all layers, and makes room for the KV of ``num_positions``."""
        kind = numerics_class(numerics)
        num_layers = source.config["num_hidden_layers"]
        stage = Stage.load(source, LayerRange(0, num_layers), numerics=kind, device=device)
        engine = ShardEngine([stage], kv_budget_bytes=num_positions * stage.kv_bytes_per_position)
        return cls(engine, Boundary.load(source, numerics=kind, device=device))

    def open(self, max_positions: int) -> Session:
        """A new sequence."""
        session = Session(next(self._keys), max_positions)
        opened = self.engine.blocks.open(session.key, owner=str(session.key), max_slots=max_positions)
        assert isinstance(opened, int), opened
        return session

    def close(self, session: Session) -> None:
        self.engine.blocks.close(session.key)

    def forward(self, work: Sequence[Work]) -> list[torch.Tensor]:
        """One packed forward of whole steps: the hidden rows of each."""
        began = time.perf_counter()
        planned = self.engine.plan(
            self.engine.layers, [(session.key, step, 0, len(step.live_rows), True) for session, step, _ in work]
        )
        outputs = self.engine.run(planned, [rows for _, _, rows in work])
        synchronize(self.device)
        self.forward_s += time.perf_counter() - began
        return [rows for rows in outputs if rows is not None]

    def begin(self, ids: Sequence[int], max_positions: int) -> tuple[Session, int]:
        """Opens a sequence with this prompt in one forward; returns the next token as well."""
        session = self.open(max_positions)
        rows_TD = self.forward([(session, session.step(len(ids)), self.boundary.embed(ids))])[0]
        return session, int(self.boundary.logits(rows_TD[-1:])[0].argmax())

    def decode(self, sessions: Sequence[Session], tokens: Sequence[int]) -> list[int]:
        """One token further for each of the sequences, in one forward; the next token of each."""
        rows_TD = self.boundary.embed(tokens)
        outputs = self.forward([(s, s.step(1), rows_TD[i : i + 1]) for i, s in enumerate(sessions)])
        hidden_TD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        next_tokens: list[int] = self.boundary.logits(hidden_TD).argmax(1).tolist()
        return next_tokens

    def greedy(self, ids: Sequence[int], num_tokens: int) -> tuple[list[int], list[float]]:
        """Tokens after the prompt, and when each was there."""
        session, token = self.begin(ids, len(ids) + num_tokens)
        tokens, times = [token], [time.perf_counter()]
        while len(tokens) < num_tokens:
            tokens += self.decode([session], tokens[-1:])
            times.append(time.perf_counter())
        self.close(session)
        return tokens, times


class Transformers:
    """The whole model by transformers alone."""

    def __init__(self, path: Path, *, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        hf_logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
        self._model = model.eval().to(device)
        # The model's own settings fill whatever a call leaves open: they may sample.
        self._model.generation_config = GenerationConfig()
        self._device = device

    @torch.inference_mode()
    def greedy(self, ids: Sequence[int], num_tokens: int) -> tuple[list[int], list[float]]:
        """Tokens of ``generate`` after the prompt, and when each was there."""
        prompt, clock = torch.tensor([list(ids)], device=self._device), _Clock()
        settings = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
        output = self._model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), generation_config=settings, streamer=clock
        )
        return [int(token) for token in output[0, len(ids) :]], clock.times

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int]) -> int:
        """One forward over all tokens with a KV cache, as ``generate`` begins; the next token."""
        prompt = torch.tensor([list(ids)], device=self._device)
        return int(self._model(input_ids=prompt, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())


class _Clock(BaseStreamer):  # type: ignore[misc]
    """Notes when ``generate`` has a token; it hands over the prompt first."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._saw_prompt = False

    def put(self, value: Any) -> None:
        if self._saw_prompt:
            self.times.append(time.perf_counter())
        self._saw_prompt = True

    def end(self) -> None:
        pass


def long_text() -> str:
    """Half a megabyte of English that every Python brings along: its reference manual."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def interleaved(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender, one call per round, all in turn and each second round in reverse.

    What slows the machine for a while slows neighbours in a round alike, so that ratios within a round stay what they
    are. One more call of each comes first and is not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        names = list(contenders)
        for name in names if number % 2 else names[::-1]:
            began = time.perf_counter()
            contenders[name]()
            if number:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median over the rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def gaps(times: Sequence[float]) -> list[float]:
    """From each to the next."""
    return [after - before for before, after in itertools.pairwise(times)]


def median_ms(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)
