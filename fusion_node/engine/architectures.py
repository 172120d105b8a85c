"""Which decoder architectures of transformers the engine serves, and what is particular about each.

No family has code of its own. The class of transformers computes; the engine keeps some of its layers under their own
names, and gives its attention modules another attention function. What a family needs beyond that is a row of the table
below, and every row is proven by tests/engine/test_parity.py, which also writes docs/architectures.md.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from fusion_node.engine.attention import ATTENTION_NAME
from fusion_node.engine.latent_attention import LATENT_ATTENTION_NAME, keep_latents
from fusion_node.engine.quantized import Quantization
from fusion_node.errors import ConfigError, InvalidLayers
from fusion_node.types import LayerRange


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family of decoders.

    Attributes:
        model_type: as in config.json.
        features: what its attention and its layers do beyond grouped-query attention, RMSNorm and a gated MLP.
        input_scale: attribute of the base model that multiplies the rows on their way in. The boundary applies it; a
            stage, which is handed rows of any depth, must not.
        wrapped_by: model_type of checkpoints that hold this decoder as the text part of something larger.
    """

    model_type: str
    features: tuple[str, ...] = ()
    input_scale: str | None = None
    wrapped_by: str | None = None


_FAMILIES = (
    Architecture("llama"),
    Architecture("mistral", ("sliding window",)),
    Architecture("qwen2", ("sliding window", "QKV bias")),
    Architecture("qwen3", ("sliding window", "QK norm")),
    Architecture("qwen3_moe", ("QK norm", "experts")),
    Architecture("gemma2", ("sliding window", "soft cap", "post norms")),
    Architecture("gemma3_text", ("sliding window", "RoPE by layer type", "QK norm", "post norms"), wrapped_by="gemma3"),
    Architecture("phi3", ("sliding window", "fused QKV")),
    Architecture("olmo2", ("QK norm", "post norms")),
    Architecture("smollm3", ("layers without RoPE",)),
    Architecture("glm4", ("partial RoPE", "post norms")),
    Architecture("glm4_moe", ("partial RoPE", "QK norm", "experts", "shared experts")),
    Architecture("cohere2", ("sliding window", "layers without RoPE", "parallel MLP")),
    Architecture("starcoder2", ("sliding window", "LayerNorm", "biases")),
    Architecture("granite", ("scaled residuals",), input_scale="embedding_multiplier"),
    Architecture("gpt_oss", ("sliding window", "attention sinks", "experts")),
    Architecture("mixtral", ("sliding window", "experts")),
    Architecture("olmoe", ("QK norm", "experts")),
    Architecture("deepseek_v3", ("latent attention (MLA)", "experts", "shared experts")),
    Architecture("glm_moe_dsa", ("latent attention (MLA)", "sparse attention (DSA)", "experts", "shared experts")),
)

ARCHITECTURES: Mapping[str, Architecture] = {family.model_type: family for family in _FAMILIES}
"""By model_type; those that pass the parity test, and no others."""

_WRAPPERS = {family.wrapped_by: family for family in _FAMILIES if family.wrapped_by}

SUPPORTED_ARCHITECTURES = (*ARCHITECTURES, *_WRAPPERS)
"""Every model_type that may stand in a config.json."""


class ConfigSource(Protocol):
    """What is needed of a stored model before any of its weights is read (fusion_node.store.StoredModel)."""

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> dict[str, Any]: ...


def load_config(model: ConfigSource) -> PretrainedConfig:
    """The decoder's configuration, refused before any weight is read when it is not supported.

    Raises:
        ConfigError: when the architecture is not supported; the message lists those that are.
    """
    settings = dict(model.config)
    model_type = str(settings.pop("model_type", None))
    if model_type in _WRAPPERS:
        settings = dict(settings.get("text_config") or {})
        model_type = str(settings.pop("model_type", _WRAPPERS[model_type].model_type))
    if model_type not in ARCHITECTURES:
        raise ConfigError(
            f"architecture {model_type!r} of {model.name} is not supported; "
            f"these are: {', '.join(sorted(SUPPORTED_ARCHITECTURES))}"
        )
    config: PretrainedConfig = AutoConfig.for_model(model_type, **settings)
    # Router logits are of use in training only.
    config.output_router_logits = False
    return config


def max_positions(config: PretrainedConfig) -> int:
    """How long a sequence may become.

    Of a model with two sets of rotary frequencies (LongRoPE), one for short and one for long sequences, only the
    short set is used: a sequence that grows from one into the other has keys of both, and is computed by none.
    """
    limit: int = config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if kind.get("rope_type") == "longrope":
            limit = min(limit, kind["original_max_position_embeddings"])
    return limit


def build_layers(
    config: PretrainedConfig, layers: LayerRange, *, dtype: torch.dtype, quantization: Quantization | None = None
) -> PreTrainedModel:
    """The base model with only these layers, on the meta device: rows in, rows out.

    The whole model is built, because families derive what a layer is from its index; on the meta device that costs
    half a second at most. The layers keep their indices as names, so names are those of the checkpoint.

    Raises:
        InvalidLayers: the range lies outside the model.
    """
    layers.check_within(config.num_hidden_layers)
    name = LATENT_ATTENTION_NAME if hasattr(config, "kv_lora_rank") else ATTENTION_NAME
    whole = _build(config, name, dtype, quantization)
    model: PreTrainedModel = whole.get_submodule(whole.base_model_prefix)
    keep_latents(model)
    # What stays with the user has no place here; the identities keep the class's own forward unchanged.
    model.embed_tokens = torch.nn.Identity()
    model.norm = torch.nn.Identity()
    scale = ARCHITECTURES[config.model_type].input_scale
    if scale is not None:
        setattr(model, scale, 1.0)
    return keep_layers(model, config, layers)


def keep_layers(model: PreTrainedModel, config: PretrainedConfig, layers: LayerRange) -> PreTrainedModel:
    """A model that shares everything with ``model`` and has only these of its layers.

    Args:
        config: of the whole model.

    Raises:
        InvalidLayers: the first of them needs to know what a layer before chose.
    """
    types: list[str] = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
    if types[layers.start] == "shared":
        begins = [str(index) for index, kind in enumerate(types) if kind == "full"]
        raise InvalidLayers(
            f"layer {layers.start} attends to the positions that a layer before it chose: "
            f"a range of this model begins at one of the layers {', '.join(begins)}"
        )
    kept = copy.copy(model)
    kept._modules = dict(model._modules)
    kept.layers = _choose(model.get_submodule("layers"), range(layers.start, layers.stop))
    kept.config = _config_of(config, layers.start, layers.stop)
    return kept


def build_boundary(
    config: PretrainedConfig, *, dtype: torch.dtype, quantization: Quantization | None = None
) -> PreTrainedModel:
    """The causal language model without its layers, on the meta device."""
    model = _build(config, ATTENTION_NAME, dtype, quantization)
    base = model.get_submodule(model.base_model_prefix)
    base.layers = torch.nn.ModuleList()
    base.config = _config_of(config, 0, 0)
    return model


def _build(
    config: PretrainedConfig, attention: str, dtype: torch.dtype, quantization: Quantization | None
) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    if quantization is not None:
        quantization.prepare(model, dtype)
    return model


def _choose(layers: torch.nn.Module, indices: range) -> torch.nn.ModuleList:
    chosen = torch.nn.ModuleList()
    for index in indices:
        # Not append(): that would count from 0.
        chosen.add_module(str(index), layers.get_submodule(str(index)))
    return chosen


def _config_of(config: PretrainedConfig, start: int, stop: int) -> PretrainedConfig:
    """What the base model's own forward may believe: it counts layers and looks their types up by place."""
    cut = copy.deepcopy(config)
    for key, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(cut, key, value[start:stop])
    cut.num_hidden_layers = stop - start
    return cut
