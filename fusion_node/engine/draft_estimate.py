"""How long the training of a draft head takes and what it needs, from one step of each kind, timed here."""

from __future__ import annotations

import itertools
import time

import msgspec
import torch

from fusion_node.engine.device import process_memory_bytes
from fusion_node.engine.draft_acceptance import draft_maps
from fusion_node.engine.draft_batches import collate, embed
from fusion_node.engine.draft_data import NUM_TOP, DraftTarget, Job, Recording, record
from fusion_node.engine.draft_training import TrainingSettings, chain_loss, new_head

_PROMPT_SHARE = 0.35
"""Positions of prompts, which are recorded and attended to but not learnt, per position of an answer: measured on the
built-in model with its default system prompt."""

_RECORDING_FACTOR = 1.4
"""Time per token of whole answers, prompts and the last lone ones included, to that in a step of short ones: measured
on the built-in model, in seconds of CPU."""

_TRAINING_FACTOR = 1.25
"""For measurements on held-out texts, checkpoints and padding."""

_LENGTH = 128


class Estimate(msgspec.Struct, frozen=True):
    """What to expect.

    Attributes:
        memory_bytes: of this process at its highest, mapped weights included.
    """

    recording_s: float
    training_s: float
    disk_bytes: int
    memory_bytes: int


def estimate(
    target: DraftTarget,
    settings: TrainingSettings,
    *,
    tokens: int,
    measured_tokens: int,
    text_tokens: int,
    batch_size: int,
) -> Estimate:
    """Times a few steps of answering and of training on made-up data: some seconds on a CPU.

    Args:
        tokens: positions to learn from.
        measured_tokens: of the texts that are held out.
        text_tokens: of the longest text.
    """
    recording_s = (tokens + measured_tokens) / batch_size * _decode_seconds(target, batch_size) * _RECORDING_FACTOR
    num_positions = round(tokens * (1 + _PROMPT_SHARE))
    num_steps = settings.epochs * num_positions / settings.batch_positions
    step_s, head_bytes = _training_step(target, settings)
    training_s = num_steps * step_s * _TRAINING_FACTOR
    kv_bytes = batch_size * text_tokens * target.stage.kv_bytes_per_position
    return Estimate(
        round(recording_s, 3),
        round(training_s, 3),
        num_positions * target.bytes_per_position,
        process_memory_bytes(target.device) + max(kv_bytes, head_bytes),
    )


def _decode_seconds(target: DraftTarget, batch_size: int) -> float:
    """Of a step in which every answer grows by one token."""
    times: list[tuple[float, int]] = []
    prompt = tuple(range(1, 17)) if target.vocab_size > 16 else (1, 2)
    jobs = [Job(number, prompt, 6) for number in range(batch_size)]
    for _ in record(
        target,
        jobs,
        batch_size=batch_size,
        max_tokens=64,
        on_tokens=lambda rows: times.append((time.perf_counter(), rows)),
    ):
        pass
    steps = sorted(
        (after - before) / rows for (before, _), (after, rows) in itertools.pairwise(times) if rows <= batch_size
    )
    return batch_size * steps[len(steps) // 2]


def _training_step(target: DraftTarget, settings: TrainingSettings) -> tuple[float, int]:
    """Seconds of a step of ``batch_positions``, and bytes of head, optimizer and what a step holds."""
    num_tokens = min(settings.draft_vocab, target.vocab_size)
    head = new_head(target, torch.arange(num_tokens), model_id="", seed=0)
    num_texts = max(1, settings.batch_positions // _LENGTH)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (num_texts, _LENGTH, NUM_TOP), generator=generator).int()
    features = torch.randn(
        (num_texts, _LENGTH, len(target.feature_layers), target.hidden_size), generator=generator
    ).half()
    shares = torch.full((_LENGTH, NUM_TOP), 1 / NUM_TOP).half()
    texts = [Recording(text, 0, ids[text, :, 0], features[text], ids[text], shares) for text in range(num_texts)]
    batch = collate(texts, target.device)
    head_WD, to_draft_V = draft_maps(head, target.boundary)
    num_unrolled = round(settings.first_unroll * 2 / 3 + settings.last_unroll / 3)
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        embedded = embed(target.boundary, batch.ids_BT)
        loss = chain_loss(head, batch, embedded, head_WD, to_draft_V, num_steps=num_unrolled)
        torch.autograd.backward(loss)
        float(loss.detach())
        seconds.append(time.perf_counter() - began)
    num_parameters = sum(parameter.numel() for parameter in head.parameters())
    # Weights, gradients, two moments, the best ones; logits and their softmax per step of a chain.
    held_bytes = num_parameters * 4 * 5 + settings.batch_positions * num_tokens * 4 * 2 * settings.last_unroll
    return min(seconds) * settings.batch_positions / (num_texts * _LENGTH), held_bytes
