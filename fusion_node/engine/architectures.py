"""Which decoder architectures of transformers the engine serves, and what is particular about each.

No family has code of its own. The class of transformers computes; the engine keeps some of its layers under their own
names, and gives its attention modules another attention function. What a family needs beyond that is a row of the table
below, and every row is proven by tests/engine/test_parity.py, which also writes docs/architectures.md.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from huggingface_hub.errors import StrictDataclassError
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
        input_switch: setting of the base model's configuration that lets it do so.
        wrapped_by: model_type of checkpoints that hold this decoder as the text part of something larger.
        needs_contiguous: its class takes what linear layers put out for contiguous.
        fuses: its layers can be split among the members of a fusion group (fusion_node.engine.sliced_stage): plain
            layers of RMSNorm, attention and a gated MLP or experts, each added to the residual, and no norm over what
            several members hold but the one whose sum of squares they exchange.
    """

    model_type: str
    features: tuple[str, ...] = ()
    input_scale: str | None = None
    input_switch: str | None = None
    wrapped_by: str | None = None
    needs_contiguous: bool = False
    fuses: bool = False


SLIDING, _MLA, _DSA = "sliding window", "latent attention (MLA)", "sparse attention (DSA)"
_EXPERTS, _SHARED = "experts", "shared experts"
_QK_NORM, _POST_NORMS, _PARTIAL, _NO_ROPE = "QK norm", "post norms", "partial RoPE", "layers without RoPE"
_SCALE = "embedding_multiplier"

_FAMILIES = (
    Architecture("llama", fuses=True),
    Architecture("mistral", (SLIDING,), wrapped_by="mistral3", fuses=True),
    Architecture("qwen2", (SLIDING, "QKV bias"), fuses=True),
    Architecture("qwen3", (SLIDING, _QK_NORM), fuses=True),
    Architecture("qwen3_moe", (SLIDING, _QK_NORM, _EXPERTS), fuses=True),
    Architecture("gemma2", (SLIDING, "soft cap", _POST_NORMS)),
    Architecture("gemma3_text", (SLIDING, "RoPE by layer type", _QK_NORM, _POST_NORMS), wrapped_by="gemma3"),
    Architecture("phi3", (SLIDING, "fused QKV")),
    Architecture("olmo2", (_QK_NORM, _POST_NORMS)),
    Architecture("smollm3", (SLIDING, _NO_ROPE)),
    Architecture("glm4", (_PARTIAL, _POST_NORMS)),
    Architecture("glm4_moe", (_PARTIAL, _QK_NORM, _EXPERTS, _SHARED)),
    Architecture("glm_moe_dsa", (_MLA, _DSA, _EXPERTS, _SHARED)),
    Architecture("cohere2", (SLIDING, _NO_ROPE, "parallel MLP")),
    Architecture("starcoder2", (SLIDING, "LayerNorm", "biases")),
    Architecture("granite", ("scaled residuals",), input_scale=_SCALE),
    Architecture("gpt_oss", (SLIDING, "attention sinks", _EXPERTS)),
    Architecture("mixtral", (SLIDING, _EXPERTS), fuses=True),
    Architecture("olmoe", (_QK_NORM, _EXPERTS)),
    Architecture("deepseek_v3", (_MLA, _EXPERTS, _SHARED)),
    # Asked for less, and the same to the engine.
    Architecture(
        "afmoe",
        (SLIDING, _NO_ROPE, _QK_NORM, _POST_NORMS, _EXPERTS, _SHARED),
        input_switch="mup_enabled",
        needs_contiguous=True,
    ),
    Architecture("apertus", (_QK_NORM, "ungated MLP")),
    Architecture("arcee", ("ungated MLP",)),
    Architecture("cohere", ("parallel MLP", "LayerNorm", _QK_NORM)),
    Architecture("cwm", (SLIDING,)),
    Architecture("deepseek_v2", (_MLA, _EXPERTS, _SHARED), needs_contiguous=True),
    Architecture("deepseek_v32", (_MLA, _DSA, _EXPERTS, _SHARED)),
    Architecture("dots1", (SLIDING, _QK_NORM, _EXPERTS, _SHARED)),
    Architecture("ernie4_5"),
    Architecture("ernie4_5_moe", (_EXPERTS, _SHARED)),
    Architecture("exaone4", (SLIDING, _NO_ROPE, _QK_NORM, _POST_NORMS)),
    Architecture("flex_olmo", (_QK_NORM, _POST_NORMS, _EXPERTS)),
    Architecture("gemma"),
    Architecture("glm", (_PARTIAL,)),
    Architecture("glm4_moe_lite", (_MLA, _EXPERTS, _SHARED)),
    Architecture("granitemoe", ("scaled residuals", _EXPERTS), input_scale=_SCALE),
    Architecture("granitemoeshared", ("scaled residuals", _EXPERTS, _SHARED), input_scale=_SCALE),
    Architecture("helium"),
    Architecture("hunyuan_v1_dense", (_QK_NORM,)),
    Architecture("hunyuan_v1_moe", (_QK_NORM, _EXPERTS, _SHARED)),
    Architecture("minimax_m2", (_PARTIAL, _QK_NORM, _EXPERTS)),
    Architecture("ministral", (SLIDING,)),
    Architecture("olmo", ("LayerNorm", "clipped QKV")),
    Architecture("olmo3", (SLIDING, _QK_NORM, _POST_NORMS)),
    Architecture("qwen2_moe", (SLIDING, "QKV bias", _EXPERTS, _SHARED)),
    Architecture("seed_oss", ("QKV bias",)),
    Architecture("solar_open", (_PARTIAL, _EXPERTS, _SHARED)),
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
        ConfigError: when the architecture is not supported, and the message lists those that are; or when its class
            does not take the settings.
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
    try:
        config: PretrainedConfig = AutoConfig.for_model(model_type, **settings)
    except (StrictDataclassError, ValueError, TypeError, LookupError, ArithmeticError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"config.json of {model.name} is not one of a {model_type} model: {reason}") from error
    if getattr(config, "use_bidirectional_attention", False):
        raise ConfigError(f"{model.name} is not a decoder: its tokens see those that come after them")
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


def first_layers(config: PretrainedConfig) -> frozenset[int] | None:
    """Layers at which a range may begin: those that use nothing that a layer before them chose. None: all of them."""
    types: list[str] | None = getattr(config, "indexer_types", None)
    if types is None or "shared" not in types:
        return None
    return frozenset(index for index, kind in enumerate(types) if kind != "shared")


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
    begins = first_layers(config)
    if begins is not None and layers.start not in begins:
        raise InvalidLayers(
            f"layer {layers.start} attends to the positions that a layer before it chose: "
            f"a range of this model begins at one of the layers {', '.join(map(str, sorted(begins)))}"
        )
    kept = copy.copy(model)
    kept._modules = dict(model._modules)
    kept.layers = _choose(model.get_submodule("layers"), range(layers.start, layers.stop))
    kept.config = _config_of(config, layers.start, layers.stop)
    switch = ARCHITECTURES[config.model_type].input_switch
    if switch is not None:
        setattr(kept.config, switch, False)
    return kept


def join_layers(models: Sequence[PreTrainedModel], config: PretrainedConfig, layers: LayerRange) -> PreTrainedModel:
    """A model that shares everything with several parts of one, and has these of their layers.

    Raises:
        InvalidLayers: none of them has one of the layers, or the range cannot begin where it does.
    """
    resident = {name: module for model in reversed(models) for name, module in model.layers._modules.items()}
    missing = [layer for layer in range(layers.start, layers.stop) if str(layer) not in resident]
    if missing:
        raise InvalidLayers(f"layer {missing[0]} of {layers} is not resident")
    joined = copy.copy(models[0])
    joined._modules = dict(models[0]._modules)
    joined.layers = torch.nn.ModuleList()
    joined.layers._modules.update(resident)
    return keep_layers(joined, config, layers)


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
