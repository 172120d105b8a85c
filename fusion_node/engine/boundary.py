"""What stays with the user: embedding in front, final norm and LM head behind. No node is sent ids, text or logits.

Both ends run the model class's own forward with no layer between, so that whatever a family does there (an embedding
that is scaled, logits that are divided or capped) is done once, and here.

Shapes: T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from fusion_node.engine import f16r32
from fusion_node.engine.architectures import build_boundary, load_config
from fusion_node.engine.linear import speed_up_linears
from fusion_node.engine.numerics import NumericsClass
from fusion_node.engine.quantized import Quantization, is_boundary_quantized
from fusion_node.engine.weights import TensorSource, fill
from fusion_node.errors import ConfigError

NUM_TRIED = 64
"""Tokens whose rows say whether the embedding alone makes them: a family that scales, norms or adds does so to all."""


class Boundary:
    """Embedding, final norm and LM head of a model, on one device."""

    def __init__(self, model: PreTrainedModel, *, numerics: NumericsClass, device: torch.device) -> None:
        """Takes a causal language model without layers apart into its two ends."""
        self.numerics = numerics
        self.device = device
        self._front = model.get_submodule(model.base_model_prefix)
        self._back = model
        self._head: torch.nn.Module = model.get_output_embeddings()
        setattr(model, model.base_model_prefix, _Rows(self._front.get_submodule("norm")))
        self._norm = model.get_submodule(model.base_model_prefix).get_submodule("norm")
        self._front.norm = torch.nn.Identity()
        self._is_table: bool | None = None
        """Nothing happens in front but that rows are taken from the embedding; None: not tried yet."""

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
            ConfigError: the architecture is not supported, or its quantisation cannot be loaded here.
            StoreCorrupted: a tensor does not match the manifest.
        """
        config = load_config(source)
        quantization = None
        if is_boundary_quantized(source.tensor_names):
            quantization = Quantization.find(source, numerics=numerics, device=device)
        model = build_boundary(config, dtype=numerics.dtype, quantization=quantization)
        f16r32.prepare(model, numerics, device)
        fill(model, source, dtype=numerics.dtype, device=device, quantization=quantization)
        # Contiguous logits: whoever samples reads them row by row.
        speed_up_linears(model, is_output_contiguous=True)
        f16r32.apply(model, numerics)
        return cls(model.eval(), numerics=numerics, device=device)

    @torch.inference_mode()
    def embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Rows ``[T, D]`` that the first stage is sent."""
        if self._is_table is None:
            self._is_table = self._try_table()
        ids = torch.tensor(token_ids, device=self.device)
        return self._table(ids) if self._is_table else self._through_front(ids)

    def _try_table(self) -> bool:
        """A family's own forward takes four times as long for one row as the row itself, for every token."""
        vocabulary = int(self._front.config.get_text_config().vocab_size)
        ids = torch.arange(0, vocabulary, max(1, vocabulary // NUM_TRIED), device=self.device)
        rows, alone = self._through_front(ids), self._table(ids)
        return rows.dtype == alone.dtype and torch.equal(rows, alone)

    def _table(self, ids_T: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self._front.get_input_embeddings()(ids_T)
        return rows

    def _through_front(self, ids_T: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self._front(input_ids=ids_T[None], use_cache=False).last_hidden_state[0]
        return rows

    def logits(self, rows_TD: torch.Tensor) -> npt.NDArray[np.float32]:
        """Logits ``[T, V]`` in float32 of rows that the last stage returned."""
        return self.logits_there(rows_TD).cpu().numpy()

    def logits_of(self, rows: Sequence[torch.Tensor]) -> npt.NDArray[np.float32]:
        """The same, of rows ``[D]`` that came one by one."""
        return self.logits(torch.stack(list(rows)))

    @torch.inference_mode()
    def logits_there(self, rows_TD: torch.Tensor) -> torch.Tensor:
        """The same, left on the device."""
        rows = rows_TD.to(device=self.device, dtype=self.numerics.dtype)
        logits: torch.Tensor = self._back(inputs_embeds=rows.unsqueeze(0), use_cache=False).logits[0]
        return logits.float()

    @torch.inference_mode()
    def norm(self, rows_TD: torch.Tensor) -> torch.Tensor:
        """What the LM head multiplies by, ``[T, D]``, of rows that the last stage returned."""
        rows: torch.Tensor = self._norm(rows_TD.to(device=self.device, dtype=self.numerics.dtype))
        return rows

    @torch.inference_mode()
    def head(self, normed_TD: torch.Tensor) -> torch.Tensor:
        """The LM head alone: ``[T, V]`` in float32 of rows that are normed already, left on the device."""
        logits: torch.Tensor = self._head(normed_TD.to(device=self.device, dtype=self.numerics.dtype))
        return logits.float()

    def head_rows(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The LM head's weights for these tokens, ``[len(token_ids), D]`` in float32: what drafts multiply by.

        Raises:
            ConfigError: the head is quantised.
        """
        weight = self._head.weight
        if not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or weight.dim() != 2:
            raise ConfigError("the LM head of this model is quantised: a draft needs its plain rows")
        return weight.detach()[torch.tensor(token_ids, device=weight.device)].float()


class _Rows(torch.nn.Module):
    """Stands for the base model behind a head: the rows that it is handed, normed."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, *, inputs_embeds: torch.Tensor, **_: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self.norm(inputs_embeds))
