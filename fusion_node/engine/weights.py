"""From the model store into modules: only the tensors that a module needs, each checked before it is used.

Names and forms of a checkpoint are not always those of the module: a hub checkpoint stores experts one by one, the
module holds all of a layer in one tensor. Which stored tensors make which tensor of the module is told by transformers'
own conversion tables (transformers.conversion_mapping), so that a checkpoint loads here if it loads there. Memory
beyond the module's own is at most what one conversion holds; the common ones, stacking experts, are written expert by
expert into place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from fusion_node.engine.quantized import Quantization, QuantizedSource, resident_bytes, tensor_bytes
from fusion_node.errors import ConfigError, StoreCorrupted

_SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

_LAYER = re.compile(r"\blayers\.(\d+)\.")

OnTensor = Callable[[str, int], None]
"""Called with name and bytes after each tensor, for progress."""


class TensorSource(QuantizedSource, Protocol):
    """What the engine needs of a stored model (fusion_node.store.StoredModel)."""

    def open_tensors(self, names: Iterable[str]) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]: ...


def fill(
    model: PreTrainedModel,
    source: TensorSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None = None,
    on_tensor: OnTensor | None = None,
) -> int:
    """Gives every parameter and buffer of ``model``, which is on the meta device, its values.

    On the CPU in the stored type a parameter that needs no conversion *is* the file, mapped: no copy is made, and the
    kernel may drop the pages when memory is short.

    Args:
        dtype: of the parameters, but for those that transformers keeps in float32.

    Returns:
        Bytes of all parameters and buffers from the store.

    Raises:
        StoreCorrupted: a tensor is missing, has another shape, or does not match the manifest.
    """
    compute_buffers(model, device)
    targets = _targets(model, source, quantization)
    keep_float32 = [re.compile(pattern) for pattern in model._get_dtype_plan(dtype)]
    # One pass over the store, target by target: it verifies the next tensors while these are put into place.
    opened = source.open_tensors(tuple(part.stored for target in targets for part in target.parts))
    num_bytes = 0
    for target in targets:
        empty = _tensor_of(model, target.name)
        as_dtype = empty.dtype
        if any(pattern.search(target.name) for pattern in keep_float32):
            as_dtype = torch.float32
        parts = ((part, _view(source, *next(opened))) for part in target.parts)
        for name, tensor in _converted(model, source, target, parts, as_dtype, device, quantization):
            is_quantized = quantization is not None and quantization.is_quantized(model, name)
            if tensor.shape != _tensor_of(model, name).shape and not is_quantized:
                raise _wrong_shape(source, name, tensor, _tensor_of(model, name))
            _put(model, name, tensor)
            num_bytes += tensor_bytes(tensor)
            if on_tensor is not None:
                on_tensor(name, tensor_bytes(tensor))
    for tied, origin in model.all_tied_weights_keys.items():
        # A checkpoint may hold both; then each is what it says.
        if _tensor_of(model, tied).is_meta:
            _put(model, tied, _tensor_of(model, origin))
    if quantization is not None:
        quantization.finish(model)
        return resident_bytes(model)
    return num_bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """A stored tensor, whole, and which part it is of a parameter of the module.

    Attributes:
        name: of the parameter.
        expert: of a parameter that holds all experts of a layer; None: of any other.
        first_row: of the parameter, or of the expert's part of it, that the tensor begins at.
    """

    name: str
    tensor: torch.Tensor
    expert: int | None = None
    first_row: int = 0


def stored_pieces(model: PreTrainedModel, source: TensorSource) -> Iterator[Piece]:
    """What the parameters of ``model``, which is on the meta device, are made of: for who keeps parts of it only.

    One tensor after the other, as it is stored: mapped, checked, and gone when the caller keeps no view of it.

    Raises:
        ConfigError: a parameter is made of stored tensors otherwise than by stacking experts.
        StoreCorrupted: a tensor is missing, has another shape, or does not match the manifest.
    """
    targets = _targets(model, source, None)
    for target in targets:
        if target.converter is not None and not _stacks_experts(target.converter):
            raise ConfigError(f"{target.name} of {source.name} is converted when it is loaded: it cannot be sliced")
    opened = source.open_tensors(tuple(part.stored for target in targets for part in target.parts))
    for target in targets:
        expected = _tensor_of(model, target.name)
        parts = ((part, _view(source, *next(opened))) for part in target.parts)
        if target.converter is not None:
            for expert, first_row, tensor in _expert_places(source, target, parts, expected):
                yield Piece(target.name, tensor, expert, first_row)
                del tensor
            continue
        ((_, tensor),) = parts
        if tensor.shape != expected.shape:
            raise _wrong_shape(source, target.name, tensor, expected)
        if tensor.dim() == 3:
            for expert, of_expert in enumerate(tensor):
                yield Piece(target.name, of_expert, expert)
                del of_expert
        else:
            yield Piece(target.name, tensor)
        # Not kept until the next is there.
        del tensor


def compute_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Makes the buffers real that no checkpoint holds (rotary frequencies, embedding scales), as transformers does."""
    owners = set()
    for name, buffer in model.named_non_persistent_buffers():
        owner = name.rpartition(".")[0]
        _put(model, name, torch.empty_like(buffer, device=device))
        owners.add(owner)
    for owner in owners:
        # Parameters are still on the meta device, where this does nothing to them.
        with torch.no_grad():
            model._init_weights(model.get_submodule(owner))
        _freeze_rotary(model.get_submodule(owner))


def _freeze_rotary(module: Any) -> None:
    """Some kinds compute their frequencies anew when the longest sequence of a batch passes a bound. Then one user's
    length would change another's result; architectures.max_positions keeps everybody below that bound instead."""
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, dict):
        module.rope_type = dict.fromkeys(kind, "frozen")
    elif kind is not None:
        module.rope_type = "frozen"


@dataclass(frozen=True, slots=True)
class _Part:
    """A stored tensor, and which of the converter's patterns its name matched."""

    stored: str
    pattern: str


@dataclass(slots=True)
class _Target:
    """A tensor of the module, and the stored ones that it is made of.

    Attributes:
        converter: None when the one part is the tensor.
    """

    name: str
    converter: WeightConverter | None
    parts: list[_Part] = field(default_factory=list)


def _targets(model: PreTrainedModel, source: TensorSource, quantization: Quantization | None) -> list[_Target]:
    """What to read for every tensor of the module.

    Raises:
        StoreCorrupted: the store has nothing for one of them.
    """
    conversions: list[WeightTransform] = get_model_conversion_mapping(model)
    if quantization is not None:
        conversions = quantization.extend(conversions, model)
    transforms = [*_text_part(), *conversions]
    renames = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    wanted = model.state_dict()
    targets: dict[str, _Target] = {}
    # Told by a glance: the patterns take their time, and a large model has tens of thousands of experts.
    layers = {found[1] for name in wanted if (found := _LAYER.search(name))}
    ours = [name for name in source.tensor_names if not (found := _LAYER.search(name)) or found[1] in layers]
    for stored in sorted(ours, key=dot_natural_key):
        name, pattern = rename_source_key(stored, renames, converters, model.base_model_prefix, wanted)
        if name not in wanted:
            continue
        converter = None if pattern is None else by_pattern[pattern]
        target = targets.setdefault(name, _Target(name, converter))
        if target.converter is not converter or (converter is None and target.parts):
            raise StoreCorrupted(f"{source.name} holds {name} twice: as {target.parts[0].stored} and as {stored}")
        target.parts.append(_Part(stored, pattern or stored))
    made = {name for target in targets.values() for name in _names_made(target)}
    missing = sorted(set(wanted) - made - set(model.all_tied_weights_keys), key=dot_natural_key)
    if missing:
        raise StoreCorrupted(f"{source.name} lacks {missing[0]}, which its config needs, and {len(missing) - 1} more")
    return list(targets.values())


def _text_part() -> list[WeightTransform]:
    """Names of the text part of a larger model, in both orders that checkpoints have, become those of a decoder."""
    return [
        WeightRenaming(r"^language_model\.lm_head\.", "lm_head."),
        WeightRenaming(r"^(?:model\.)?language_model\.(?:model\.)?", "model."),
    ]


def _names_made(target: _Target) -> list[str]:
    if target.converter is None:
        return [target.name]
    first, *_ = patterns = target.converter.target_patterns
    return [target.name.replace(first, pattern) for pattern in patterns]


def _converted(
    model: PreTrainedModel,
    source: TensorSource,
    target: _Target,
    parts: Iterator[tuple[_Part, torch.Tensor]],
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    if target.converter is None:
        ((_, tensor),) = parts
        yield target.name, tensor.to(device=device, dtype=dtype)
    elif _stacks_experts(target.converter):
        empty = torch.empty_like(_tensor_of(model, target.name), dtype=dtype, device=device)
        _stack_experts(source, target, parts, empty)
        yield target.name, empty
    elif quantization is not None and quantization.reads_as_stored(target.converter):
        loaded = ((part.stored, part.pattern, tensor.to(device)) for part, tensor in parts)
        yield from quantization.convert(model, deepcopy(target.converter), target.name, loaded, dtype)
    else:
        converter = deepcopy(target.converter)
        for part, tensor in parts:
            converter.add_tensor(target.name, part.stored, part.pattern, tensor.to(device=device, dtype=dtype))
        for name, made in converter.convert(target.name, model=model, config=model.config).items():
            yield name, made[0] if isinstance(made, list) else made


def _stacks_experts(converter: WeightConverter) -> bool:
    """Whether it stacks tensors along a new first dimension and, of several kinds, puts one after the other."""
    match converter.operations:
        case [MergeModulelist(dim=0)]:
            return len(converter.source_patterns) == 1
        case [MergeModulelist(dim=0), Concatenate(dim=1, num_shards_attribute=None)]:
            return True
    return False


def _stack_experts(
    source: TensorSource, target: _Target, parts: Iterator[tuple[_Part, torch.Tensor]], out_EFD: torch.Tensor
) -> None:
    """Writes expert by expert into place, so that no second copy of a layer's experts ever exists."""
    for expert, offset, tensor in _expert_places(source, target, parts, out_EFD):
        out_EFD[expert, offset : offset + len(tensor)].copy_(tensor)


def _expert_places(
    source: TensorSource, target: _Target, parts: Iterator[tuple[_Part, torch.Tensor]], whole_EFD: torch.Tensor
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Expert, and first row within it, of each tensor."""
    patterns = target.converter.source_patterns if target.converter is not None else []
    num_experts, rows = len(whole_EFD), whole_EFD.shape[1] // len(patterns)
    filled = dict.fromkeys(patterns, 0)
    for part, tensor in parts:
        expert, offset = filled[part.pattern], rows * patterns.index(part.pattern)
        if expert == num_experts:
            break
        place = whole_EFD[expert, offset : offset + rows]
        if place.shape != tensor.shape:
            raise _wrong_shape(source, part.stored, tensor, place)
        yield expert, offset, tensor
        del tensor  # not kept until the next is there
        filled[part.pattern] += 1
    if set(filled.values()) != {num_experts} or len(target.parts) != num_experts * len(patterns):
        raise StoreCorrupted(
            f"{source.name} makes {target.name} of {len(target.parts)} tensors, "
            f"but its configuration needs {num_experts * len(patterns)}"
        )


def _view(source: TensorSource, name: str, stored_dtype: str, shape: tuple[int, ...], data: memoryview) -> torch.Tensor:
    if stored_dtype not in _SAFETENSORS_DTYPES:
        raise StoreCorrupted(f"tensor {name} of {source.name} is {stored_dtype}, which is not read here")
    return torch.frombuffer(data, dtype=_SAFETENSORS_DTYPES[stored_dtype]).view(shape)


def _tensor_of(model: torch.nn.Module, name: str) -> torch.Tensor:
    owner, _, leaf = name.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(owner), leaf)
    return tensor


def _put(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    is_plain = leaf in owner._buffers or isinstance(tensor, torch.nn.Parameter)
    setattr(owner, leaf, tensor if is_plain else torch.nn.Parameter(tensor, requires_grad=False))


def _wrong_shape(source: TensorSource, name: str, tensor: torch.Tensor, expected: torch.Tensor) -> StoreCorrupted:
    return StoreCorrupted(
        f"tensor {name} of {source.name} has the shape {tuple(tensor.shape)}, "
        f"but its configuration needs {tuple(expected.shape)}"
    )
