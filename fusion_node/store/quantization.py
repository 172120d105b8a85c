"""What a model's config says about the quantisation of its weights: for people, for records, and for the engine.

The settings are part of config.json, which the manifest covers, so a quantised model has another id than its original,
and two quantisations of one model have two ids. torchao keeps what its tensors mean in the headers of the safetensors
files, which the manifest does not cover; a pull therefore copies that into a small file of its own, which it does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fusion_node.errors import StoreCorrupted
from fusion_node.store.files import write_durably

TORCHAO_METADATA_FILE = "torchao_tensors.json"
"""What torchao wrote into the headers of the safetensors files: name of a tensor -> its class and attributes."""

_MAX_LABEL_LENGTH = 64
"""Fits the record of a node."""


@dataclass(frozen=True, slots=True)
class QuantizationSettings:
    """The quantization_config of a model.

    Attributes:
        method: its quant_method, as in transformers.
        label: method and format in a few words, for example ``bitsandbytes nf4``. Printable ASCII.
        raw: the settings themselves.
    """

    method: str
    label: str
    raw: Mapping[str, Any]


def quantization_settings(config: Mapping[str, Any]) -> QuantizationSettings | None:
    """The settings in a model's config; None when its weights are plain. Models with several parts may keep them in
    their text part."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        raw = part.get("quantization_config")
        if isinstance(raw, dict):
            # Old releases of bitsandbytes' integration wrote no method.
            is_bitsandbytes = raw.get("load_in_4bit") or raw.get("load_in_8bit")
            method = "bitsandbytes" if is_bitsandbytes else _word(raw.get("quant_method", "unknown"))
            label = " ".join([method, *_details(method, raw)])[:_MAX_LABEL_LENGTH].strip()
            return QuantizationSettings(method, label, raw)
    return None


def copy_torchao_metadata(files: Iterable[Path], folder: Path) -> None:
    """Writes TORCHAO_METADATA_FILE into ``folder`` from the headers of safetensors files.

    The content does not depend on how the tensors are spread over files, nor on the order of the entries.

    Raises:
        StoreCorrupted: a file is not sound.
    """
    from safetensors import SafetensorError, safe_open

    described: dict[str, str] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as opened:
                metadata = opened.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise StoreCorrupted(f"{file} is not a sound safetensors file: {error}") from error
        # The other entries name the format, and list the tensors of one file.
        described |= {name: text for name, text in metadata.items() if "." in name}
    content = {**described, "tensor_names": msgspec.json.encode(sorted(described)).decode()}
    write_durably(folder / TORCHAO_METADATA_FILE, msgspec.json.encode(content, order="sorted"))


def _details(method: str, raw: Mapping[str, Any]) -> list[str]:
    match method:
        case "bitsandbytes":
            return [_word(raw.get("bnb_4bit_quant_type", "fp4")) if raw.get("load_in_4bit") else "int8"]
        case "gptq" | "awq":
            group = raw.get("group_size", raw.get("q_group_size"))
            bits = raw.get("bits", raw.get("w_bit"))
            return [f"int{bits}"] * isinstance(bits, int) + [f"g{group}"] * (isinstance(group, int) and group > 0)
        case "compressed-tensors":
            groups = raw.get("config_groups")
            weights = [
                group["weights"]
                for group in (groups.values() if isinstance(groups, dict) else ())
                if isinstance(group, dict) and isinstance(group.get("weights"), dict)
            ]
            kinds = {f"{_word(w.get('type', 'int'))}{_word(w.get('num_bits', ''))}" for w in weights}
            return [_word(raw.get("format", "")), *sorted(kinds)]
        case "torchao":
            kind = raw.get("quant_type")
            while isinstance(kind, dict) and "_type" not in kind:
                kind = kind.get("default")
            name = kind.get("_type") if isinstance(kind, dict) else kind
            return [_word(name).removesuffix("Config")] if name else []
    return []


def _word(value: object) -> str:
    """What came from a file, made fit for one line of text."""
    return re.sub(r"[^A-Za-z0-9._-]+", "", str(value))[:_MAX_LABEL_LENGTH]
