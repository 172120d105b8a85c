"""The whole model in this process, by transformers alone: what a swarm's answers are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as hf_logging


class ReferenceModel:
    """A stored model, loaded whole, greedy decoding only."""

    def __init__(self, path: Path, *, dtype: torch.dtype = torch.float32) -> None:
        hf_logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).eval()
        eos = self._model.generation_config.eos_token_id
        self._eos_ids: list[int] = eos if isinstance(eos, list) else [] if eos is None else [eos]
        # The model's own settings fill whatever a call leaves open: they may sample, and cannot be told of no end.
        self._model.generation_config = GenerationConfig()

    @torch.inference_mode()
    def greedy(self, prompt_ids: Sequence[int], num_tokens: int, *, ignore_eos: bool = False) -> list[int]:
        """Up to ``num_tokens`` token ids after the prompt.

        Ends before an end-of-sequence token; with ``ignore_eos`` such a token is one like any other.
        """
        ends = [] if ignore_eos else self._eos_ids
        ids = torch.tensor([list(prompt_ids)])
        output = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=GenerationConfig(
                max_new_tokens=num_tokens, do_sample=False, eos_token_id=ends or None, pad_token_id=0
            ),
        )
        new = [int(token) for token in output[0, len(prompt_ids) :]]
        return new[:-1] if new and new[-1] in ends else new
