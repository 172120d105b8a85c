"""The draft heads that are read: what each computes, and how its files name it.

``EagleHead``: published EAGLE checkpoints, told apart by their tensors. EAGLE and EAGLE-2 are one head: the token's
embedding and the target's normed last row go through ``fc`` into decoder layers of the Llama family, the first of
which has no input norm, and the target's own LM head reads what comes out. EAGLE-3 takes three of the target's rows
through ``fc``, attends from embedding and hidden state side by side, and has a norm and an LM head of its own over a
draft vocabulary, with ``d2t`` from place to token id. The names ``midlayer`` (SafeAILab) and ``layers.0`` (vLLM,
speculators) are one.

``OwnHead``: what ``fusion-node draft train`` makes (fusion_node.engine.trained_head).

Shapes: T rows, k rows of the target per position, D hidden size, N query heads, K KV heads, H head dim, W draft
vocabulary, V vocabulary.
Source: SafeAILab/EAGLE, eagle/model/cnets1.py and cnets.py; vLLM, model_executor/models/llama_eagle.py and
llama_eagle3.py; SGLang, models/llama_eagle3.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from fusion_node.engine.boundary import Boundary
from fusion_node.engine.draft_head_files import CONFIG_FILE, HeadTensors, read_config
from fusion_node.engine.linear import speed_up_linears
from fusion_node.engine.trained_head import TrainedHead
from fusion_node.errors import ConfigError

OWN_MODEL_TYPE = "fusion_draft_head"

MAX_HEAD_LAYERS = 8
"""Decoder layers: published heads have one, some four."""

_LLAMA_SETTINGS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers",
    "vocab_size", "rms_norm_eps", "hidden_act", "max_position_embeddings", "rope_theta", "rope_scaling",
    "rope_parameters",
)  # fmt: skip
"""Of a published configuration; nothing else of it reaches transformers, which acts on what it is told."""

Shapes = Mapping[str, tuple[int, ...]]

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Layer, queries ``[N, T, H]``, keys and values ``[K, T, H]``; gives ``[T, N, H]``."""


class HeadKind(Protocol):
    """The arithmetic of a head.

    Attributes:
        feature_layers: rows of the target that it takes, lowest first: n is the row after n layers.
        num_layers: of its own that have keys and values.
        vocabulary: of the target.
        token_ids: of the places of the draft vocabulary; None when it is the target's.
    """

    name: str
    feature_layers: tuple[int, ...]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    vocabulary: int
    token_ids: torch.Tensor | None

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Embeddings ``[T, D]``."""
        ...

    def start(self, features_TkD: torch.Tensor, embedded_TD: torch.Tensor) -> torch.Tensor:
        """What the layers take where the target's rows are known, ``[T, D]``."""
        ...

    def next(self, out_TD: torch.Tensor, embedded_TD: torch.Tensor) -> torch.Tensor:
        """What the layers take where the head's own output stands for them, ``[T, D]``."""
        ...

    def layers(
        self, hidden_TD: torch.Tensor, embedded_TD: torch.Tensor, positions_T: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """The output ``[T, D]``."""
        ...

    def logits(self, out_TD: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
        """Logits ``[T, W]`` in float32 over the draft vocabulary.

        Args:
            steps: of each row how far it is ahead of the text, from 1 on.
        """
        ...


def load_kind(
    folder: Path, boundary: Boundary, *, hidden_size: int, vocabulary: int, num_layers: int, model_id: str
) -> HeadKind:
    """Reads a head for a target of these sizes.

    Raises:
        ConfigError: there is none, it is of another kind or of another target, or its files are not sound.
    """
    settings = _read_settings(folder)
    if settings.get("model_type") == OWN_MODEL_TYPE:
        head = TrainedHead.load(folder, device=boundary.device)
        head.check_target(hidden_size=hidden_size, vocab_size=vocabulary, num_layers=num_layers, model_id=model_id)
        return OwnHead(head, boundary)
    return EagleHead(
        folder,
        settings,
        _eagle_tensors(folder),
        boundary,
        hidden_size=hidden_size,
        vocabulary=vocabulary,
        num_layers=num_layers,
    )


class EagleHead:
    """A HeadKind: EAGLE, EAGLE-2 and EAGLE-3.

    Raises:
        ConfigError: as ``load_kind``.
    """

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        stored: HeadTensors,
        boundary: Boundary,
        *,
        hidden_size: int,
        vocabulary: int,
        num_layers: int,
    ) -> None:
        config = _llama_config(folder, settings)
        self._config = config
        self._boundary = boundary
        self.is_eagle3 = "layers.0.hidden_norm.weight" in stored.shapes
        self.name = "eagle3" if self.is_eagle3 else "eagle"
        self.vocabulary = vocabulary
        self.dtype, self.device = boundary.numerics.dtype, boundary.device
        self.num_layers: int = config.num_hidden_layers
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = config.head_dim
        self._norms_residual = bool(settings.get("norm_before_residual", False))
        self.feature_layers = _feature_layers(folder, settings, num_layers) if self.is_eagle3 else (num_layers,)
        _check_sizes(folder, config, settings, self.is_eagle3, hidden_size=hidden_size, vocabulary=vocabulary)
        draft_vocabulary = _draft_vocabulary(folder, settings, vocabulary) if self.is_eagle3 else vocabulary
        tensors = stored.read(self._shapes(hidden_size, draft_vocabulary, stored.shapes))
        self.token_ids = _token_ids(folder, stored, draft_vocabulary, vocabulary) if self.is_eagle3 else None
        # The target's embedding does, unless the head is of another width.
        self._embedding = tensors.pop("embed_tokens.weight", None)
        self._w = {name: tensor.to(device=self.device, dtype=self.dtype) for name, tensor in tensors.items()}
        if self.is_eagle3 and "lm_head.weight" not in tensors:
            ids = range(vocabulary) if self.token_ids is None else self.token_ids.tolist()
            self._w["lm_head.weight"] = boundary.head_rows(list(ids)).to(self.dtype)
        self._rotary = _rotary(folder, config).to(self.device)

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """See HeadKind."""
        if self._embedding is not None:
            return self._embedding[torch.tensor(tokens)].to(device=self.device, dtype=self.dtype)
        return self._boundary.embed(tokens)

    def start(self, features_TkD: torch.Tensor, embedded_TD: torch.Tensor) -> torch.Tensor:
        """See HeadKind."""
        if self.is_eagle3:
            return F.linear(features_TkD.flatten(1).to(self.dtype), self._w["fc.weight"], self._w.get("fc.bias"))
        return self.next(self._boundary.norm(features_TkD[:, 0]), embedded_TD)

    def next(self, out_TD: torch.Tensor, embedded_TD: torch.Tensor) -> torch.Tensor:
        """See HeadKind."""
        if self.is_eagle3:
            return out_TD
        return F.linear(torch.cat((embedded_TD, out_TD), dim=1), self._w["fc.weight"], self._w.get("fc.bias"))

    def layers(
        self, hidden_TD: torch.Tensor, embedded_TD: torch.Tensor, positions_T: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """See HeadKind."""
        cos_1TH, sin_1TH = self._rotary(hidden_TD, positions_T.unsqueeze(0))
        x_TD = hidden_TD
        for layer in range(self.num_layers):
            name = f"layers.{layer}"
            if layer == 0 and self.is_eagle3:
                normed_TD = self._norm(f"{name}.hidden_norm", x_TD)
                into = torch.cat((self._norm(f"{name}.input_layernorm", embedded_TD), normed_TD), dim=1)
                x_TD = normed_TD if self._norms_residual else x_TD
            else:
                # The first layer of EAGLE has no input norm; some retrained ones do.
                into = (
                    self._norm(f"{name}.input_layernorm", x_TD) if f"{name}.input_layernorm.weight" in self._w else x_TD
                )
            query, key, value = (
                self._linear(f"{name}.self_attn.{kind}_proj", into).view(len(into), -1, self.head_dim).transpose(0, 1)
                for kind in "qkv"
            )
            query, key = (t[0] for t in apply_rotary_pos_emb(query[None], key[None], cos_1TH, sin_1TH))
            x_TD = x_TD + self._linear(f"{name}.self_attn.o_proj", attend(layer, query, key, value).flatten(1))
            normed_TD = self._norm(f"{name}.post_attention_layernorm", x_TD)
            gated = F.silu(self._linear(f"{name}.mlp.gate_proj", normed_TD))
            x_TD = x_TD + self._linear(f"{name}.mlp.down_proj", gated * self._linear(f"{name}.mlp.up_proj", normed_TD))
        return x_TD

    def logits(self, out_TD: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
        """See HeadKind."""
        if self.is_eagle3:
            return F.linear(self._norm("norm", out_TD), self._w["lm_head.weight"]).float()
        return self._boundary.head(out_TD)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._w[f"{name}.weight"], self._w.get(f"{name}.bias"))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        out = F.rms_norm(x.float(), x.shape[1:], self._w[f"{name}.weight"].float(), self._config.rms_norm_eps)
        return out.to(self.dtype)

    def _shapes(self, target_size: int, draft_vocabulary: int, stored: Shapes) -> dict[str, tuple[int, ...]]:
        """Every tensor that the configuration needs."""
        config = self._config
        size, inner = config.hidden_size, config.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (size, len(self.feature_layers) * target_size if self.is_eagle3 else 2 * size)
        }
        for layer in range(self.num_layers):
            name = f"layers.{layer}"
            width = 2 * size if self.is_eagle3 and layer == 0 else size
            shapes |= {
                f"{name}.self_attn.q_proj.weight": (config.num_attention_heads * self.head_dim, width),
                f"{name}.self_attn.k_proj.weight": (self.num_kv_heads * self.head_dim, width),
                f"{name}.self_attn.v_proj.weight": (self.num_kv_heads * self.head_dim, width),
                f"{name}.self_attn.o_proj.weight": (size, config.num_attention_heads * self.head_dim),
                f"{name}.mlp.gate_proj.weight": (inner, size),
                f"{name}.mlp.up_proj.weight": (inner, size),
                f"{name}.mlp.down_proj.weight": (size, inner),
                f"{name}.post_attention_layernorm.weight": (size,),
            }
            if self.is_eagle3 or layer > 0 or f"{name}.input_layernorm.weight" in stored:
                shapes[f"{name}.input_layernorm.weight"] = (size,)
        if self.is_eagle3:
            shapes |= {"layers.0.hidden_norm.weight": (size,), "norm.weight": (size,)}
            if "lm_head.weight" in stored:
                shapes["lm_head.weight"] = (draft_vocabulary, size)
        if size != target_size:
            shapes["embed_tokens.weight"] = (config.vocab_size, size)
        biases = [name for name in stored if name.endswith(".bias")]
        return shapes | {name: shapes.get(f"{name[:-5]}.weight", ())[:1] for name in biases}


class OwnHead:
    """A HeadKind: what ``fusion-node draft train`` makes."""

    name = "head"
    num_layers = 1

    def __init__(self, head: TrainedHead, boundary: Boundary) -> None:
        self._head = head
        self._boundary = boundary
        config = head.config
        self.feature_layers = config.feature_layers
        self.num_kv_heads, self.head_dim = config.num_key_value_heads, config.head_dim
        self.dtype, self.device = torch.float32, boundary.device
        self.vocabulary = config.vocab_size
        self.token_ids: torch.Tensor | None = head.token_ids.cpu()
        rows_WD = boundary.head_rows(head.token_ids.tolist())
        self._lm_head = torch.nn.Linear(rows_WD.shape[1], rows_WD.shape[0], bias=False, device="meta")
        self._lm_head.weight = torch.nn.Parameter(rows_WD, requires_grad=False)
        for module in (head, self._lm_head):
            speed_up_linears(module)

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """See HeadKind."""
        return self._boundary.embed(tokens).to(self.dtype)

    def start(self, features_TkD: torch.Tensor, embedded_TD: torch.Tensor) -> torch.Tensor:
        """See HeadKind."""
        return self._head.start(features_TkD, embedded_TD)

    def next(self, out_TD: torch.Tensor, embedded_TD: torch.Tensor) -> torch.Tensor:
        """See HeadKind."""
        return self._head.next(out_TD, embedded_TD)

    def layers(
        self, hidden_TD: torch.Tensor, embedded_TD: torch.Tensor, positions_T: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """See HeadKind."""
        query, key, value = self._head.qkv(hidden_TD.unsqueeze(0), positions_T)
        return self._head.finish(hidden_TD, attend(0, query[0], key[0], value[0]))

    def logits(self, out_TD: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
        """See HeadKind."""
        scales = self._head.log_scales[torch.tensor(steps).clamp(max=len(self._head.log_scales)) - 1].exp()
        logits_TW: torch.Tensor = self._lm_head(out_TD)
        return logits_TW * scales.to(out_TD).unsqueeze(1)


def _read_settings(folder: Path) -> dict[str, Any]:
    data = read_config(folder)
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{folder / CONFIG_FILE} is not the configuration of a draft head") from error


def _eagle_tensors(folder: Path) -> HeadTensors:
    """Of the one safetensors file, under one name whoever wrote it."""
    files = sorted(folder.glob("*.safetensors"))
    if not files and any(folder.glob("*.bin")):
        raise ConfigError(
            f"{folder} holds its weights as a pickle, which can run code and is not read: "
            "convert them to model.safetensors"
        )
    if len(files) != 1:
        raise ConfigError(f"{folder} holds {len(files)} safetensors files; a draft head has one")
    stored = HeadTensors(files[0], _short_name)
    if "fc.weight" not in stored.shapes or "layers.0.self_attn.q_proj.weight" not in stored.shapes:
        raise ConfigError(
            f"{folder} holds no EAGLE head: it has no fc or no decoder layer. EAGLE, EAGLE-2 and EAGLE-3 checkpoints "
            "are read, and what `fusion-node draft train` makes"
        )
    return stored


def _short_name(name: str) -> str:
    short = name.removeprefix("model.")
    return "layers.0." + short.removeprefix("midlayer.") if short.startswith("midlayer.") else short


def _llama_config(folder: Path, settings: dict[str, Any]) -> PretrainedConfig:
    """Of the head's layers; speculators write it into a part of its own."""
    inner = settings.get("transformer_layer_config")
    found = inner if isinstance(inner, dict) else settings
    wanted = {name: found[name] for name in _LLAMA_SETTINGS if name in found}
    try:
        config: PretrainedConfig = AutoConfig.for_model("llama", **wanted)
        sizes = (config.hidden_size, config.intermediate_size, config.vocab_size, config.head_dim, config.rms_norm_eps)
        is_sound = (
            all(0 < value < math.inf for value in sizes)
            and 1 <= config.num_hidden_layers <= MAX_HEAD_LAYERS
            and config.num_key_value_heads >= 1
            and config.num_attention_heads % config.num_key_value_heads == 0
            and config.head_dim % 2 == 0
        )
    except (StrictDataclassError, ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise ConfigError(f"{folder / CONFIG_FILE} is not the configuration of an EAGLE head") from error
    if not is_sound:
        raise ConfigError(f"{folder / CONFIG_FILE}: its sizes do not fit each other")
    if config.hidden_act != "silu":
        raise ConfigError(f"{folder} is a head with the activation {config.hidden_act!r}, which is not read: silu is")
    return config


def _rotary(folder: Path, config: PretrainedConfig) -> LlamaRotaryEmbedding:
    try:
        rotary = LlamaRotaryEmbedding(config)
        is_sound = bool(torch.isfinite(rotary.inv_freq).all()) and math.isfinite(rotary.attention_scaling)
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"{folder / CONFIG_FILE}: its rotary positions are of a kind that is not read") from error
    if not is_sound:
        raise ConfigError(f"{folder / CONFIG_FILE}: its rotary positions are not finite")
    return rotary


def _draft_vocabulary(folder: Path, settings: dict[str, Any], vocabulary: int) -> int:
    found = settings.get("draft_vocab_size") or vocabulary
    if not isinstance(found, int) or not 1 <= found <= vocabulary:
        raise ConfigError(f"{folder / CONFIG_FILE}: its draft vocabulary is not a part of the model's {vocabulary}")
    return found


def _feature_layers(folder: Path, settings: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Which rows of the target an EAGLE-3 head takes: a low one, a middle one and a high one unless it says others."""
    nested = settings.get("eagle_config")
    if isinstance(nested, dict) and "eagle_aux_hidden_state_layer_ids" in nested:
        # Here a number is the layer whose output it is (SGLang, NVIDIA's checkpoints).
        found, shift = nested["eagle_aux_hidden_state_layer_ids"], 1
    else:
        # And here the layer that takes it (vLLM, speculators).
        found, shift = settings.get("eagle_aux_hidden_state_layer_ids") or [2, num_layers // 2, num_layers - 3], 0
    is_sound = isinstance(found, list) and bool(found) and all(isinstance(layer, int) for layer in found)
    layers = tuple(layer + shift for layer in found) if is_sound else ()
    if not layers or not all(0 < layer <= num_layers for layer in layers) or len(layers) > MAX_HEAD_LAYERS:
        raise ConfigError(f"{folder} is a head that takes rows of layers that the model, with {num_layers}, has not")
    return layers


def _check_sizes(
    folder: Path,
    config: PretrainedConfig,
    settings: dict[str, Any],
    is_eagle3: bool,
    *,
    hidden_size: int,
    vocabulary: int,
) -> None:
    """Whether it is a head of this target."""
    target_size = settings.get("target_hidden_size") or config.hidden_size
    if target_size != hidden_size or (not is_eagle3 and config.hidden_size != hidden_size):
        raise ConfigError(
            f"{folder} is a head for a model with a hidden size of {target_size}, and this one's is {hidden_size}: "
            "take one that was trained for this model"
        )
    if config.vocab_size != vocabulary:
        raise ConfigError(
            f"{folder} is a head for a model with {config.vocab_size} token ids, and this one has {vocabulary}: "
            "take one that was trained for this model"
        )


def _token_ids(folder: Path, stored: HeadTensors, draft_vocabulary: int, vocabulary: int) -> torch.Tensor | None:
    """Of the draft vocabulary's places; None where it is the target's."""
    if "d2t" in stored.shapes:
        return stored.token_ids(draft_vocabulary, vocabulary)
    if draft_vocabulary != vocabulary:
        raise ConfigError(f"{folder} lacks d2t, which says what its {draft_vocabulary} draft tokens mean")
    return None
