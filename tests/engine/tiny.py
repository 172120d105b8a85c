"""Tiny seeded models in memory, in the form in which the engine reads stored ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from fusion_node.store import ModelStore

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GROUPED = {**_EXPERTS, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 2}
_SCALED = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2}
_SPARSE = {"index_topk": 6, "index_n_heads": 8, "index_head_dim": 12}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}  # fmt: skip

TINY: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
    "qwen3": {
        "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4, "head_dim": 24,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        **_EXPERTS, "num_experts": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True,
        "head_dim": 16, "use_sliding_window": True, "sliding_window": 8,
    },
    "gemma2": {
        "sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {"sliding_window": 8, "sliding_window_pattern": 3, "head_dim": 16, "query_pre_attn_scalar": 24},
    "phi3": {"sliding_window": 8},
    "olmo2": {},
    "smollm3": {"no_rope_layer_interval": 3, "use_sliding_window": True, "sliding_window": 8},
    "glm4": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "glm4_moe": {**_GROUPED, "head_dim": 16, "partial_rotary_factor": 0.5, "use_qk_norm": True},
    "cohere2": {"sliding_window": 8, "sliding_window_pattern": 3, "logit_scale": 0.25},
    "starcoder2": {"sliding_window": 8, "use_bias": True},
    "granite": _SCALED,
    "gpt_oss": {"sliding_window": 8, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "deepseek_v3": {**_GROUPED, **_LATENT},
    "glm_moe_dsa": {
        **_GROUPED, **_LATENT, **_SPARSE,
        "indexer_types": ["full", "full", "full", "shared", "shared", "full", "shared"],
    },
    "afmoe": {
        "sliding_window": 8, "head_dim": 16, "num_dense_layers": 2, "num_experts": 4, "num_experts_per_tok": 2,
        "num_shared_experts": 1, "moe_intermediate_size": 32, "global_attn_every_n_layers": 3, "layer_types": None,
        "mup_enabled": True,
    },
    "apertus": {},
    "arcee": {},
    "cohere": {"logit_scale": 0.25, "use_qk_norm": True},
    "cwm": {"sliding_window": 8, "head_dim": 16},
    "deepseek_v2": {**_GROUPED, **_LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v32": {**_GROUPED, **_LATENT, **_SPARSE},
    "dots1": {**_GROUPED, "sliding_window": 8, "max_window_layers": 3, "n_shared_experts": 1},
    "ernie4_5": {"head_dim": 16},
    "ernie4_5_moe": {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 2,
        "moe_num_shared_experts": 1,
    },
    "exaone4": {"sliding_window": 8, "sliding_window_pattern": 3},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma": {"head_dim": 16},
    "glm": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "glm4_moe_lite": {**_GROUPED, **_LATENT},
    "granitemoe": {**_SCALED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {**_SCALED, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 40},
    "helium": {"head_dim": 12},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "minimax_m2": {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "ministral": {"sliding_window": 8, "head_dim": 16},
    "olmo": {"clip_qkv": 0.5},
    "olmo3": {"sliding_window": 8},
    "qwen2_moe": {
        **_EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2,
        "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3,
    },
    "seed_oss": {"head_dim": 16},
    "solar_open": {**_GROUPED, "head_dim": 16},
}  # fmt: skip
"""What differs from the settings common to all. A sliding window is shorter than the sequences of the tests."""


@dataclass(frozen=True)
class TinyModel:
    """A TensorSource (fusion_node.engine.weights) over a whole transformers model, which it also exposes.

    Attributes:
        as_in_module: stores the tensors as the module holds them (a layer's experts in one), not as the hub does.
        read: the names of all tensors that were opened.
    """

    path: Path
    name: str
    config: dict[str, Any]
    whole: torch.nn.Module
    as_in_module: bool = False
    read: list[str] = field(default_factory=list)

    @cached_property
    def stored(self) -> dict[str, torch.Tensor]:
        state = self.whole.state_dict()
        for tied in getattr(self.whole, "all_tied_weights_keys", ()):
            del state[tied]
        if not self.as_in_module and state:
            state = revert_weight_conversion(self.whole, state)  # type: ignore[arg-type]
        return {name: tensor.contiguous() for name, tensor in state.items()}

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(self.stored)

    def open_tensors(self, names: Iterable[str]) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
        for name in names:
            self.read.append(name)
            tensor = self.stored[name]
            yield name, "F32", tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().data


def tiny_model(model_type: str, seed: int = 0, *, as_in_module: bool = False, **overrides: Any) -> TinyModel:
    """Seven layers, hidden size 48, four heads over two KV heads, vocabulary 131."""
    config = AutoConfig.for_model(
        model_type,
        **{
            "num_hidden_layers": 7,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 131,
            "max_position_embeddings": 256,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
            **TINY[model_type],
            **overrides,
        },
    )
    torch.manual_seed(seed)
    with torch.device("cpu"):
        whole = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    persistent = set(whole.state_dict())
    with torch.no_grad():
        for name, tensor in [*whole.named_parameters(), *whole.named_buffers()]:
            # The default initialisation is so small that attention hardly shows in the output; much more than
            # unit gain amplifies rounding from layer to layer.
            if tensor.dim() > 1:
                tensor.normal_(0, tensor.shape[-1] ** -0.5)
            elif name in persistent and not name.endswith("norm.weight"):
                tensor.normal_(0, 0.1)
    settings = config.to_dict()
    return TinyModel(Path("/nonexistent"), f"tiny-{model_type}", settings, whole, as_in_module)


def home_with_tiny(tmp_path_factory: pytest.TempPathFactory, **overrides: Any) -> Path:
    """A store with a tiny llama, by the name of ``tiny``, that reads characters."""
    source = tmp_path_factory.mktemp("source") / "tiny"
    source.mkdir()
    tiny = tiny_model("llama", **overrides)
    save_file(tiny.stored, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(tiny.config))
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    words = {character: index for index, character in enumerate(["[PAD]", "[BOS]", "[EOS]", "[UNK]", *characters])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    home = tmp_path_factory.mktemp("home")
    ModelStore(home).pull(str(source))
    return home
