"""GGUF files to safetensors and a Hugging Face config, tensor by tensor.

Transformers can load a GGUF file, but only as a whole model in memory and only with the `accelerate` package. Here the
quantised rows are mapped, put into Hugging Face's order, dequantised a chunk at a time by the `gguf` package and
written, so the peak is one chunk, whatever the size of the model. No torch is imported.

llama.cpp stores the rows of a Llama query or key head with the two halves of the rotary pair interleaved; Hugging Face
keeps the halves apart. As the permutation moves whole rows, it is applied to the quantised rows.

A file is refused rather than guessed at: an unknown architecture, a tensor without a known counterpart and a rotary
scaling that cannot be expressed are errors, because a model that is subtly wrong is worse than none.

Source: llama.cpp `convert_hf_to_gguf.py` (LlamaModel.permute, rope_freqs), the GGUF specification.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fusion_node.errors import ConfigError, StoreCorrupted
from fusion_node.store.progress import Progress
from fusion_node.store.safetensors_file import TensorSpec, write_safetensors

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_MAX_ENTRIES = 1_000_000
"""Bound of tensors and of metadata keys, checked before the reader allocates for them."""

_CHUNK_BYTES = 8 * 2**20
"""Bytes that one chunk has after dequantisation; the temporaries of the dequantiser are a few times that."""


@dataclass(frozen=True, slots=True)
class _Architecture:
    model_type: str
    class_name: str
    permuted: bool


_ARCHITECTURES = {
    "llama": _Architecture("llama", "LlamaForCausalLM", permuted=True),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM", permuted=False),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM", permuted=False),
}

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_LAYER_TENSOR = re.compile(r"^blk\.(\d{1,5})\.([a-z_]+)\.(weight|bias)$")

_ROPE_FACTORS = "rope_freqs.weight"


class GgufFile:
    """A GGUF file opened for conversion.

    Args:
        path: the file.

    Raises:
        StoreCorrupted: when it is not a sound GGUF file.
        ConfigError: when its architecture cannot be converted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _open_reader(path)
        name = self.text("general.architecture")
        found = _ARCHITECTURES.get(name)
        if found is None:
            raise ConfigError(
                f"{path.name} holds architecture {name!r}, which cannot be converted from GGUF "
                f"(supported: {', '.join(_ARCHITECTURES)}); pull the safetensors release of the model"
            )
        self._prefix, self._architecture = name, found
        self._tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in self._reader.tensors}

    def get(self, key: str) -> Any:
        """A metadata value in Python types, None when there is none."""
        field = self._reader.fields.get(key)
        return None if field is None else field.contents()

    def text(self, key: str) -> str:
        """A metadata string; StoreCorrupted when it is missing."""
        value = self.get(key)
        if not isinstance(value, str):
            raise StoreCorrupted(f"{self.path.name} lacks the metadata {key}")
        return value

    def config(self) -> dict[str, Any]:
        """The model's config.json.

        Raises:
            StoreCorrupted: when a needed value is missing.
            ConfigError: when the rotary scaling cannot be expressed.
        """
        heads = self._whole("attention.head_count")
        hidden = self._whole("embedding_length")
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise StoreCorrupted(f"{self.path.name} has no token_embd.weight")
        config: dict[str, Any] = {
            "architectures": [self._architecture.class_name],
            "model_type": self._architecture.model_type,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "bos_token_id": self.get("tokenizer.ggml.bos_token_id"),
            "dtype": "float32",
            "eos_token_id": self.get("tokenizer.ggml.eos_token_id"),
            "head_dim": self._whole("attention.key_length", hidden // heads),
            "hidden_act": "silu",
            "hidden_size": hidden,
            "initializer_range": 0.02,
            "intermediate_size": self._whole("feed_forward_length"),
            "max_position_embeddings": self._whole("context_length"),
            "num_attention_heads": heads,
            "num_hidden_layers": self._whole("block_count"),
            "num_key_value_heads": self._whole("attention.head_count_kv", heads),
            "pad_token_id": self.get("tokenizer.ggml.padding_token_id"),
            "rms_norm_eps": _shortest(self._number("attention.layer_norm_rms_epsilon", 1e-5)),
            "rope_parameters": self._rope_parameters(),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "use_cache": True,
            "vocab_size": int(embedding.shape[1]),
        }
        if self._architecture.model_type == "llama":
            config["mlp_bias"] = False
        return config

    def plan(self, matrix_dtype: str) -> list[tuple[TensorSpec, str]]:
        """What will be written: Hugging Face name, dtype and shape, and the GGUF name it comes from.

        Args:
            matrix_dtype: dtype of quantised tensors, ``F32`` or ``F16``. Tensors stored as floats keep F32 or F16.

        Raises:
            ConfigError: when a tensor has no counterpart.
        """
        planned = []
        for gguf_name, tensor in self._tensors.items():
            if gguf_name == _ROPE_FACTORS:
                continue  # turned into rope_parameters by config()
            shape = tuple(int(size) for size in reversed(tensor.shape))
            dtype = {"F32": "F32", "F16": "F16"}.get(tensor.tensor_type.name, matrix_dtype)
            planned.append((TensorSpec(self._translate(gguf_name), dtype, shape), gguf_name))
        return sorted(planned, key=lambda item: item[0].name)

    def write(self, target: Path, matrix_dtype: str, progress: Progress) -> None:
        """Dequantises everything into one safetensors file."""
        planned = self.plan(matrix_dtype)
        progress.start("Converting weights", sum(spec.num_bytes for spec, _ in planned))
        write_safetensors(target, [(spec, self._chunks(spec, name, progress)) for spec, name in planned])

    def _chunks(self, spec: TensorSpec, gguf_name: str, progress: Progress) -> Iterator[memoryview]:
        from gguf.quants import dequantize

        tensor = self._tensors[gguf_name]
        rows = tensor.data if len(spec.shape) > 1 else tensor.data.reshape(1, -1)
        order = self._row_order(gguf_name, spec.shape)
        if order is not None and len(spec.shape) == 1:
            rows, order = tensor.data.reshape(1, -1)[:, order], None
        num_rows = rows.shape[0]
        per_chunk = max(1, _CHUNK_BYTES * num_rows // max(1, math.prod(spec.shape) * 4))
        target = np.dtype("<f4") if spec.dtype == "F32" else np.dtype("<f2")
        for first in range(0, num_rows, per_chunk):
            picked = slice(first, first + per_chunk) if order is None else order[first : first + per_chunk]
            try:
                values = dequantize(np.ascontiguousarray(rows[picked]), tensor.tensor_type)
            except NotImplementedError as error:
                raise ConfigError(
                    f"{self.path.name} uses quantisation {tensor.tensor_type.name}, which the gguf package cannot read"
                ) from error
            data = np.ascontiguousarray(values, dtype=target)
            progress.advance(data.nbytes)
            yield data.data.cast("B")

    def _row_order(self, gguf_name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any] | None:
        """Which GGUF row each Hugging Face row is, for the tensors that llama.cpp permutes."""
        match = _LAYER_TENSOR.match(gguf_name)
        if match is None or not self._architecture.permuted or match[2] not in ("attn_q", "attn_k"):
            return None
        heads = self._whole("attention.head_count")
        if match[2] == "attn_k":
            heads = self._whole("attention.head_count_kv", heads)
        if shape[0] % (2 * heads):
            raise StoreCorrupted(f"{self.path.name}: {gguf_name} does not divide into {heads} heads")
        return np.arange(shape[0]).reshape(heads, shape[0] // heads // 2, 2).swapaxes(1, 2).reshape(-1)

    def _translate(self, gguf_name: str) -> str:
        if gguf_name in _GLOBAL_NAMES:
            return _GLOBAL_NAMES[gguf_name]
        match = _LAYER_TENSOR.match(gguf_name)
        if match is not None and match[2] in _LAYER_NAMES and int(match[1]) < self._whole("block_count"):
            return f"model.layers.{int(match[1])}.{_LAYER_NAMES[match[2]]}.{match[3]}"
        raise ConfigError(
            f"{self.path.name} has tensor {gguf_name}, which has no counterpart in {self._architecture.class_name}; "
            "pull the safetensors release of the model"
        )

    def _rope_parameters(self) -> dict[str, Any]:
        base = {"rope_theta": _shortest(self._number("rope.freq_base", 10_000.0))}
        kind = self.get(f"{self._prefix}.rope.scaling.type")
        if _ROPE_FACTORS in self._tensors:
            return base | self._llama3_scaling(base["rope_theta"])
        if kind in (None, "none"):
            return base | {"rope_type": "default"}
        factor = _shortest(self._number("rope.scaling.factor", 1.0))
        original = self.get(f"{self._prefix}.rope.scaling.original_context_length")
        if kind == "linear":
            return base | {"rope_type": "linear", "factor": factor}
        if kind == "yarn" and isinstance(original, int):
            return base | {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
            }
        raise ConfigError(f"{self.path.name} uses rotary scaling {kind!r}, which cannot be converted from GGUF")

    def _llama3_scaling(self, theta: float) -> dict[str, Any]:
        """The llama3 rotary scaling that produced the factors in the file.

        llama.cpp stores only the resulting factor of every frequency. All published Llama 3.x models use the constants
        below and differ in `factor`, the largest of them; the guess is accepted only if it reproduces the file.
        """
        stored = np.asarray(self._tensors[_ROPE_FACTORS].data, dtype=np.float64).reshape(-1)
        factor, low, high, original = float(stored.max()), 1.0, 4.0, 8192
        wavelengths = 2 * math.pi * theta ** (np.arange(len(stored)) / len(stored))
        blend = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
        if not np.allclose(stored, 1 / ((1 - blend) / factor + blend), rtol=1e-4):
            raise ConfigError(f"{self.path.name} has rotary factors that are not those of a Llama 3 model")
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }

    def _whole(self, key: str, default: int | None = None) -> int:
        value = self.get(f"{self._prefix}.{key}")
        value = default if value is None else value
        if not isinstance(value, int) or not 0 < value < 2**31:
            raise StoreCorrupted(f"{self.path.name} has no usable metadata {self._prefix}.{key}")
        return value

    def _number(self, key: str, default: float) -> float:
        value = self.get(f"{self._prefix}.{key}")
        value = default if value is None else value
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise StoreCorrupted(f"{self.path.name} has no usable metadata {self._prefix}.{key}")
        return float(value)


def generation_config(file: GgufFile) -> dict[str, Any]:
    """generation_config.json: where generation stops (end of text, and end of turn where the file names one)."""
    stops = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return {
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted({stop for stop in stops if isinstance(stop, int)}),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
    }


def to_json(value: dict[str, Any]) -> bytes:
    """JSON that is the same on every machine and version, because the model id covers it; empty values are left out."""
    kept = {key: item for key, item in value.items() if item is not None}
    return json.dumps(kept, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def _shortest(value: float) -> float:
    """The shortest decimal that is the same 32-bit float: 1e-05, which the file stores as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _open_reader(path: Path) -> GGUFReader:
    with path.open("rb") as file:
        head = file.read(24)
    if len(head) < 24 or head[:4] != b"GGUF":
        raise StoreCorrupted(f"{path} is not a GGUF file, or it is cut off")
    num_tensors, num_keys = struct.unpack("<QQ", head[8:])
    if max(num_tensors, num_keys) > _MAX_ENTRIES:
        raise StoreCorrupted(f"{path} claims {num_tensors} tensors and {num_keys} metadata keys")
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise StoreCorrupted(f"{path} is a damaged GGUF file: {error}") from error
