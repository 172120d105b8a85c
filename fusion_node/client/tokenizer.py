"""Text to token ids and back, with the model's own tokenizer and chat template. Never on a node."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer

from fusion_node.errors import ConfigError, StoreCorrupted

ChatMessage = dict[str, Any]
"""``{"role": "user" | "assistant" | "system", "content": text}``, as in the OpenAI API."""


class Tokenizer:
    """The tokenizer of a stored model.

    Raises:
        StoreCorrupted: the files cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
            # Too long a prompt is our error to raise, with what to do, and not a warning of a library.
            self._tokenizer.model_max_length = sys.maxsize
        except (OSError, ValueError) as error:
            raise StoreCorrupted(f"the tokenizer in {path} cannot be read: pull the model again") from error

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token, as the tokenizer writes it, and its id."""
        return dict(self._tokenizer.get_vocab())

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with the special tokens that the model wants in front."""
        return list(self._tokenizer(text)["input_ids"])

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer.

        Raises:
            ConfigError: the model has no chat template, or its template does not accept the messages.
        """
        if not self.has_chat_template:
            raise ConfigError("the model has no chat template: use plain text (generate --raw)")
        try:
            encoded = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise ConfigError(f"the model's chat template refuses the messages: {type(error).__name__}") from error
        return list(encoded["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
