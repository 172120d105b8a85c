"""``fusion-node draft``: train a draft head for a model on this machine, and measure one."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import filelock
import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from fusion_node.cli.options import AsJson, Home, Model, Threads, parse_size
from fusion_node.errors import ConfigError

if TYPE_CHECKING:
    from fusion_node.client.tokenizer import Tokenizer
    from fusion_node.engine.draft_acceptance import Acceptance
    from fusion_node.engine.draft_data import DraftData, DraftTarget, Job
    from fusion_node.engine.draft_estimate import Estimate
    from fusion_node.engine.draft_training import Measured, Trainer
    from fusion_node.engine.trained_head import TrainedHead
    from fusion_node.store import StoredModel

draft_app = typer.Typer(help="Train and measure draft heads.", no_args_is_help=True)

_MAX_TEXT_BYTES = 64 * 2**20
"""Of one file of texts or prompts."""

_WINDOW_TOKENS = 256
"""Given text is cut into pieces of so many."""

_MAX_PROMPT_TOKENS = 1024
"""Every answer under way has room for the longest: one of ten thousand would take the memory of a hundred others."""

_HELD_OUT_PARTS = 12
"""Every so many-th topic, and piece of given text, is kept for measuring."""

_HELD_OUT_TOKENS = 5000
"""Of given text for measuring, at most: a measurement takes as long as a few steps of training."""

Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:0 or mps.")]
NumericsName = Annotated[str, typer.Option("--numerics", help="Of the target: fp32, f16r32, bf16 or fp16.")]
PromptFile = Annotated[
    Path | None,
    typer.Option("--prompts", metavar="FILE", help="Questions of your own, one a line, beside the built-in."),
]
AnswerTokens = Annotated[int, typer.Option("--answer-tokens", min=8, max=4096, help="Longest answer.")]
BatchSize = Annotated[int, typer.Option("--batch", min=1, max=512, help="Answers at a time.")]


@draft_app.command("train")
def train(
    model: Model,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the head; its work is kept there too.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text", metavar="FILE|DIR", help="Text to learn beside the model's own answers. May be repeated."
        ),
    ] = None,
    prompts: PromptFile = None,
    tokens: Annotated[int, typer.Option("--tokens", min=200, help="Positions to learn from.")] = 200_000,
    epochs: Annotated[float, typer.Option("--epochs", help="Passes over them.")] = 6.0,
    answer_tokens: AnswerTokens = 160,
    batch: BatchSize = 48,
    features: Annotated[
        str,
        typer.Option(
            "--features",
            metavar="last|three",
            help="Rows of the last layer; or also of a third and two thirds of the depth.",
        ),
    ] = "last",
    draft_vocab: Annotated[int, typer.Option("--draft-vocab", min=16, help="Tokens that the head can guess.")] = 10_240,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="Of the layer, at its highest.")] = 4e-4,
    seed: Annotated[int, typer.Option(min=0, help="The same seed and data give the same head.")] = 0,
    disk: Annotated[str, typer.Option("--disk", metavar="SIZE", help="Data on the disk, at most.")] = "4GiB",
    device: Device = "auto",
    numerics: NumericsName = "fp32",
    threads: Threads = None,
    keep_data: Annotated[bool, typer.Option("--keep-data", help="Keep the training data when all is done.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only measure how long it would take.")] = False,
    as_json: AsJson = False,
    home: Home = None,
) -> None:
    """Train a draft head for a model. Interrupted, it goes on when the same command is run again."""
    from fusion_node.engine.draft_data import DataSettings, DraftData
    from fusion_node.engine.draft_estimate import estimate as estimate_training
    from fusion_node.engine.draft_head_files import CONFIG_FILE
    from fusion_node.engine.draft_training import Trainer, TrainingSettings
    from fusion_node.store.files import remove_tree

    settings = TrainingSettings(epochs=epochs, draft_vocab=draft_vocab, learning_rate=learning_rate, seed=seed)
    settings.check()
    max_bytes = parse_size(disk)
    if (out / CONFIG_FILE).exists():
        raise ConfigError(f"{out} holds a draft head already: choose another --out, or remove it")
    console = Console(stderr=True, highlight=False)
    target, stored, tokenizer = _load(model, features, device, numerics, threads, home)
    texts = _texts(tokenizer, text or [], prompts, answer_tokens, tokens)
    if texts.num_left_out:
        console.print(f"{texts.num_left_out} prompts of more than {_MAX_PROMPT_TOKENS} tokens are left out")
    num_held_out = sum(map(_size, texts.held_out))
    estimate = estimate_training(
        target,
        settings,
        tokens=tokens,
        measured_tokens=num_held_out,
        text_tokens=texts.longest,
        batch_size=batch,
    )
    if dry_run:
        _print_estimate(estimate, console)
        if as_json:
            _print_json(estimate)
        return
    if estimate.disk_bytes > max_bytes:
        raise ConfigError(
            f"{tokens} positions take {estimate.disk_bytes / 2**30:.1f} GiB, and --disk allows "
            f"{max_bytes / 2**30:.1f}: raise it, or lower --tokens"
        )
    _print_estimate(estimate, console)
    work = out / "work"
    data_settings = DataSettings(
        model_id=stored.model_id,
        numerics=numerics,
        feature_layers=target.feature_layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        seed=seed,
        texts=texts.digest,
    )
    with _alone_in(work):
        # Most of it is for training; what is held out is a twentieth, if that.
        held_data = DraftData(work / "held-out", data_settings)
        train_data = DraftData(work / "train", data_settings, max_bytes=max_bytes)
        began = time.monotonic()
        with _bars(console) as bars:
            for what, data, jobs in (("Held out", held_data, texts.held_out), ("Answers", train_data, texts.learnt)):
                wanted = None if data is held_data else tokens
                _record(bars, what, target, data, jobs, wanted, batch=batch, longest=texts.longest, seed=seed)
                # Also to a log that is no terminal, where no bar is drawn.
                console.print(f"{what}: {data.num_learnt} positions in {len(data)} texts")
        recorded = time.monotonic()
        with _bars(console) as bars:
            bars.add_task("Closed form", total=None)
            trainer = Trainer(target, train_data, held_data, settings, work, model_id=stored.model_id)
        head = _train(trainer, console)
        head.save(out)
        if not keep_data:
            remove_tree(work)
    result = {
        "head": str(out),
        "num_positions": train_data.num_learnt,
        "steps": trainer.step,
        "seconds": {"recording": round(recorded - began, 1), "training": round(time.monotonic() - recorded, 1)},
        "estimate": estimate,
        "acceptance": trainer.best,
    }
    if as_json:
        _print_json(result)
    else:
        Console(highlight=False).print(
            f"{out}  {_acceptance(trainer.best)}" if trainer.best is not None else str(out), soft_wrap=True
        )


@draft_app.command("eval")
def evaluate(
    model: Model,
    draft: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a head that was trained here.")],
    prompts: PromptFile = None,
    answer_tokens: AnswerTokens = 96,
    batch: BatchSize = 16,
    device: Device = "auto",
    numerics: NumericsName = "fp32",
    threads: Threads = None,
    as_json: AsJson = False,
    home: Home = None,
) -> None:
    """Measure a head's acceptance by depth, on questions about topics that it was not trained with."""
    from fusion_node.engine.draft_acceptance import measure
    from fusion_node.engine.draft_data import Job, record
    from fusion_node.engine.draft_prompts import Prompt, held_out_prompts
    from fusion_node.engine.trained_head import TrainedHead, read_head_config

    layers = read_head_config(draft).feature_layers
    target, stored, tokenizer = _load(model, layers, device, numerics, threads, home)
    head = TrainedHead.load(draft, device=target.device)
    head.check_target(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
        model_id=stored.model_id,
    )
    asked = held_out_prompts()
    if prompts is not None:
        asked = [Prompt("", line, "yours") for line in _lines(prompts)]
    jobs = [Job(number, tuple(_encode(tokenizer, prompt.text)), answer_tokens) for number, prompt in enumerate(asked)]
    longest = max(len(job.token_ids) for job in jobs) + answer_tokens
    with _bars(Console(stderr=True)) as bars:
        task = bars.add_task("Answers", total=len(jobs))
        texts = []
        for recording in record(target, jobs, batch_size=min(batch, len(jobs)), max_tokens=longest):
            texts.append(recording)
            bars.advance(task)
    found = {
        kind: measure(head, target.boundary, [text for text in texts if asked[text.number].kind == kind])
        for kind in dict.fromkeys(prompt.kind for prompt in asked)
    }
    if as_json:
        _print_json(found)
        return
    depths = len(next(iter(found.values())).top1)
    table = Table("TEXT", "GUESS", *(f"DEPTH {depth + 1}" for depth in range(depths)), box=None, pad_edge=False)
    for kind, acceptance in found.items():
        table.add_row(kind, "first", *(f"{share:.3f}" for share in acceptance.top1))
        table.add_row("", "first 8", *(f"{share:.3f}" for share in acceptance.top8))
        table.add_row("", f"{acceptance.chain_length:.2f} of a chain of {depths}")
    Console(highlight=False).print(table)


@contextlib.contextmanager
def _alone_in(work: Path) -> Iterator[None]:
    """Keeps others from training into the same folder: they would write the same shards and checkpoints."""
    lock = filelock.FileLock(work / "lock")
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise ConfigError(
            f"another training writes to {work.parent}: wait until it has ended, or choose another --out"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot write to {work}: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()


def _load(
    model: str,
    features: str | Sequence[int],
    device: str,
    numerics: str,
    threads: int | None,
    home: Path | None,
) -> tuple[DraftTarget, StoredModel, Tokenizer]:
    from fusion_node.client.tokenizer import Tokenizer
    from fusion_node.engine.device import choose_device, set_threads
    from fusion_node.engine.draft_data import DraftTarget, default_feature_layers
    from fusion_node.engine.numerics import numerics_class
    from fusion_node.store import ModelStore

    stored = ModelStore(home).find(model)
    set_threads(threads)
    layers = features
    if isinstance(features, str):
        if features not in ("three", "last"):
            raise ConfigError("--features is three or last")
        layers = default_feature_layers(stored.num_layers) if features == "three" else (stored.num_layers,)
    target = DraftTarget.load(
        stored,
        numerics=numerics_class(numerics),
        device=choose_device(device),
        feature_layers=[int(layer) for layer in layers],
        eos_ids=_eos_ids(stored),
    )
    return target, stored, Tokenizer(stored.path)


def _eos_ids(stored: StoredModel) -> list[int]:
    settings: dict[str, Any] = stored.config
    with contextlib.suppress(KeyError):
        stored.manifest.file("generation_config.json")
        settings = msgspec.json.decode(stored.read_file("generation_config.json"), type=dict[str, Any])
    value = settings.get("eos_token_id")
    return [int(token) for token in value] if isinstance(value, list) else [] if value is None else [int(value)]


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat([{"role": "user", "content": text}])
    return tokenizer.encode(text)


@dataclass(frozen=True, slots=True)
class _Texts:
    """What is run through the target.

    Attributes:
        learnt: without end.
        longest: tokens of the longest, with its answer.
        digest: of all of them.
        num_left_out: prompts that are too long.
    """

    learnt: Iterator[Job]
    held_out: list[Job]
    longest: int
    digest: str
    num_left_out: int


def _texts(
    tokenizer: Tokenizer, texts: Sequence[Path], prompts: Path | None, answer_tokens: int, tokens: int
) -> _Texts:
    from fusion_node.engine.draft_data import Job
    from fusion_node.engine.draft_prompts import Prompt, split_by_topic, training_prompts

    asked: list[Prompt] = training_prompts()
    if prompts is not None:
        asked += [Prompt(f"own {number}", line) for number, line in enumerate(_lines(prompts))]
    most, apart = split_by_topic(asked, one_in=_HELD_OUT_PARTS)
    encoded = [[tuple(_encode(tokenizer, prompt.text)) for prompt in part] for part in (most, apart)]
    to_learn, to_measure = ([ids for ids in part if len(ids) <= _MAX_PROMPT_TOKENS] for part in encoded)
    if not to_learn or not to_measure:
        raise ConfigError("the tokenizer makes too many tokens of every prompt: is it the model's?")
    pieces = [
        tuple(ids[first : first + _WINDOW_TOKENS])
        for ids in (tokenizer.encode(_read(path)) for path in _files(texts))
        for first in range(0, len(ids) - 16, _WINDOW_TOKENS)
    ]
    # Of given text half of all at most, taken evenly from everywhere.
    pieces = pieces[:: max(1, -(-len(pieces) * _WINDOW_TOKENS * 2 // tokens))]
    kept = pieces[_HELD_OUT_PARTS - 1 :: _HELD_OUT_PARTS][: _HELD_OUT_TOKENS // _WINDOW_TOKENS]
    given = [piece for piece in pieces if piece not in set(kept)]
    held_out = [Job(number, ids, min(answer_tokens, 96)) for number, ids in enumerate(to_measure)]
    held_out += [Job(len(held_out) + number, ids) for number, ids in enumerate(kept)]
    digest = hashlib.sha256(msgspec.json.encode([to_learn, to_measure, given, kept, answer_tokens])).hexdigest()

    def learnt() -> Iterator[Job]:
        yield from (Job(number, ids) for number, ids in enumerate(given))
        for number in itertools.count():
            turn, place = divmod(number, len(to_learn))
            # Every question once greedily, and then with noise, more and less of it.
            is_greedy = turn < 2 and (turn + place) % 2 == 0
            temperature = 0.0 if is_greedy else (0.7, 1.0)[(turn // 2 + place // 2) % 2]
            yield Job(len(given) + number, to_learn[place], answer_tokens, temperature)

    longest = max([_WINDOW_TOKENS, *(len(ids) + answer_tokens for ids in (*to_learn, *to_measure))])
    return _Texts(learnt(), held_out, longest, digest, len(asked) - len(to_learn) - len(to_measure))


def _record(
    bars: Bars,
    what: str,
    target: DraftTarget,
    data: DraftData,
    jobs: Iterator[Job] | list[Job],
    tokens: int | None,
    *,
    batch: int,
    longest: int,
    seed: int,
) -> None:
    """Runs what is not there yet, until there are so many positions to learn from."""
    from fusion_node.engine.draft_data import record

    there = data.numbers
    total = sum(map(_size, jobs)) if isinstance(jobs, list) else tokens
    task = bars.add_task(what, total=total, completed=data.num_learnt)
    under_way: dict[int, int] = {}

    def wanted() -> Iterator[Job]:
        for job in jobs:
            if tokens is not None and (data.num_learnt + sum(under_way.values()) >= tokens or data.is_full):
                return
            if job.number not in there:
                under_way[job.number] = _size(job)
                yield job

    try:
        for recording in record(target, wanted(), batch_size=batch, max_tokens=longest, seed=seed):
            data.add(recording)
            del under_way[recording.number]
            bars.update(task, completed=data.num_learnt)
    finally:
        data.flush()
    bars.update(task, completed=data.num_learnt, total=data.num_learnt)


def _size(job: Job) -> int:
    """Positions to learn from that it may become."""
    return job.num_new or len(job.token_ids)


def _train(trainer: Trainer, console: Console) -> TrainedHead:
    with _bars(console) as bars:
        task = bars.add_task("Training", total=trainer.num_steps, completed=trainer.step)
        if trainer.resumed_at is not None:
            console.print(f"going on at step {trainer.resumed_at} of {trainer.num_steps}")

        def on_measured(measured: Measured) -> None:
            loss = "-" if math.isnan(measured.loss) else f"{measured.loss:.3f}"
            console.print(
                f"step {measured.step}/{measured.num_steps}  loss {loss}  "
                f"{_acceptance(measured.acceptance)}{'  best' if measured.is_best else ''}",
                soft_wrap=True,
            )

        head: TrainedHead = trainer.run(lambda step, loss: bars.update(task, completed=step), on_measured)
        bars.update(task, completed=trainer.num_steps)
    return head


def _acceptance(acceptance: Acceptance) -> str:
    return "acceptance by depth " + " ".join(f"{share:.3f}" for share in acceptance.top1)


def _print_json(value: object) -> None:
    typer.echo(json.dumps(msgspec.to_builtins(value), indent=2))


def _print_estimate(estimate: Estimate, console: Console) -> None:
    console.print(
        f"about {estimate.recording_s / 60:.0f} min for the answers and {estimate.training_s / 60:.0f} min of "
        f"training, {estimate.disk_bytes / 1e9:.2f} GB on the disk, {estimate.memory_bytes / 1e9:.1f} GB of memory",
        soft_wrap=True,
    )


@contextlib.contextmanager
def _bars(console: Console) -> Iterator[Bars]:
    # On standard error, so that standard output holds the result alone.
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console) as bars:
        yield bars


def _files(paths: Sequence[Path]) -> list[Path]:
    """The files named, and of folders the text files in them, in a fixed order."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".md") and p.is_file())
            if not inside:
                raise ConfigError(f"there are no .txt or .md files in {path}")
            found += inside
        else:
            found.append(path)
    return found


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_TEXT_BYTES + 1)
        if len(data) > _MAX_TEXT_BYTES:
            raise ConfigError(f"{path} is larger than {_MAX_TEXT_BYTES // 2**20} MiB: split it")
        return data.decode()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8") from error


def _lines(path: Path) -> list[str]:
    lines = [line.strip() for line in _read(path).splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"{path} has no prompts: write one a line")
    return lines
