"""The report: runs a topology over prompts as its nodes would, and every attack on what one node then has.

Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from fusion_node.engine.device import choose_device
from fusion_node.engine.fusion_group import FusionGroup
from fusion_node.engine.node_views import MAX_TOKENS, GroupTruth, MemberView, watch_group, watch_stages
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.public_model import Prompt, PublicModel
from fusion_node.engine.received_views import ReceivedSession, watch_received
from fusion_node.engine.stage import Stage
from fusion_node.engine.weights import TensorSource
from fusion_node.errors import ConfigError
from fusion_node.privacy.attacks import count_equal
from fusion_node.privacy.findings import MATCHING, NEAREST_EMBEDDING, PromptRead, Report, Tally
from fusion_node.privacy.group import GroupAttack
from fusion_node.privacy.matching import Seen, match_views
from fusion_node.slices import check_weights
from fusion_node.types import LayerRange

FUSION, PIPELINE = "fusion", "pipeline"

_ROWS = "whole rows"


@dataclass(frozen=True, slots=True)
class Settings:
    """What to attack, and how thoroughly.

    Attributes:
        weights: of the members, or of the stages; one per node.
        member: the attacker; None: the first of those with the least weight.
        layers: that are looked at; empty: the first two, the middle and the last one. Of a pipeline: those before
            which there is a node.
        num_candidates, num_positions: for matching, per position and per prompt.
        seed: of candidates and controls.
    """

    topology: str = FUSION
    weights: tuple[int, ...] = (1, 1, 1)
    member: int | None = None
    layers: tuple[int, ...] = ()
    num_candidates: int = 256
    num_positions: int = 8
    numerics: str = "fp32"
    seed: int = 0

    @property
    def attacker(self) -> int:
        """Its index."""
        return self.weights.index(min(self.weights)) if self.member is None else self.member

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """Those to look at, in order.

        Raises:
            ConfigError: the model has no such layer.
        """
        layers = self.layers or (0, min(1, num_layers - 1), num_layers // 2, num_layers - 1)
        if not 0 <= min(layers) <= max(layers) < num_layers:
            raise ConfigError(f"layers {', '.join(map(str, layers))}: the model has those from 0 to {num_layers - 1}")
        return tuple(sorted(set(layers)))


Progress = Callable[[str], None]
Decode = Callable[[Sequence[int]], str]


def make_report(
    source: TensorSource,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    *,
    decode: Decode,
    on_progress: Progress = lambda _: None,
) -> Report:
    """Attacks one node of a topology that computes these prompts.

    Args:
        prompts: token ids of each, at most MAX_TOKENS.
        on_progress: is told what is being done.

    Raises:
        ConfigError: the settings do not fit the model, no fusion group can serve it, or a prompt is too long.
        ResourceExhausted: there is no room for the model twice.
        StoreCorrupted: a tensor does not match the manifest.
    """
    _check(prompts, settings)
    numerics = numerics_class(settings.numerics)
    on_progress("reading the model, as the attacker")
    model = PublicModel.load(source, numerics=numerics)
    attack = _attack_group if settings.topology == FUSION else _attack_stages
    tally = Tally()
    taken = attack(source, model, prompts, settings, tally, on_progress)
    return _told(source, model, settings, tally, taken, decode)


def make_received_report(
    source: TensorSource,
    sessions: Sequence[ReceivedSession],
    settings: Settings,
    *,
    model_id: str,
    decode: Decode,
    on_progress: Progress = lambda _: None,
) -> Report:
    """Attacks real answers with the frames that one member's node was sent of them.

    There is nobody to say what was asked: the tokens are those whose embeddings are nearest to the member's own
    columns, and the truth of what it was not sent is what the public model makes of them. If a token were wrong, so
    would be what follows from it, and the errors would tell.

    Args:
        model_id: of ``source``.
        sessions: of one member; what ``settings`` say of members and numerics does not count.

    Raises:
        ConfigError: the sessions are of another model, of different groups, or the settings do not fit.
        ResourceExhausted, StoreCorrupted: see make_report.
    """
    first = sessions[0]
    for session in sessions:
        if session.model_id != model_id:
            raise ConfigError(
                f"the frames are of another model than {source.name}: name the one that the node has served"
            )
        if (session.member, session.layers, session.numerics) != (first.member, first.layers, first.numerics):
            raise ConfigError("the frames are of different groups: record those of each in a file of its own")
    settings = replace(
        settings,
        topology=FUSION,
        weights=first.member.weights,
        member=first.member.index,
        numerics=first.numerics,
    )
    on_progress("reading the model, as the attacker")
    model = PublicModel.load(source, numerics=numerics_class(settings.numerics))
    tally = Tally()
    taken = _attack_sessions(source, model, sessions, settings, tally, on_progress)
    return msgspec.structs.replace(_told(source, model, settings, tally, taken, decode), is_received=True)


def _told(
    source: TensorSource, model: PublicModel, settings: Settings, tally: Tally, taken: Taken, decode: Decode
) -> Report:
    texts, columns = [], 0
    for token_ids, found, width in taken:
        texts.append(PromptRead(decode(token_ids), decode(found), len(token_ids), count_equal(found, token_ids)))
        columns = width
    is_group = settings.topology == FUSION
    return Report(
        model=source.name,
        numerics=settings.numerics,
        topology=settings.topology,
        weights=list(settings.weights),
        member=settings.attacker if is_group else None,
        columns=columns,
        hidden=model.dims.hidden,
        sent_bytes=tally.sent_bytes,
        candidates=min(settings.num_candidates, model.vocabulary),
        positions=tally.num_positions,
        prior_found=tally.prior_found,
        solved=tally.solved,
        read=tally.read,
        prompts=texts,
        conclusion=_conclude(settings, tally, texts, columns, model.dims.hidden),
    )


Taken = Iterator[tuple[Sequence[int], list[int], int]]
"""Per prompt its tokens, those whose embeddings are nearest, and how many columns the node was sent of a state."""


def _attack_group(
    source: TensorSource,
    model: PublicModel,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    tally: Tally,
    on_progress: Progress,
) -> Taken:
    layers = settings.layers_of(model.num_layers)
    rng = np.random.default_rng(settings.seed)
    on_progress(f"starting a group of {len(settings.weights)}")
    group = FusionGroup.load(
        source,
        LayerRange(0, model.num_layers),
        settings.weights,
        numerics=numerics_class(settings.numerics),
        num_slots=MAX_TOKENS,
    )
    for number, token_ids in enumerate(prompts, start=1):
        on_progress(f"prompt {number} of {len(prompts)}")
        view, truth = watch_group(group, model.embed(token_ids), settings.attacker)
        prompt = model.read(token_ids, layers, num_candidates=settings.num_candidates)
        yield _attack_view(model, view, truth, prompt, token_ids, layers, settings, tally, rng)


def _attack_sessions(
    source: TensorSource,
    model: PublicModel,
    sessions: Sequence[ReceivedSession],
    settings: Settings,
    tally: Tally,
    on_progress: Progress,
) -> Taken:
    layers = settings.layers_of(sessions[0].layers.stop)
    rng = np.random.default_rng(settings.seed)
    for number, session in enumerate(sessions, start=1):
        on_progress(f"answer {number} of {len(sessions)}")
        view = watch_received(source, session)
        token_ids: list[int] = model.nearest_tokens(view.columns_Td[0], view.own.columns).tolist()
        prompt = model.read(token_ids, {0, *layers}, num_candidates=settings.num_candidates)
        truth = GroupTruth(
            {layer: states.before_TD for layer, states in prompt.states.items()},
            {layer: states.middle_TD for layer, states in prompt.states.items()},
        )
        yield _attack_view(model, view, truth, prompt, token_ids, layers, settings, tally, rng)


def _attack_view(
    model: PublicModel,
    view: MemberView,
    truth: GroupTruth,
    prompt: Prompt,
    token_ids: Sequence[int],
    layers: tuple[int, ...],
    settings: Settings,
    tally: Tally,
    rng: np.random.Generator,
) -> tuple[Sequence[int], list[int], int]:
    """Everything on one prompt."""
    tally.sent_bytes += view.num_bytes
    attack = GroupAttack(model, view, truth, {layer: prompt.states[layer] for layer in layers}, tally, rng)
    attack.solve()
    found = attack.read(token_ids)
    match_views(
        model,
        prompt,
        token_ids,
        attack.views(),
        layers,
        tally,
        num_candidates=settings.num_candidates,
        num_positions=settings.num_positions,
        rng=rng,
    )
    return token_ids, found, len(view.own.columns)


def _attack_stages(
    source: TensorSource,
    model: PublicModel,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    tally: Tally,
    on_progress: Progress,
) -> Taken:
    rng = np.random.default_rng(settings.seed)
    hidden = model.dims.hidden
    on_progress(f"starting {len(settings.weights)} stages")
    numerics, device = numerics_class(settings.numerics), choose_device("cpu")
    stages = [
        Stage.load(source, layers, numerics=numerics, device=device)
        for layers in cut_layers(model.num_layers, settings.weights)
    ]
    layers = tuple(stage.layers.start for stage in stages)
    for number, token_ids in enumerate(prompts, start=1):
        on_progress(f"prompt {number} of {len(prompts)}")
        views = watch_stages(stages, model.embed(token_ids))
        tally.sent_bytes += sum(view.num_bytes for view in views)
        rows = {view.layer: view.rows_TD for view in views}
        found: list[int] = model.nearest_tokens(rows[0], range(hidden)).tolist()
        tally.note_read(_ROWS, NEAREST_EMBEDDING, 0, model.vocabulary, found, token_ids)
        shuffled = {layer: np.roll(rows_TD, 1, axis=0) for layer, rows_TD in rows.items()}
        match_views(
            model,
            model.read(token_ids, layers, num_candidates=settings.num_candidates),
            token_ids,
            [
                Seen(_ROWS, rows, lambda s: s.before_TD),
                Seen("control: rows of another token", shuffled, lambda s: s.before_TD, is_control=True),
            ],
            layers,
            tally,
            num_candidates=settings.num_candidates,
            num_positions=settings.num_positions,
            rng=rng,
        )
        yield token_ids, found, hidden


def cut_layers(num_layers: int, weights: Sequence[int]) -> list[LayerRange]:
    """Layer ranges of stages, one after the other, as long as their weights say.

    Raises:
        ConfigError: a stage would have none.
    """
    ends = [0, *(round(num_layers * done / sum(weights)) for done in itertools.accumulate(weights))]
    if any(start >= stop for start, stop in itertools.pairwise(ends)):
        raise ConfigError(f"{num_layers} layers cannot be cut into {len(weights)} stages by these weights: use fewer")
    return [LayerRange(start, stop) for start, stop in itertools.pairwise(ends)]


def _check(prompts: Sequence[Sequence[int]], settings: Settings) -> None:
    for prompt in prompts:
        if not 1 <= len(prompt) <= MAX_TOKENS:
            raise ConfigError(f"a prompt of {len(prompt)} tokens: a report takes one of 1 to {MAX_TOKENS}")
    check_weights(settings.weights)
    if settings.topology not in (FUSION, PIPELINE):
        raise ConfigError(f"topology {settings.topology!r} is none: choose {FUSION} or {PIPELINE}")
    if len(settings.weights) < 2:
        raise ConfigError("one node alone has everything: a report is of two members or stages at least")
    if settings.topology == PIPELINE and (settings.layers or settings.member is not None):
        raise ConfigError("the report on a pipeline is of all its stages, before their first layers: leave that out")
    if not 0 <= settings.attacker < len(settings.weights):
        raise ConfigError(f"there is no member {settings.member} of {len(settings.weights)}: they are counted from 0")


def _conclude(settings: Settings, tally: Tally, texts: Sequence[PromptRead], columns: int, hidden: int) -> str:
    read, total = sum(text.num_recovered for text in texts), sum(text.num_tokens for text in texts)
    if settings.topology == PIPELINE:
        matched = [found for found in tally.read if found.attack == MATCHING and not found.is_control]
        least = min(found.found / found.tried for found in matched)
        return (
            f"Every stage was sent whole rows: the first one's are the text itself ({read} of {total} tokens), and of "
            f"those of any other {least:.0%} of the tokens or more were told. Ask only what your nodes may read."
        )
    return (
        f"Member {settings.attacker} of {len(settings.weights)} was never sent more than {columns} of the {hidden} "
        f"columns of a hidden state, and read {read} of {total} tokens all the same: fusion says who holds what, and "
        "hides nothing from those who hold it. Ask a group only what each of its members may read."
    )
