"""The tokenizer inside a GGUF file, as the files that Hugging Face tokenizers read.

A byte-level BPE whose pre-tokenizer llama.cpp names is written here, directly from the metadata. Transformers' own
conversion ignores that name (it loses the digit splitting of SmolLM2 and the regular expression of Llama 3), and its
output changes with its version, which the model id would then follow. Everything else goes through transformers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from fusion_node.errors import ConfigError, StoreCorrupted
from fusion_node.store.files import write_durably
from fusion_node.store.gguf_convert import GgufFile, to_json

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTE_LEVEL_ONLY = _BYTE_LEVEL | {"use_regex": False}


def _split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": _BYTE_LEVEL,
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    },
    "llama-bpe": {"type": "Sequence", "pretokenizers": [_split(_WORDS % "{1,3}"), _BYTE_LEVEL_ONLY]},
    "qwen2": {"type": "Sequence", "pretokenizers": [_split(_WORDS % ""), _BYTE_LEVEL_ONLY]},
}
"""By the name in ``tokenizer.ggml.pre``; from the tokenizer.json of the models that llama.cpp gives these names to."""

_CONTROL, _USER_DEFINED = 3, 4
"""Token types of the GGUF specification that are matched before BPE."""


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, with the chat template in the latter.

    Raises:
        StoreCorrupted: when the metadata contradict themselves.
        ConfigError: when neither this module nor transformers can convert the tokenizer.
    """
    pre = file.get("tokenizer.ggml.pre")
    if file.text("tokenizer.ggml.model") == "gpt2" and pre in _PRE_TOKENIZERS:
        tokens = _tokens(file)
        write_durably(folder / "tokenizer.json", _to_compact_json(_byte_level_bpe(file, tokens, pre)))
        write_durably(folder / "tokenizer_config.json", to_json(_tokenizer_config(file, tokens)))
    else:
        _convert_by_transformers(file, folder)


def _byte_level_bpe(file: GgufFile, tokens: list[str], pre: str) -> dict[str, Any]:
    types, merges = file.get("tokenizer.ggml.token_type"), file.get("tokenizer.ggml.merges")
    if not isinstance(types, list) or len(types) != len(tokens) or not isinstance(merges, list):
        raise StoreCorrupted(f"{file.path.name} has a tokenizer without token types or merges")
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": _post_processor(file, tokens),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": {token: index for index, token in enumerate(tokens)},
            # Pairs instead of "a b": a merge whose part contains a space would be ambiguous.
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }


def _post_processor(file: GgufFile, tokens: list[str]) -> dict[str, Any] | None:
    bos = _token(file, "bos", tokens)
    if file.get("tokenizer.ggml.add_bos_token") is not True or bos is None:
        return None
    start: dict[str, Any] = {"SpecialToken": {"id": bos, "type_id": 0}}
    first: dict[str, Any] = {"Sequence": {"id": "A", "type_id": 0}}
    second: dict[str, Any] = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [start, first],
        "pair": [start, first, {"SpecialToken": {"id": bos, "type_id": 1}}, second],
        "special_tokens": {bos: {"id": bos, "ids": [tokens.index(bos)], "tokens": [bos]}},
    }


def _tokenizer_config(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    return {
        "add_prefix_space": False,
        "bos_token": _token(file, "bos", tokens),
        "chat_template": file.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "eos_token": _token(file, "eos", tokens),
        "model_max_length": file.config()["max_position_embeddings"],
        "pad_token": _token(file, "padding", tokens),
        # The class that takes tokenizer.json as it is. Those of a model family rebuild the pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": _token(file, "unknown", tokens),
    }


def _tokens(file: GgufFile) -> list[str]:
    tokens = file.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or len(set(tokens)) != len(tokens):
        raise StoreCorrupted(f"{file.path.name} has no vocabulary, or one with repeated tokens")
    return tokens


def _token(file: GgufFile, role: str, tokens: list[str]) -> str | None:
    index = file.get(f"tokenizer.ggml.{role}_token_id")
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        raise StoreCorrupted(f"{file.path.name}: the {role} token {index} is outside the vocabulary")
    return str(tokens[index])


def _to_compact_json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _convert_by_transformers(file: GgufFile, folder: Path) -> None:
    from transformers import AutoTokenizer  # 3 s and torch: only where needed

    scratch = folder / "tokenizer"
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(file.path.parent), gguf_file=file.path.name, trust_remote_code=False, local_files_only=True
        )
        tokenizer.save_pretrained(str(scratch))
    except (ValueError, KeyError, NotImplementedError, AttributeError, TypeError, ImportError) as error:
        raise ConfigError(
            f"the tokenizer of {file.path.name} cannot be converted ({error}); "
            "pull the safetensors release of the model"
        ) from error
    for path in scratch.iterdir():
        if path.name in (
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "chat_template.jinja",
        ):
            write_durably(folder / path.name, path.read_bytes())
    shutil.rmtree(scratch)
