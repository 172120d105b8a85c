"""The draft head that `fusion-node draft train` makes: its arithmetic, and its two files.

An EAGLE-3 head whose first hidden state is a linear map of the target's features *and* of the newest token's embedding.
In EAGLE-3 the embedding reaches the residual stream through attention alone, so that there is no closed form to begin
training from; that start is what makes an hour of training on two cores enough (docs/drafting.md). Everything else is
EAGLE-3: one decoder layer, its output as the next step's input, a small draft vocabulary, the target's own embedding
and LM head, none of which is stored here.

Step 1 of a chain that starts at position s takes the features of s and the token of s + 1 and guesses the token of
s + 2; step j takes step j - 1's hidden state and the token of s + j. Its rotary position is s + j - 1. It attends to
step 1 of all positions up to s and to the steps of its own chain.

Shapes: B batch, T positions, k features, D hidden size, N query heads, K KV heads, H head dim, W draft vocabulary,
V vocabulary.
Source: EAGLE-3, Li et al. 2025 (2503.01840), §3; the names of tensors are those of its published checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
import torch.nn.functional as F
from msgspec import Meta
from safetensors.torch import save

from fusion_node.engine.draft_head_files import CONFIG_FILE, HeadTensors, read_config
from fusion_node.errors import ConfigError

WEIGHTS_FILE = "model.safetensors"

_Size = Annotated[int, Meta(ge=1, le=2**20)]


class HeadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """config.json of a head.

    Attributes:
        feature_layers: the target's hidden states that step 1 takes: n is the row after n layers, before any final
            norm. The number of the target's layers is what its last stage returns, and needs nothing else of a swarm.
        log_scales: per step, the logarithm of what logits are multiplied by; the last one is that of all later steps.
        target_model_id: of the model that it was trained for; empty when it is of no store.
    """

    model_type: Literal["fusion_draft_head"] = "fusion_draft_head"
    architectures: tuple[str, ...] = ("FusionDraftHead",)
    hidden_size: _Size
    vocab_size: Annotated[int, Meta(ge=1, le=2**24)]
    draft_vocab_size: Annotated[int, Meta(ge=1, le=2**24)]
    num_attention_heads: _Size
    num_key_value_heads: _Size
    head_dim: Annotated[int, Meta(ge=2, le=2**12)]
    intermediate_size: _Size
    rms_norm_eps: Annotated[float, Meta(gt=0, le=1)] = 1e-5
    rope_theta: Annotated[float, Meta(ge=1)] = 10_000.0
    feature_layers: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(min_length=1, max_length=16)]
    log_scales: Annotated[tuple[float, ...], Meta(min_length=1, max_length=64)] = (0.0,)
    target_model_id: str = ""

    def check(self) -> None:
        """ConfigError for sizes that contradict each other."""
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise ConfigError(f"{CONFIG_FILE} of the draft head: its numbers of heads do not fit each other")
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(f"{CONFIG_FILE} of the draft head: its vocabulary is larger than the target's")
        if not all(math.isfinite(scale) and abs(scale) < 50 for scale in self.log_scales):
            raise ConfigError(f"{CONFIG_FILE} of the draft head: log_scales are out of range")


def normed(x: torch.Tensor) -> torch.Tensor:
    """Each row (last dimension) divided by its root mean square: how every input of the head comes in."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6)


class Attention(torch.nn.Module):
    """The four projections; who attends to what is up to the caller."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        size, dim = config.hidden_size, config.head_dim
        self.q_proj = torch.nn.Linear(size, config.num_attention_heads * dim, bias=False)
        self.k_proj = torch.nn.Linear(size, config.num_key_value_heads * dim, bias=False)
        self.v_proj = torch.nn.Linear(size, config.num_key_value_heads * dim, bias=False)
        self.o_proj = torch.nn.Linear(config.num_attention_heads * dim, size, bias=False)


class Mlp(torch.nn.Module):
    """Gated by SiLU."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = torch.nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = torch.nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Norm(torch.nn.RMSNorm):
    """In float32, also where what comes was multiplied in a narrower type."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


class DecoderLayer(torch.nn.Module):
    """A layer of the Llama family without its attention function."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Mlp(config)


class TrainedHead(torch.nn.Module):
    """The head, in float32 unless moved. Rows in, rows and logits out; it keeps no state."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        config.check()
        self.config = config
        size = config.hidden_size
        self.fc = torch.nn.Linear((len(config.feature_layers) + 1) * size, size)
        self.fc_next = torch.nn.Linear(2 * size, size)
        self.midlayer = DecoderLayer(config)
        self.log_scales = torch.nn.Parameter(torch.tensor(config.log_scales, dtype=torch.float32))
        # The draft vocabulary's token ids in the target's.
        self.register_buffer("token_ids", torch.arange(config.draft_vocab_size))
        self.token_ids: torch.Tensor
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
        frequencies = config.rope_theta ** (-steps / config.head_dim)
        self.register_buffer("frequencies", frequencies.float(), persistent=False)
        self.frequencies: torch.Tensor

    @property
    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors that are stored as weights; log_scales are in the configuration."""
        return {name: tuple(p.shape) for name, p in self.named_parameters() if name != "log_scales"}

    def start(self, features_kD: torch.Tensor, embedded_D: torch.Tensor) -> torch.Tensor:
        """What the layer takes in step 1, ``[..., D]``.

        Args:
            features_kD: ``[..., k, D]``, the target's rows as they are.
            embedded_D: ``[..., D]``, the next token's embedding as the target's first layer would take it.
        """
        inputs = torch.cat((normed(features_kD).flatten(-2), normed(embedded_D)), dim=-1)
        out: torch.Tensor = self.fc(inputs)
        return out

    def next(self, hidden_D: torch.Tensor, embedded_D: torch.Tensor) -> torch.Tensor:
        """What the layer takes in a later step: from the hidden state of the step before and the next token."""
        out: torch.Tensor = self.fc_next(torch.cat((normed(hidden_D), normed(embedded_D)), dim=-1))
        return out

    def qkv(
        self, start_BTD: torch.Tensor, positions_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries ``[B, N, T, H]``, keys and values ``[B, K, T, H]``, the first two turned by their positions."""
        attention = self.midlayer.self_attn
        x = self.midlayer.input_layernorm(start_BTD)
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        angles = positions_T.to(self.frequencies).unsqueeze(-1) * self.frequencies
        return _rotated(query, angles), _rotated(key, angles), value

    def finish(self, start_BTD: torch.Tensor, attended_BTNH: torch.Tensor) -> torch.Tensor:
        """The hidden state ``[B, T, D]``: the layer after its attention."""
        layer = self.midlayer
        hidden = start_BTD + layer.self_attn.o_proj(attended_BTNH.flatten(-2))
        out: torch.Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return out

    def logits(self, hidden_D: torch.Tensor, head_WD: torch.Tensor, step: int) -> torch.Tensor:
        """Logits ``[..., W]`` over the draft vocabulary.

        Args:
            head_WD: rows ``token_ids`` of the target's LM head.
            step: from 1 on.
        """
        return hidden_D @ head_WD.t() * self.log_scales[min(step, len(self.log_scales)) - 1].exp()

    def unroll(
        self,
        features_BTkD: torch.Tensor,
        embedded_BTD: torch.Tensor,
        num_steps: int,
        *,
        noise_BTkD: torch.Tensor | None = None,
        first_seen_B: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Chains from every position of known text at once, each step on the head's own last output.

        Args:
            embedded_BTD: embeddings of the same text, position by position.
            noise_BTkD: added to the normed features.
            first_seen_B: positions before it have no keys: rows of a prompt that the swarm did not return.

        Returns:
            Per step j, hidden states ``[B, T - j, D]``: row s is what a chain that starts at s says of s + j.

        Source: EAGLE-3 §3.2, "training-time test".
        """
        total = embedded_BTD.shape[1]
        positions_T = torch.arange(total, device=embedded_BTD.device)
        first_BSD = self._start_noisy(features_BTkD[:, :-1], embedded_BTD[:, 1:], noise_BTkD)
        query, first_keys, first_values = self.qkv(first_BSD, positions_T[: total - 1])
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        first_keys, first_values = (t.repeat_interleave(groups, dim=1) for t in (first_keys, first_values))
        hidden_from = _hidden_from(positions_T[:-1], first_seen_B)
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        hiddens: list[torch.Tensor] = []
        start_BSD = first_BSD
        for step in range(1, num_steps + 1):
            num_starts = total - step
            if num_starts <= 0:
                break
            if step > 1:
                start_BSD = self.next(hiddens[-1][:, :num_starts], embedded_BTD[:, step:total])
                query, key, value = self.qkv(start_BSD, positions_T[step - 1 : total - 1])
                own.append((key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)))
            attended = _attend_chains(
                query,
                first_keys[:, :, :num_starts],
                first_values[:, :, :num_starts],
                own,
                hidden_from[..., :num_starts, :num_starts],
            )
            hiddens.append(self.finish(start_BSD, attended))
        return hiddens

    def _start_noisy(
        self, features_BTkD: torch.Tensor, embedded_BTD: torch.Tensor, noise_BTkD: torch.Tensor | None
    ) -> torch.Tensor:
        if noise_BTkD is None:
            return self.start(features_BTkD, embedded_BTD)
        inputs = (normed(features_BTkD) + noise_BTkD).flatten(-2)
        out: torch.Tensor = self.fc(torch.cat((inputs, normed(embedded_BTD)), dim=-1))
        return out

    def save(self, folder: Path, *, dtype: torch.dtype = torch.float16) -> None:
        """Writes both files; the configuration last, so that a folder that has one is complete.

        Raises:
            ConfigError: the folder cannot be written to, or a weight is not finite in ``dtype``.
        """
        tensors = {name: p.detach().to("cpu", dtype) for name, p in self.named_parameters() if name != "log_scales"}
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise ConfigError(f"{name} of the draft head is not finite: train again with a lower --learning-rate")
        ids = self.token_ids.cpu()
        known = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        known[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
        config = msgspec.structs.replace(self.config, log_scales=tuple(round(x, 6) for x in self.log_scales.tolist()))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / CONFIG_FILE).unlink(missing_ok=True)
            # Not save_file, whose files nobody else may read.
            (folder / WEIGHTS_FILE).write_bytes(save(tensors, {"format": "pt"}))
            (folder / CONFIG_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(config)) + b"\n")
        except OSError as error:
            raise ConfigError(f"cannot write the draft head to {folder}: {error.strerror}") from error

    @classmethod
    def load(cls, folder: Path, *, device: torch.device | None = None) -> TrainedHead:
        """Reads a head, in float32.

        Raises:
            ConfigError: there is none, it is another kind of head, or its files contradict each other.
        """
        config = read_head_config(folder)
        stored = HeadTensors(folder / WEIGHTS_FILE)
        # On no device: what the configuration says may be any size, and takes memory only once the file has it too.
        with torch.device("meta"):
            wanted = cls(config).stored_shapes
        found = {name: shape for name, shape in stored.shapes.items() if name not in ("d2t", "t2d")}
        if found != wanted:
            name = sorted(name for name in wanted | found if wanted.get(name) != found.get(name))[0]
            raise ConfigError(f"{folder}: tensor {name} of the draft head is not what its {CONFIG_FILE} says")
        token_ids, tensors = stored.token_ids(config.draft_vocab_size, config.vocab_size), stored.read(wanted)
        head = cls(config)
        head.token_ids = token_ids
        for name, parameter in head.named_parameters():
            if name in tensors:
                parameter.data = tensors[name].float()
        return head.requires_grad_(False).to(device or torch.device("cpu"))

    def check_target(self, *, hidden_size: int, vocab_size: int, num_layers: int, model_id: str) -> None:
        """Whether it can draft for a model.

        Raises:
            ConfigError: it was made for another; the message says in what they differ.
        """
        ours = self.config
        for what, mine, theirs in (
            ("hidden size", ours.hidden_size, hidden_size),
            ("vocabulary", ours.vocab_size, vocab_size),
        ):
            if mine != theirs:
                raise ConfigError(
                    f"the draft head is for a target with a {what} of {mine}, and this one's is {theirs}: "
                    "take the one that was trained for this model"
                )
        if max(ours.feature_layers) > num_layers:
            raise ConfigError(
                f"the draft head takes the row after layer {max(ours.feature_layers)}, and the target has {num_layers}"
            )
        if ours.target_model_id and model_id and ours.target_model_id != model_id:
            raise ConfigError(
                f"the draft head was trained for the model {ours.target_model_id[:12]} and not for {model_id[:12]}: "
                "take the one of this model, or train one with `fusion-node draft train`"
            )


def read_head_config(folder: Path) -> HeadConfig:
    """config.json of a head.

    Raises:
        ConfigError: there is none, or it is not one of this kind of head.
    """
    try:
        config = msgspec.json.decode(read_config(folder), type=HeadConfig)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ConfigError(
            f"{folder / CONFIG_FILE} is not the configuration of a trained draft head: {error}"
        ) from error
    config.check()
    return config


def _rotated(x_BNTH: torch.Tensor, angles_TH: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in the form of the Llama family: the two halves of a head are the two coordinates."""
    first, second = x_BNTH.chunk(2, dim=-1)
    cos, sin = angles_TH.cos().to(x_BNTH.dtype), angles_TH.sin().to(x_BNTH.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _hidden_from(starts_S: torch.Tensor, first_seen_B: torch.Tensor | None) -> torch.Tensor:
    """Which first steps (columns) a chain (row) does not see, ``[B, 1, S, S]``: later ones, and those without keys."""
    before = starts_S[None, :] - starts_S[:, None]
    hidden = (before > 0)[None, None]
    if first_seen_B is None:
        return hidden
    # Its own it always has, or there would be nothing to attend to.
    return hidden | ((starts_S < first_seen_B[:, None])[:, None, None] & (before < 0))


def _attend_chains(
    query_BNSH: torch.Tensor,
    keys_BNSH: torch.Tensor,
    values_BNSH: torch.Tensor,
    own: Sequence[tuple[torch.Tensor, torch.Tensor]],
    hidden_from_SS: torch.Tensor,
) -> torch.Tensor:
    """One step of all chains: over the first steps that each may see, and then over its own later steps.

    Returns:
        ``[B, S, N, H]``.
    """
    num_starts, dim = query_BNSH.shape[2:]
    scores = query_BNSH @ keys_BNSH.transpose(2, 3) * dim**-0.5
    scores = scores.masked_fill(hidden_from_SS, -torch.inf)
    later = [(query_BNSH * key[:, :, :num_starts]).sum(-1, keepdim=True) * dim**-0.5 for key, _ in own]
    shares = torch.softmax(torch.cat((scores, *later), dim=-1), dim=-1)
    out = shares[..., :num_starts] @ values_BNSH
    for index, (_, value) in enumerate(own):
        out = out + shares[..., num_starts + index : num_starts + index + 1] * value[:, :, :num_starts]
    return out.transpose(1, 2)
