"""What stays with the user: embedding in front, final norm and LM head behind. No node is sent ids, text or logits.

Shapes: T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from fusion_node.engine.attention import ATTENTION_NAME
from fusion_node.engine.numerics import NumericsClass
from fusion_node.engine.weights import TensorSource, assign_weights, load_config


class Boundary:
    """Embedding, final norm and LM head of a model, on one device."""

    def __init__(self, model: torch.nn.Module, *, numerics: NumericsClass, device: torch.device) -> None:
        self._model = model
        self.numerics = numerics
        self.device = device

    @classmethod
    def load(
        cls,
        source: TensorSource,
        *,
        numerics: NumericsClass,
        device: torch.device,
    ) -> Boundary:
        """Reads embedding, norm and head, none of the layers.

        Raises:
            ConfigError: the architecture is not supported.
            StoreCorrupted: a tensor does not match the manifest.
        """
        config = load_config(source)
        config.num_hidden_layers = 0
        config.layer_types = []
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=numerics.dtype)
        tied = bool(config.tie_word_embeddings)
        if tied:
            model.lm_head = torch.nn.Identity()
        assign_weights(model, source, lambda name: name, dtype=numerics.dtype, device=device)
        if tied:
            model.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False, device="meta")
            model.lm_head.weight = model.model.embed_tokens.weight
        model.eval()
        return cls(model, numerics=numerics, device=device)

    @torch.inference_mode()
    def embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Rows ``[T, D]`` that the first stage is sent."""
        ids = torch.tensor(token_ids, device=self.device)
        rows: torch.Tensor = self._model.get_submodule("model.embed_tokens")(ids)
        return rows

    @torch.inference_mode()
    def logits(self, rows_TD: torch.Tensor) -> npt.NDArray[np.float32]:
        """Logits ``[T, V]`` in float32 of rows that the last stage returned."""
        rows = rows_TD.to(device=self.device, dtype=self.numerics.dtype)
        normed = self._model.get_submodule("model.norm")(rows)
        logits: torch.Tensor = self._model.get_submodule("lm_head")(normed)
        return logits.float().cpu().numpy()
