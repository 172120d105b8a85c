"""From the model store into modules: only the tensors that a module names, each checked before it is used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoConfig, PretrainedConfig

from fusion_node.errors import ConfigError, StoreCorrupted

SUPPORTED_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""model_type of the decoders that pass the parity test (tests/engine)."""

_SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

OnTensor = Callable[[str, int], None]
"""Called with name and bytes after each tensor, for progress."""


class TensorSource(Protocol):
    """What the engine needs of a stored model (fusion_node.store.StoredModel)."""

    @property
    def path(self) -> Path: ...

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> dict[str, Any]: ...

    @property
    def tensor_names(self) -> Collection[str]: ...

    def open_tensors(self, names: Iterable[str]) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]: ...


def load_config(model: TensorSource) -> PretrainedConfig:
    """The architecture's configuration, refused before any weight is read when it is not supported.

    Raises:
        ConfigError: when the architecture is not supported; the message lists those that are.
    """
    model_type = str(model.config.get("model_type"))
    if model_type not in SUPPORTED_ARCHITECTURES:
        raise ConfigError(
            f"architecture {model_type!r} of {model.name} is not supported; "
            f"these are: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    settings = {key: value for key, value in model.config.items() if key != "model_type"}
    config: PretrainedConfig = AutoConfig.for_model(model_type, **settings)
    return config


def assign_weights(
    module: torch.nn.Module,
    model: TensorSource,
    rename: Callable[[str], str],
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_tensor: OnTensor | None = None,
) -> int:
    """Gives every parameter of ``module`` (on the meta device) its tensor from the store.

    On the CPU in the stored type the parameter *is* the file, mapped: no copy is made, and the kernel may drop the
    pages when memory is short.

    Args:
        rename: from the module's parameter name to the name in the store.

    Returns:
        Bytes of all parameters in ``dtype``.

    Raises:
        StoreCorrupted: a tensor is missing, has another shape, or does not match the manifest.
    """
    targets = {rename(name): name for name, _ in module.named_parameters()}
    missing = sorted(set(targets).difference(model.tensor_names))
    if missing:
        raise StoreCorrupted(f"{model.name} lacks {missing[0]}, which its config needs, and {len(missing) - 1} more")
    num_bytes = 0
    for stored_name, stored_dtype, shape, data in model.open_tensors(tuple(targets)):
        owner_path, _, leaf = targets.pop(stored_name).rpartition(".")
        owner = module.get_submodule(owner_path)
        expected = tuple(getattr(owner, leaf).shape)
        if shape != expected or stored_dtype not in _SAFETENSORS_DTYPES:
            raise StoreCorrupted(
                f"tensor {stored_name} of {model.name} is {stored_dtype} {shape}, "
                f"but its configuration needs {expected}"
            )
        tensor = torch.frombuffer(data, dtype=_SAFETENSORS_DTYPES[stored_dtype]).view(shape)
        tensor = tensor.to(device=device, dtype=dtype)
        setattr(owner, leaf, torch.nn.Parameter(tensor, requires_grad=False))
        num_bytes += tensor.nbytes
        if on_tensor is not None:
            on_tensor(stored_name, tensor.nbytes)
    return num_bytes
