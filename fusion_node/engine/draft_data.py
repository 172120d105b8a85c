"""What a draft head learns from: the target's own answers and given text, run through the target, kept on disk.

Per position: the token, the target's hidden state at a few depths, and its sixteen most probable next tokens. Answers
are the target's own, because a draft has to guess what the target says and not what people write.

Guarantees: what is in the index of a folder is complete and was hashed when it was written; a run that is killed loses
at most one shard and the answers under way, and the next run with the same settings goes on. An answer depends on its
number and the seed, not on which others are computed beside it, up to rounding. A folder never grows beyond its limit.

Shapes: T positions of one text, k features, D hidden size, V vocabulary, R packed rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PretrainedConfig

from fusion_node.engine.architectures import load_config, max_positions
from fusion_node.engine.boundary import Boundary
from fusion_node.engine.kv_cache import KVPool
from fusion_node.engine.numerics import NumericsClass
from fusion_node.engine.session_log_core import StepRows
from fusion_node.engine.stage import Stage, StepInput
from fusion_node.engine.trained_head import normed
from fusion_node.engine.weights import TensorSource
from fusion_node.errors import ConfigError, StoreCorrupted
from fusion_node.store.files import check_room, disk_free, read_bounded, sha256_of, write_durably
from fusion_node.types import LayerRange

NUM_TOP = 16
"""Next tokens that are kept per position: .95 of the built-in model's probability at temperature 1."""

SHARD_BYTES = 8 * 2**20
"""Written at a time: what a kill loses, a minute of a small model on a CPU."""

_ROWS_PER_CALL = 512
"""Of one packed call: prompts wait for the next when it is full."""

_LOGIT_ROWS = 256
"""Rows whose logits are in memory at once: 50 MiB for a vocabulary of 49,152."""

_INDEX_FILE = "index.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Job:
    """One text to record.

    Attributes:
        number: its name in the data; the noise of its sampling depends on it.
        token_ids: what is given, at least two.
        num_new: tokens to add, at most; 0 records the text as it is.
        temperature: of the answer; 0 is greedy.
    """

    number: int
    token_ids: tuple[int, ...] = field(repr=False)
    num_new: int = 0
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Recording:
    """One text with what the target thinks of it.

    Attributes:
        num_prompt: positions in front that were given; 0 when the whole text was, and then all of it is to be learnt.
        tokens_T: ids, int32.
        features_TkD: rows after the layers of the head, each divided by its root mean square, fp16.
        top_ids_TK: the most probable tokens after each position, best first, int32.
        top_probabilities_TK: theirs at temperature 1, fp16. Zero where they were not computed: inside a prompt.
    """

    number: int
    num_prompt: int
    tokens_T: torch.Tensor = field(repr=False)
    features_TkD: torch.Tensor = field(repr=False)
    top_ids_TK: torch.Tensor = field(repr=False)
    top_probabilities_TK: torch.Tensor = field(repr=False)

    @property
    def num_positions(self) -> int:
        return len(self.tokens_T)

    @property
    def first_start(self) -> int:
        """The first position from which a draft would start: the prompt's last."""
        return max(self.num_prompt - 1, 0)

    @property
    def num_learnt(self) -> int:
        """Positions whose next token is to be learnt."""
        return self.num_positions - self.first_start


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """A third, two thirds and the whole of the depth."""
    return tuple(sorted({max(1, round(num_layers * part / 3)) for part in (1, 2, 3)}))


class DraftTarget:
    """A whole model on one device, computed as nodes compute it.

    Args:
        feature_layers: rows after so many layers are what heads are told; the last one is the last layer's.
        eos_ids: tokens that end an answer.
    """

    def __init__(
        self,
        stage: Stage,
        boundary: Boundary,
        *,
        config: PretrainedConfig,
        feature_layers: Sequence[int],
        eos_ids: Sequence[int] = (),
    ) -> None:
        self.stage = stage
        self.boundary = boundary
        self.config = config
        self.vocab_size: int = config.vocab_size
        self.max_positions = max_positions(config)
        self.eos_ids = frozenset(eos_ids)
        self.num_layers = stage.layers.stop
        self.feature_layers = tuple(feature_layers)
        if (
            not self.feature_layers
            or list(self.feature_layers) != sorted(set(self.feature_layers))
            or self.feature_layers[0] < 1
            or self.feature_layers[-1] != self.num_layers
        ):
            raise ConfigError(f"feature layers have to rise from 1 at least to the last one, {self.num_layers}")
        cuts = [0, *self.feature_layers]
        self._parts = [stage.part(LayerRange(*pair)) for pair in itertools.pairwise(cuts)]

    @classmethod
    def load(
        cls,
        source: TensorSource,
        *,
        numerics: NumericsClass,
        device: torch.device,
        feature_layers: Sequence[int] | None = None,
        eos_ids: Sequence[int] = (),
    ) -> DraftTarget:
        """Reads all layers and both ends.

        Raises:
            ConfigError, ResourceExhausted, StoreCorrupted: as ``Stage.load`` and ``Boundary.load``.
        """
        config = load_config(source)
        stage = Stage.load(source, LayerRange(0, config.num_hidden_layers), numerics=numerics, device=device)
        boundary = Boundary.load(source, numerics=numerics, device=device)
        return cls(
            stage,
            boundary,
            feature_layers=feature_layers or default_feature_layers(config.num_hidden_layers),
            config=config,
            eos_ids=eos_ids,
        )

    @property
    def device(self) -> torch.device:
        return self.stage.device

    @property
    def hidden_size(self) -> int:
        return self.stage.hidden_size

    @property
    def bytes_per_position(self) -> int:
        """Of recorded data."""
        return len(self.feature_layers) * self.hidden_size * 2 + NUM_TOP * 6 + 4

    def forward(self, batch: Sequence[StepInput], pool: KVPool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """One packed call.

        Returns:
            Per input, the features ``[T, k, D]`` in float32, and the last layer's rows ``[T, D]``.
        """
        features: list[list[torch.Tensor]] = []
        for part in self._parts:
            rows = part.forward(batch, pool)
            if part.layers.stop in self.feature_layers:
                features.append([row.float() for row in rows])
            batch = [
                StepInput(item.step, row, item.runs, item.first_row) for item, row in zip(batch, rows, strict=True)
            ]
        return [torch.stack(of_item, dim=1) for of_item in zip(*features, strict=True)], rows


@dataclass(slots=True, repr=False)
class _Lane:
    """A text under way in its own stretch of the KV pool."""

    job: Job
    slots: range
    pending: list[int]
    tokens: list[int] = field(default_factory=list)
    features: list[torch.Tensor] = field(default_factory=list)
    top_ids: list[torch.Tensor] = field(default_factory=list)
    top_probabilities: list[torch.Tensor] = field(default_factory=list)


def record(
    target: DraftTarget,
    jobs: Iterable[Job],
    *,
    batch_size: int,
    max_tokens: int,
    seed: int = 0,
    on_tokens: Callable[[int], None] | None = None,
) -> Iterator[Recording]:
    """Runs texts through the target, several at a time, each as soon as a place is free.

    Args:
        batch_size: texts at a time.
        max_tokens: of a text with its answer; longer ones are cut.
        seed: of the sampling.
        on_tokens: told after every call how many positions it computed.

    Yields:
        Texts in the order in which they end.

    Raises:
        ConfigError: a text has less than two tokens, or ids beyond the vocabulary.
        ResourceExhausted: no room for the KV.
    """
    max_tokens = min(max_tokens, target.max_positions)
    pool = target.stage.new_pool(batch_size * max_tokens)
    free = [range(lane * max_tokens, (lane + 1) * max_tokens) for lane in reversed(range(batch_size))]
    waiting = iter(jobs)
    next_job = next(waiting, None)
    lanes: list[_Lane] = []
    while lanes or next_job is not None:
        num_rows = sum(len(lane.pending) for lane in lanes)
        while next_job is not None and free and (not lanes or num_rows + len(next_job.token_ids) <= _ROWS_PER_CALL):
            lane = _open(target, next_job, free.pop(), max_tokens)
            lanes.append(lane)
            num_rows += len(lane.pending)
            next_job = next(waiting, None)
        _advance(target, pool, lanes, seed)
        if on_tokens is not None:
            on_tokens(num_rows)
        ended = [lane for lane in lanes if not lane.pending]
        lanes = [lane for lane in lanes if lane.pending]
        for lane in ended:
            free.append(lane.slots)
            yield _recording(lane)


def _open(target: DraftTarget, job: Job, slots: range, max_tokens: int) -> _Lane:
    # One place at least is left for the answer.
    ids = list(job.token_ids[: max_tokens - (1 if job.num_new else 0)])
    if len(ids) < 2:
        raise ConfigError(f"text {job.number} is too short to learn from: two tokens at least")
    if not all(0 <= token < target.vocab_size for token in ids):
        raise ConfigError(f"text {job.number} has tokens that the model does not know: is the tokenizer another one's?")
    return _Lane(job, slots, ids)


def _advance(target: DraftTarget, pool: KVPool, lanes: Sequence[_Lane], seed: int) -> None:
    """Computes what is pending of every lane, and chooses what comes next."""
    batch = []
    embedded = target.boundary.embed([token for lane in lanes for token in lane.pending])
    first = 0
    for lane in lanes:
        done, new = len(lane.tokens), len(lane.pending)
        step = StepRows(
            live_rows=tuple(range(new)),
            nodes=tuple(range(done + 1, done + new + 1)),
            positions=tuple(range(done, done + new)),
            first_slot=done,
            is_chain=True,
            visible=(),
            num_committed=done,
            move=None,
        )
        batch.append(StepInput(step, embedded[first : first + new], (lane.slots[: done + new],)))
        first += new
    features, rows = target.forward(batch, pool)
    wanted = [row if lane.job.num_new == 0 else row[-1:] for lane, row in zip(lanes, rows, strict=True)]
    next_ids, top_ids, top_probabilities = _choose(target, lanes, wanted, seed)
    for lane, feature, row, next_id, ids, probabilities in zip(
        lanes, features, wanted, next_ids, top_ids, top_probabilities, strict=True
    ):
        skipped = len(lane.pending) - len(row)
        lane.tokens += lane.pending
        lane.features.append(normed(feature).half().cpu())
        lane.top_ids.append(torch.cat((torch.zeros((skipped, NUM_TOP), dtype=torch.int32), ids)))
        lane.top_probabilities.append(torch.cat((torch.zeros((skipped, NUM_TOP), dtype=torch.float16), probabilities)))
        longest = min(len(lane.job.token_ids) + lane.job.num_new, len(lane.slots))
        goes_on = next_id is not None and next_id not in target.eos_ids and len(lane.tokens) < longest
        lane.pending = [next_id] if next_id is not None and goes_on else []


def _choose(
    target: DraftTarget, lanes: Sequence[_Lane], rows: Sequence[torch.Tensor], seed: int
) -> tuple[list[int | None], list[torch.Tensor], list[torch.Tensor]]:
    """Per lane the next token (None for given text), and per row the most probable tokens with their probabilities."""
    packed, lengths = torch.cat(list(rows)), [len(row) for row in rows]
    temperatures = torch.tensor([lane.job.temperature for lane in lanes]).repeat_interleave(torch.tensor(lengths))
    uniform = torch.tensor([_uniform(seed, lane) for lane in lanes], dtype=torch.float64).repeat_interleave(
        torch.tensor(lengths)
    )
    chosen, ids, probabilities = [], [], []
    for first in range(0, len(packed), _LOGIT_ROWS):
        part = slice(first, first + _LOGIT_ROWS)
        logits_RV = target.boundary.logits_there(packed[part])
        top = torch.softmax(logits_RV, dim=-1).topk(min(NUM_TOP, logits_RV.shape[1]))
        chosen.append(_sampled(logits_RV, temperatures[part], uniform[part], top.indices[:, 0]))
        pad = (0, NUM_TOP - top.indices.shape[1])
        ids.append(torch.nn.functional.pad(top.indices.int().cpu(), pad))
        probabilities.append(torch.nn.functional.pad(top.values.half().cpu(), pad))
    all_chosen, all_ids, all_probabilities = torch.cat(chosen), torch.cat(ids), torch.cat(probabilities)
    last = zip(lanes, torch.split(all_chosen, lengths), strict=True)
    next_ids = [int(chosen[-1]) if lane.job.num_new else None for lane, chosen in last]
    return next_ids, list(torch.split(all_ids, lengths)), list(torch.split(all_probabilities, lengths))


def _sampled(
    logits_RV: torch.Tensor, temperatures_R: torch.Tensor, uniform_R: torch.Tensor, best_R: torch.Tensor
) -> torch.Tensor:
    """Inverse of the distribution function at the temperature; the best one at 0. On the CPU."""
    chosen = best_R.cpu().clone()
    drawn = torch.nonzero(temperatures_R > 0).flatten()
    if len(drawn):
        there = drawn.to(logits_RV.device)
        shares = torch.softmax(logits_RV[there] / temperatures_R[drawn].to(logits_RV)[:, None], dim=-1)
        if shares.device.type == "mps":
            shares = shares.cpu()  # it has no float64, in which alone so many add up to 1
        total = shares.double().cumsum(-1)
        goals = uniform_R[drawn].to(total)[:, None] * total[:, -1:]
        places = torch.searchsorted(total, goals, right=True).clamp(max=total.shape[1] - 1)
        chosen[drawn] = places[:, 0].cpu()
    return chosen


def _uniform(seed: int, lane: _Lane) -> float:
    """In [0, 1), of the text and its length alone."""
    philox = np.random.Philox(key=[seed, lane.job.number], counter=[0, 0, 0, len(lane.tokens) + len(lane.pending)])
    return float(np.random.Generator(philox).random())


def _recording(lane: _Lane) -> Recording:
    return Recording(
        lane.job.number,
        min(len(lane.job.token_ids), len(lane.tokens)) if lane.job.num_new else 0,
        torch.tensor(lane.tokens, dtype=torch.int32),
        torch.cat(lane.features),
        torch.cat(lane.top_ids),
        torch.cat(lane.top_probabilities),
    )


# On disk.


class DataSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What recordings depend on. A folder holds data of one such set.

    Attributes:
        texts: digest of all jobs that there could be.
    """

    model_id: str
    numerics: str
    feature_layers: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    seed: int
    texts: str


class _Shard(msgspec.Struct, frozen=True):
    name: str
    sha256: str
    numbers: tuple[int, ...]
    num_prompts: tuple[int, ...]
    lengths: tuple[int, ...]


class _Index(msgspec.Struct, frozen=True):
    format: int
    settings: DataSettings
    shards: tuple[_Shard, ...]


class DraftData:
    """The recordings in a folder.

    Args:
        max_bytes: the folder's limit; None: none.

    Raises:
        ConfigError: the folder holds data of other settings, or cannot be written to.
        StoreCorrupted: a shard is not what was written.
    """

    def __init__(self, folder: Path, settings: DataSettings, *, max_bytes: int | None = None) -> None:
        self.folder = folder
        self.settings = settings
        self._max_bytes = max_bytes
        self._shards: list[_Shard] = []
        self._buffer: list[Recording] = []
        self._places: list[tuple[int, int]] = []
        """Per text on disk, its shard and its first position in it."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from error
        if (folder / _INDEX_FILE).exists():
            self._read_index()

    @property
    def numbers(self) -> frozenset[int]:
        """Of the texts that are there, those in memory included."""
        written = (number for shard in self._shards for number in shard.numbers)
        return frozenset([*written, *(recording.number for recording in self._buffer)])

    @property
    def lengths(self) -> list[int]:
        """Positions per text on disk."""
        return [length for shard in self._shards for length in shard.lengths]

    @property
    def num_learnt(self) -> int:
        """Positions to learn from, on disk and in memory."""
        on_disk = sum(
            length - max(prompt - 1, 0)
            for shard in self._shards
            for length, prompt in zip(shard.lengths, shard.num_prompts, strict=True)
        )
        return on_disk + sum(recording.num_learnt for recording in self._buffer)

    @property
    def num_bytes(self) -> int:
        """Of the shards, and of what is to become one."""
        on_disk = sum((self.folder / shard.name).stat().st_size for shard in self._shards)
        return on_disk + sum(map(_num_bytes, self._buffer))

    @property
    def is_full(self) -> bool:
        """Whether the limit leaves no room for another shard."""
        return self._max_bytes is not None and self.num_bytes + SHARD_BYTES > self._max_bytes

    def __len__(self) -> int:
        return len(self._places)

    def add(self, recording: Recording) -> None:
        """Keeps a text; a shard is written when there is enough for one.

        Raises:
            ResourceExhausted: the disk is full.
        """
        self._buffer.append(recording)
        if sum(map(_num_bytes, self._buffer)) >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what is in memory."""
        if not self._buffer:
            return
        check_room(self.folder, sum(map(_num_bytes, self._buffer)), disk_free)
        name = f"shard-{len(self._shards):05d}.safetensors"
        path, partial = self.folder / name, self.folder / f"{name}.partial"
        tensors = {
            "tokens": torch.cat([r.tokens_T for r in self._buffer]),
            "features": torch.cat([r.features_TkD for r in self._buffer]),
            "top_ids": torch.cat([r.top_ids_TK for r in self._buffer]),
            "top_probabilities": torch.cat([r.top_probabilities_TK for r in self._buffer]),
        }
        try:
            save_file(tensors, partial)
            partial.replace(path)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot write {path}: {error}") from error
        shard = _Shard(
            name,
            sha256_of(path),
            tuple(r.number for r in self._buffer),
            tuple(r.num_prompt for r in self._buffer),
            tuple(r.num_positions for r in self._buffer),
        )
        self._append(shard)
        self._buffer = []
        index = _Index(_FORMAT, self.settings, tuple(self._shards))
        partial = self.folder / f"{_INDEX_FILE}.partial"
        write_durably(partial, msgspec.json.encode(index))
        partial.replace(self.folder / _INDEX_FILE)

    def load(self, text: int) -> Recording:
        """One text from the disk; only its own bytes are read.

        Raises:
            StoreCorrupted: the file is not there any more, or is cut off.
        """
        shard_index, first = self._places[text]
        shard = self._shards[shard_index]
        which = self._which(text)
        rows = slice(first, first + shard.lengths[which])
        try:
            with safe_open(self.folder / shard.name, "pt") as file:
                tokens, features, top_ids, top_probabilities = (
                    file.get_slice(name)[rows] for name in ("tokens", "features", "top_ids", "top_probabilities")
                )
        except (OSError, SafetensorError) as error:
            raise _damaged(self.folder / shard.name) from error
        return Recording(shard.numbers[which], shard.num_prompts[which], tokens, features, top_ids, top_probabilities)

    def __iter__(self) -> Iterator[Recording]:
        return (self.load(text) for text in range(len(self)))

    def _which(self, text: int) -> int:
        shard_index, _ = self._places[text]
        return text - sum(len(shard.lengths) for shard in self._shards[:shard_index])

    def _append(self, shard: _Shard) -> None:
        first = 0
        for length in shard.lengths:
            self._places.append((len(self._shards), first))
            first += length
        self._shards.append(shard)

    def _read_index(self) -> None:
        path = self.folder / _INDEX_FILE
        try:
            index = msgspec.json.decode(read_bounded(path), type=_Index)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise _damaged(path) from error
        if index.format != _FORMAT:
            raise ConfigError(f"{self.folder} was written by another version: choose another --out, or remove it")
        for name in DataSettings.__struct_fields__:
            ours, theirs = getattr(self.settings, name), getattr(index.settings, name)
            if ours != theirs:
                raise ConfigError(
                    f"{self.folder} holds data that was made with another {name.replace('_', ' ')}: "
                    "run the command as before, choose another --out, or remove it"
                )
        for shard in index.shards:
            self._check(shard)
            self._append(shard)

    def _check(self, shard: _Shard) -> None:
        path = self.folder / shard.name
        total, k, size = sum(shard.lengths), len(self.settings.feature_layers), self.settings.hidden_size
        expected = {
            "tokens": [total],
            "features": [total, k, size],
            "top_ids": [total, NUM_TOP],
            "top_probabilities": [total, NUM_TOP],
        }
        try:
            is_whole = len(shard.numbers) == len(shard.num_prompts) == len(shard.lengths)
            if path.name != shard.name or not is_whole or sha256_of(path) != shard.sha256:
                raise _damaged(path)
            with safe_open(path, "pt") as file:
                if {name: file.get_slice(name).get_shape() for name in file.keys()} != expected:  # noqa: SIM118
                    raise _damaged(path)
        except (OSError, SafetensorError) as error:
            raise _damaged(path) from error


def _damaged(path: Path) -> StoreCorrupted:
    return StoreCorrupted(f"training data {path} is damaged: remove the folder {path.parent}, and it is made anew")


def _num_bytes(recording: Recording) -> int:
    tensors = (
        recording.tokens_T,
        recording.features_TkD,
        recording.top_ids_TK,
        recording.top_probabilities_TK,
    )
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
