"""The whole model in this process, by transformers alone: what a swarm's answers are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging


class ReferenceModel:
    """A stored model, loaded whole, greedy decoding only."""

    def __init__(self, path: Path, *, dtype: torch.dtype = torch.float32) -> None:
        hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).eval()

    @torch.inference_mode()
    def greedy(self, prompt_ids: Sequence[int], num_tokens: int, *, ignore_eos: bool = False) -> list[int]:
        """Up to ``num_tokens`` token ids after the prompt; ends before an end-of-sequence token unless ignored."""
        ids = torch.tensor([list(prompt_ids)])
        output = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens if ignore_eos else None,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
        )
        new = [int(token) for token in output[0, len(prompt_ids) :]]
        eos = self._model.generation_config.eos_token_id
        ends = set(eos if isinstance(eos, list) else [eos])
        return new[:-1] if new and new[-1] in ends and not ignore_eos else new
