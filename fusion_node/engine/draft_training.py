"""Training a draft head on recordings of its target.

Two linear maps in closed form first: from true features, and from what the first map says, to the target's next hidden
state. Then a decoder layer on top, which begins as one of the target's own that adds nothing, learns what they miss by
unrolling chains on its own outputs (training-time test) against the target's probabilities. A head from random weights
needs ten times the tokens for what the closed form has in ten seconds.

Guarantees: what step n does is a function of data, settings and seed alone, so a run that was killed and goes on from
its last checkpoint ends with the same weights, bit for bit on one machine, as one that was not. The head that is kept
is the one with the best acceptance on texts that were held out.

Shapes: B texts, T positions, S starts of chains, k features, D hidden size, W draft vocabulary, V vocabulary,
I inputs of a linear map.
Source: EAGLE-3, Li et al. 2025 (2503.01840), §3; HASS, Zhang et al. 2024 (2408.15766), for weights falling with depth.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fusion_node.engine.device import multiplies_bf16
from fusion_node.engine.draft_acceptance import (
    MEASURED_STEPS,
    Acceptance,
    calibrate,
    cross_entropy,
    draft_maps,
    measure,
)
from fusion_node.engine.draft_batches import Batch, batches_of, choose_draft_vocab, collate, embed, plan_batches
from fusion_node.engine.draft_data import DraftData, DraftTarget
from fusion_node.engine.draft_ridge import Standardised, solve_linear_maps
from fusion_node.engine.trained_head import HeadConfig, TrainedHead
from fusion_node.errors import ConfigError, StoreCorrupted


class TrainingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to train. Defaults are those of the pilot on the built-in model (docs/drafting.md).

    Attributes:
        epochs: passes over the data.
        batch_positions: of padded texts per step.
        draft_vocab: tokens that the head can guess, the most frequent ones.
        learning_rate: of the layer, at its highest.
        linear_learning_rate: of the two linear maps, which are near their optimum already.
        warmup_steps: from 0 up to the highest rate; then it falls as a cosine.
        first_unroll, last_unroll: steps of a chain, in the first two thirds of the training and in the last third.
        depth_decay: weight of a step's loss relative to the one before.
        noise: uniform in plus and minus this, added to standardised features.
        ridge: penalty of the closed form, per input and pair, relative to the mean square of the inputs.
        evaluate_every: steps between measurements on held-out texts.
        patience: measurements without a better one, after which training ends.
    """

    epochs: float = 6.0
    batch_positions: int = 1024
    draft_vocab: int = 10_240
    learning_rate: float = 4e-4
    linear_learning_rate: float = 2e-5
    weight_decay: float = 0.05
    warmup_steps: int = 10
    first_unroll: int = 3
    last_unroll: int = 5
    depth_decay: float = 0.8
    noise: float = 0.1
    clip: float = 1.0
    ridge: float = 0.3
    evaluate_every: int = 50
    patience: int = 6
    seed: int = 0

    def check(self) -> None:
        """ConfigError for what makes no sense."""
        for name in ("epochs", "learning_rate", "linear_learning_rate", "clip", "depth_decay"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name.replace('_', ' ')} of the training must be above 0")
        for name in ("batch_positions", "draft_vocab", "first_unroll", "last_unroll", "evaluate_every", "patience"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name.replace('_', ' ')} of the training must be at least 1")


@dataclass(frozen=True, slots=True)
class Measured:
    """What is told of a training under way."""

    step: int
    num_steps: int
    loss: float
    acceptance: Acceptance
    is_best: bool


def new_head(target: DraftTarget, token_ids: torch.Tensor, *, model_id: str, seed: int) -> TrainedHead:
    """A head whose layer is the target's last one, but for what it adds: that is nothing yet.

    What the target's layer lacks, or has in another shape, begins at random.
    """
    config = target.config
    num_heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head = TrainedHead(
        HeadConfig(
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            draft_vocab_size=len(token_ids),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads if num_heads % num_kv_heads == 0 else num_heads,
            head_dim=head_dim + head_dim % 2,
            intermediate_size=min(config.intermediate_size, 4 * config.hidden_size),
            rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-5,
            rope_theta=float(rope.get("rope_theta") or 10_000.0),
            feature_layers=target.feature_layers,
            log_scales=(-0.7,) * MEASURED_STEPS,
            target_model_id=model_id,
        )
    )
    head.token_ids = token_ids.clone()
    theirs = target.stage.parameters_of(target.num_layers - 1)
    # Queries that a family norms on their own have another size without it.
    names = [name for name in theirs if "q_norm" not in name and "k_norm" not in name]
    has_own_norms = len(names) < len(theirs)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.midlayer.named_parameters():
            taken = theirs.get(name)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif taken is not None and taken.shape == parameter.shape and taken.is_floating_point():
                if not (has_own_norms and name.endswith(("q_proj.weight", "k_proj.weight"))):
                    parameter.copy_(taken.float())
                    continue
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
            elif parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
    return head.to(target.device)


class Trainer:
    """Trains one head, from its beginning or its last checkpoint.

    Args:
        folder: where checkpoints go.
        checkpoint_s: seconds between two of them.

    Raises:
        ConfigError: there is nothing to learn from or to measure on.
    """

    def __init__(
        self,
        target: DraftTarget,
        train: DraftData,
        held_out: DraftData,
        settings: TrainingSettings,
        folder: Path,
        *,
        model_id: str = "",
        checkpoint_s: float = 60.0,
    ) -> None:
        settings.check()
        if not len(train) or not len(held_out):
            raise ConfigError("there are no texts to learn from, or none held out: give more, or longer ones")
        self.settings = settings
        self._target = target
        self._boundary = target.boundary
        self._train, self._held_out = train, held_out
        self._path = folder / "checkpoint.safetensors"
        self._checkpoint_s = checkpoint_s
        self._model_id = model_id
        self.step = 0
        self.best: Acceptance | None = None
        self._num_worse = 0
        self._plan = list(self._steps())
        self.num_steps = len(self._plan)
        checkpoint = self._checkpoint()
        self.head = self._begin() if checkpoint is None else self._blank()
        self._best_state = {name: t.clone() for name, t in self.head.state_dict().items()}
        self._optimizer = torch.optim.AdamW(self._groups(), betas=(0.9, 0.95))
        self.resumed_at: int | None = None
        if checkpoint is not None:
            self._resume(*checkpoint)
            self.resumed_at = self.step
        self._head_WD, self._to_draft_V = draft_maps(self.head, self._boundary)

    def run(self, on_step: Callable[[int, float], None], on_measured: Callable[[Measured], None]) -> TrainedHead:
        """Trains to the end, or until it does not get better.

        Args:
            on_step: told after each step its number and loss.
            on_measured: told of each measurement on held-out texts.

        Returns:
            The best head, calibrated, in its plain form.
        """
        saved_at = time.monotonic()
        recent: list[float] = []
        if self.step == 0 and self.best is None:
            on_measured(self._evaluate(math.nan))
        while self.step < self.num_steps and self._num_worse < self.settings.patience:
            loss = self._train_step()
            recent.append(loss)
            on_step(self.step, loss)
            if self.step % self.settings.evaluate_every == 0 or self.step == self.num_steps:
                on_measured(self._evaluate(sum(recent) / len(recent)))
                recent = []
            if time.monotonic() - saved_at >= self._checkpoint_s:
                self._save()
                saved_at = time.monotonic()
        self._save()
        self.head.load_state_dict(self._best_state)
        calibrate(self.head, self._boundary, self._held_out)
        return self._folded()

    def _begin(self) -> TrainedHead:
        settings = self.settings
        token_ids = choose_draft_vocab(self._train, self._target.vocab_size, settings.draft_vocab)
        head = new_head(self._target, token_ids, model_id=self._model_id, seed=settings.seed)

        def batches() -> Iterator[Batch]:
            return batches_of(self._train, settings.batch_positions, head.log_scales.device)

        solve_linear_maps(head, self._boundary, batches, ridge=settings.ridge)
        calibrate(head, self._boundary, self._held_out)
        return head

    def _blank(self) -> TrainedHead:
        """For the values of a checkpoint."""
        num_tokens = min(self.settings.draft_vocab, self._target.vocab_size)
        head = new_head(self._target, torch.arange(num_tokens), model_id=self._model_id, seed=0)
        for linear in (head.fc, head.fc_next):
            size = linear.in_features
            standardised = Standardised(torch.zeros(size), torch.ones(size), linear).to(self._target.device)
            setattr(head, "fc" if linear is head.fc else "fc_next", standardised)
        return head

    def _folded(self) -> TrainedHead:
        head = TrainedHead(self.head.config)
        state = {name: t for name, t in self.head.state_dict().items() if not name.startswith(("fc.", "fc_next."))}
        head.load_state_dict(state, strict=False)
        for name in ("fc", "fc_next"):
            module: Standardised = getattr(self.head, name)
            setattr(head, name, module.folded())
        return head.requires_grad_(False).to(self._target.device)

    def _steps(self) -> Iterator[list[int]]:
        """Which texts each step takes."""
        lengths = self._train.lengths
        epoch, left = 0, 0
        while True:
            batches = plan_batches(lengths, self.settings.batch_positions, self.settings.seed, epoch)
            if epoch == 0:
                left = max(1, round(self.settings.epochs * len(batches)))
            yield from batches[:left]
            left -= len(batches)
            epoch += 1
            if left <= 0:
                return

    def _groups(self) -> list[dict[str, object]]:
        settings = self.settings
        linear = [*self.head.fc.parameters(), *self.head.fc_next.parameters()]
        matrices = [p for p in self.head.midlayer.parameters() if p.dim() == 2]
        vectors = [*(p for p in self.head.midlayer.parameters() if p.dim() < 2), self.head.log_scales]
        return [
            {"params": linear, "peak": settings.linear_learning_rate, "weight_decay": 0.0},
            {"params": matrices, "peak": settings.learning_rate, "weight_decay": settings.weight_decay},
            {"params": vectors, "peak": settings.learning_rate, "weight_decay": 0.0},
        ]

    def _rate(self, step: int) -> float:
        """Part of the highest learning rate at a step."""
        warmup = min(1.0, (step + 1) / max(1, self.settings.warmup_steps))
        return warmup * 0.5 * (1 + math.cos(math.pi * step / self.num_steps))

    def _train_step(self) -> float:
        settings, step = self.settings, self.step
        batch = collate([self._train.load(text) for text in self._plan[step]], self._target.device)
        num_unrolled = settings.first_unroll if 3 * step < 2 * self.num_steps else settings.last_unroll
        for group in self._optimizer.param_groups:
            group["lr"] = group["peak"] * self._rate(step)
        loss = chain_loss(
            self.head,
            batch,
            embed(self._boundary, batch.ids_BT),
            self._head_WD,
            self._to_draft_V,
            num_steps=num_unrolled,
            decay=settings.depth_decay,
            noise_BTkD=self._noise(batch, step),
            first_seen_B=self._first_seen(batch, step),
        )
        value = float(loss.detach())
        if not math.isfinite(value):
            raise ConfigError(f"the training has diverged at step {step}: use a lower --learning-rate")
        self._optimizer.zero_grad()
        if loss.requires_grad:
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), settings.clip)
            self._optimizer.step()
        self.step += 1
        return value

    def _noise(self, batch: Batch, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + step)
        features = batch.features_BTkD[:, :-1]
        noise = torch.rand(features.shape, generator=generator) * 2 - 1
        num_features = features.shape[2] * features.shape[3]
        fc: Any = self.head.fc  # Standardised until the end of the training
        scale: torch.Tensor = fc.scale[:num_features].view(features.shape[2:])
        return noise.to(scale) * scale * self.settings.noise

    def _first_seen(self, batch: Batch, step: int) -> torch.Tensor:
        """Half of the texts are learnt without the rows of their prompts, which do not come back from every swarm."""
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + step + 500_000)
        is_hidden = torch.rand(len(batch.ids_BT), generator=generator) < 0.5
        return batch.first_starts_B * is_hidden.to(batch.first_starts_B)

    def _evaluate(self, loss: float) -> Measured:
        found = measure(self.head, self._boundary, self._held_out)
        is_best = self.best is None or sum(found.top1) > sum(self.best.top1)
        if is_best:
            self.best, self._num_worse = found, 0
            self._best_state = {name: t.detach().clone() for name, t in self.head.state_dict().items()}
        else:
            self._num_worse += 1
        return Measured(self.step, self.num_steps, loss, found, is_best)

    # Checkpoints.

    def _identity(self) -> str:
        """What a checkpoint must be of."""
        shards = [sorted(path.name + str(path.stat().st_size) for path in data.folder.glob("*.safetensors"))
                  for data in (self._train, self._held_out)]  # fmt: skip
        return msgspec.json.encode([self.settings, self._model_id, self._train.num_learnt, shards]).decode()

    def _save(self) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in self.head.state_dict().items():
            tensors[f"now.{name}"] = tensor.detach()
            tensors[f"best.{name}"] = self._best_state[name]
        for name, parameter in self.head.named_parameters():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = value
        state = {"step": self.step, "num_worse": self._num_worse, "best": self.best, "of": self._identity()}
        partial = self._path.with_suffix(".partial")
        contiguous = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        try:
            save_file(contiguous, partial, {"state": msgspec.json.encode(state).decode()})
            partial.replace(self._path)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot write the checkpoint {self._path}: {error}") from error

    def _checkpoint(self) -> tuple[_State, dict[str, torch.Tensor]] | None:
        """What was saved; None when there is nothing of this training.

        Raises:
            StoreCorrupted: it cannot be read.
        """
        if not self._path.exists():
            return None
        try:
            with safe_open(self._path, "pt") as file:
                state = msgspec.json.decode(file.metadata()["state"], type=_State)
                if state.of != self._identity():
                    return None
                return state, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, KeyError, TypeError, SafetensorError, msgspec.MsgspecError) as error:
            raise self._damaged() from error

    def _resume(self, state: _State, tensors: dict[str, torch.Tensor]) -> None:
        device = self._target.device
        try:
            self.head.load_state_dict({name: tensors[f"now.{name}"] for name in self.head.state_dict()})
            self._best_state = {name: tensors[f"best.{name}"].to(device) for name in self.head.state_dict()}
        except (KeyError, RuntimeError) as error:
            raise self._damaged() from error
        for name, parameter in self.head.named_parameters():
            moments = {key: tensors.get(f"{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
            found = {key: value for key, value in moments.items() if value is not None}
            if found:
                # The count of steps stays on the CPU, as the optimizer has it.
                self._optimizer.state[parameter] = {k: v if k == "step" else v.to(device) for k, v in found.items()}
        self.step, self._num_worse, self.best = state.step, state.num_worse, state.best

    def _damaged(self) -> StoreCorrupted:
        return StoreCorrupted(f"{self._path} is damaged: remove it, and the training begins anew")


class _State(msgspec.Struct, frozen=True):
    step: int
    num_worse: int
    best: Acceptance | None
    of: str


def chain_loss(
    head: TrainedHead,
    batch: Batch,
    embedded_BTD: torch.Tensor,
    head_WD: torch.Tensor,
    to_draft_V: torch.Tensor,
    *,
    num_steps: int,
    decay: float = 1.0,
    noise_BTkD: torch.Tensor | None = None,
    first_seen_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross-entropy of all chains against the target's probabilities; a step weighs ``decay`` of the one before."""
    device = head.log_scales.device
    loss = torch.zeros((), device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=multiplies_bf16(device)):
        hiddens = head.unroll(
            batch.features_BTkD, embedded_BTD.to(device), num_steps, noise_BTkD=noise_BTkD, first_seen_B=first_seen_B
        )
        for step, hidden in enumerate(hiddens, 1):
            valid = batch.valid(step)
            logits = head.logits(hidden[valid], head_WD, step)
            ids, probabilities = batch.top_ids_BTK[:, step:][valid], batch.top_probabilities_BTK[:, step:][valid]
            loss = loss + decay ** (step - 1) * cross_entropy(logits.float(), ids, probabilities, to_draft_V)
    return loss
