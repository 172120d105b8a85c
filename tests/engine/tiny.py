"""Tiny seeded models in memory, in the form in which the engine reads stored ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

TINY: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": None, "tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"head_dim": 24, "tie_word_embeddings": True},
}


@dataclass(frozen=True)
class TinyModel:
    """A TensorSource (fusion_node.engine.weights) over a whole transformers model, which it also exposes."""

    path: Path
    name: str
    config: dict[str, Any]
    whole: torch.nn.Module

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(self.whole.state_dict())

    def open_tensors(self, names: Iterable[str]) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
        state = self.whole.state_dict()
        for name in names:
            tensor = state[name].contiguous()
            yield name, "F32", tuple(tensor.shape), tensor.view(torch.uint8).numpy().reshape(-1).data


def tiny_model(model_type: str, seed: int = 0, **overrides: Any) -> TinyModel:
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
            **TINY[model_type],
            **overrides,
        },
    )
    torch.manual_seed(seed)
    with torch.device("cpu"):
        whole = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            # The default initialisation is so small that attention hardly shows in the output; much more than
            # unit gain amplifies rounding from layer to layer.
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            elif "norm" not in name:
                parameter.normal_(0, 0.1)
    settings = config.to_dict()
    return TinyModel(Path("/nonexistent"), f"tiny-{model_type}", settings, whole)
