"""Published quantised checkpoints: which can be loaded here, and how.

transformers knows the formats. Its quantizer of a method exchanges modules while the whole model is on the meta device,
and adds to the conversion tables which stored tensors make which weight; fusion_node.engine.weights then reads what a
layer range needs, as for any other checkpoint. Two things happen to the weights:

* they stay quantised in memory, and kernels of the method's own package multiply by them (bitsandbytes, torchao);
* they are expanded while they are loaded, one after the other, into the type of the numerics class: where there is no
  kernel, or none but code that would be downloaded when it is first needed, which this program never runs.

Everything that can be refused is refused before a weight is read, with what is missing.

Shapes: I input and O output features, G groups of inputs that share a scale, P values packed in one int32, E experts.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightTransform
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.quantizers.quantizer_torchao import TorchAoHfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fusion_node.engine.numerics import NumericsClass
from fusion_node.errors import ConfigError, LocalProtocolError, StoreCorrupted
from fusion_node.store.quantization import TORCHAO_METADATA_FILE, QuantizationSettings, quantization_settings

_EXTRA = "pip install 'fusion-node[quantized]'"

_SLAB_ELEMENTS = 2**21
"""How many values are expanded at once: a few copies of them in 4 bytes, and not of a whole weight."""


class QuantizedSource(Protocol):
    """What is needed of a stored model before any of its weights is read (fusion_node.store.StoredModel)."""

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> dict[str, Any]: ...

    @property
    def tensor_names(self) -> Collection[str]: ...

    def read_file(self, name: str) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Method:
    """A way to quantise, by its quant_method in config.json.

    Attributes:
        packages: without which it cannot be loaded, by their names on the package index.
        is_expanded: weights are expanded while they are loaded; otherwise they stay as they are stored.
        has_own_arithmetic: its modules decide themselves how they multiply, so that a numerics class that says how
            the inputs of a product are rounded cannot be promised.
    """

    packages: tuple[str, ...]
    is_expanded: bool
    has_own_arithmetic: bool


METHODS: Mapping[str, Method] = {
    "bitsandbytes": Method(("accelerate", "bitsandbytes"), is_expanded=False, has_own_arithmetic=True),
    "torchao": Method(("torchao",), is_expanded=False, has_own_arithmetic=True),
    # Those that also quantise activations go on doing that after their weights were expanded.
    "compressed-tensors": Method(("compressed-tensors",), is_expanded=True, has_own_arithmetic=True),
    "gptq": Method((), is_expanded=True, has_own_arithmetic=False),
    "awq": Method((), is_expanded=True, has_own_arithmetic=False),
    "fp8": Method((), is_expanded=True, has_own_arithmetic=False),
    "mxfp4": Method((), is_expanded=True, has_own_arithmetic=False),
}


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package.replace("-", "_")) is not None


class Quantization:
    """How the weights of one checkpoint are quantised, ready to be loaded."""

    def __init__(self, label: str, method: Method, quantizer: HfQuantizer, device: torch.device) -> None:
        self.label = label
        self.is_expanded = method.is_expanded
        self._quantizer = quantizer
        self._device = device

    @classmethod
    def find(
        cls,
        source: QuantizedSource,
        *,
        numerics: NumericsClass,
        device: torch.device,
        is_installed: Callable[[str], bool] = _is_installed,
    ) -> Quantization | None:
        """The quantisation that the checkpoint's config declares; None when its weights are plain.

        Args:
            is_installed: asked for packages by their names on the package index.

        Raises:
            ConfigError: it cannot be loaded here; the message says what is missing.
        """
        settings = quantization_settings(source.config)
        if settings is None:
            return None
        method = METHODS.get(settings.method)
        if method is None:
            raise _refusal(source, settings, f"is not supported; these are: {', '.join(sorted(METHODS))}")
        missing = [package for package in method.packages if not is_installed(package)]
        if missing:
            raise _refusal(source, settings, f"needs {' and '.join(missing)}: run {_EXTRA}")
        if numerics.rounds_gemm_inputs and method.has_own_arithmetic:
            raise _refusal(
                source, settings, f"multiplies in its own way and not in that of {numerics.name}: choose fp32 or bf16"
            )
        problem = _problem_of(settings, source, device)
        if problem is not None:
            raise _refusal(source, settings, problem)
        quantizer = _make_quantizer(settings, source, numerics, device)
        return cls(settings.label, method, quantizer, device)

    def prepare(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """Exchanges the modules whose weights are quantised.

        The model is whole and on the meta device: which modules these are is told by their names and places in it.
        """
        with torch.device("meta"):
            self._quantizer.preprocess_model(model=model, dtype=dtype, device_map={"": self._device})

    def extend(self, transforms: list[WeightTransform], model: PreTrainedModel) -> list[WeightTransform]:
        """The conversions of the architecture, with those of the quantisation."""
        if isinstance(self._quantizer, _Torchao):
            self._quantizer.describe(model)
        extended: list[WeightTransform] = self._quantizer.update_weight_conversions(transforms, model)
        return extended

    @staticmethod
    def reads_as_stored(transform: WeightTransform | None) -> bool:
        """Whether this conversion needs the stored tensors as they are, so that none may be cast before it."""
        operations = getattr(transform, "operations", ())
        return any(getattr(operation, "hf_quantizer", None) is not None for operation in operations)

    def convert(
        self,
        model: PreTrainedModel,
        converter: WeightConverter,
        name: str,
        parts: Iterable[tuple[str, str, torch.Tensor]],
        dtype: torch.dtype,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """What a conversion that reads tensors as stored makes of them.

        Args:
            name: of the first parameter that it makes.
            parts: stored name, the converter's pattern that it matched, and the tensor.
            dtype: of what is not quantised any more, or never was.

        Raises:
            StoreCorrupted: the tensors are not what the method stores.
        """
        for stored, pattern, tensor in parts:
            converter.add_tensor(name, stored, pattern, tensor)
        try:
            made: dict[str, Any] = converter.convert(name, model=model, config=model.config)
        except (LookupError, ValueError, TypeError, AssertionError) as error:
            raise StoreCorrupted(f"the tensors of {name} are not those of {self.label}: {error!r}") from error
        for made_name, value in made.items():
            tensor = value[0] if isinstance(value, list) else value
            is_plain = tensor.is_floating_point() and not self.is_quantized(model, made_name)
            yield made_name, tensor.to(dtype) if is_plain else tensor

    def is_quantized(self, model: PreTrainedModel, name: str) -> bool:
        """Whether this parameter stays quantised, so that type and shape are the method's."""
        return not self.is_expanded and bool(self._quantizer.param_needs_quantization(model, name))

    def finish(self, model: PreTrainedModel) -> None:
        """After the weights: what remains to be done once all are there."""
        for module in list(model.modules()):
            if getattr(module, "quantization_scheme", None) is not None:
                _decompress(module)
            if hasattr(module, "support_avx512bf16_for_cpu"):
                # On CPUs with bfloat16 bitsandbytes would multiply in it, whatever the numerics class, and fail where a
                # row is no multiple of its blocks. By setattr: the type checker takes attributes for parameters.
                setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010
        self._quantizer.postprocess_model(model)


def is_boundary_quantized(names: Iterable[str]) -> bool:
    """Whether embedding, final norm or head are quantised, by the names of a checkpoint's tensors.

    Every method stores something beside a weight, and nearly all checkpoints leave both ends alone. The user of such a
    one needs no package of the method.
    """
    return any(_QUANTIZED_END.search(name) for name in names)


_QUANTIZED_END = re.compile(r"^(?!.*\blayers\.).*\b(embed_tokens|norm|lm_head)\.(?!(weight|bias)$)")


class StoredTensor(Protocol):
    """What a manifest says of a tensor (verification.manifest.TensorRecord)."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def num_elements(self) -> int: ...


def expected_bytes(config: Mapping[str, Any], tensors: Iterable[StoredTensor], *, itemsize: int) -> int:
    """About the bytes that tensors of a model will take once they are loaded, by what the manifest says of them.

    Args:
        config: of the model.
        itemsize: bytes of a plain weight in memory.
    """
    settings = quantization_settings(config)
    if settings is None:
        return sum(tensor.num_elements for tensor in tensors) * itemsize
    method = METHODS.get(settings.method)
    if method is not None and not method.is_expanded:
        return sum(tensor.num_bytes for tensor in tensors)
    return sum(tensor.num_elements * _values_of_element(tensor, settings) for tensor in tensors) * itemsize


def _values_of_element(tensor: StoredTensor, settings: QuantizationSettings) -> int:
    leaf = tensor.name.rpartition(".")[2]
    if leaf.endswith("_blocks") or (leaf == "weight_packed" and tensor.dtype == "U8"):
        return 2
    bits = re.search(r"\bint(\d+)\b", settings.label)
    return 32 // int(bits[1]) if bits and leaf in ("qweight", "weight_packed") else 1


def resident_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers, with what a quantisation keeps beside the values. Shared ones count once."""
    tensors = [*model.parameters(), *(buffer for name, buffer in model.named_buffers())]
    return sum({part.data_ptr(): part.nbytes for tensor in tensors for part in _parts(tensor)}.values())


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, with what its quantisation keeps beside the values."""
    return sum(part.nbytes for part in _parts(tensor))


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if hasattr(tensor, "__tensor_flatten__"):
        # torchao: a tensor made of tensors, by torch's protocol for such classes.
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
        return
    yield tensor.detach()
    # bitsandbytes hangs the statistics of the blocks on the parameter, which are themselves quantised once more.
    yield from _tensors(getattr(tensor, "CB", None), getattr(tensor, "SCB", None))
    state = getattr(tensor, "quant_state", None)
    while state is not None:
        yield from _tensors(state.absmax, state.code, state.offset)
        state = state.state2


def _tensors(*values: object) -> Iterator[torch.Tensor]:
    return (value for value in values if isinstance(value, torch.Tensor))


def _refusal(source: QuantizedSource, settings: QuantizationSettings, problem: str) -> ConfigError:
    return ConfigError(f"{source.name} is quantised with {settings.label}, which {problem}")


def _problem_of(settings: QuantizationSettings, source: QuantizedSource, device: torch.device) -> str | None:
    """Why a form of a supported method cannot be loaded."""
    raw, names = settings.raw, source.tensor_names
    match settings.method:
        case "bitsandbytes" if any(_BITSANDBYTES_EXPERT.search(name) for name in names):
            return "holds experts in a form that is not supported: use another quantisation of the model"
        case "torchao" if device.type == "cpu" and "Int4" in settings.label:
            return "has no kernels for the CPU: it needs --device cuda"
        case "gptq" if raw.get("bits") not in (2, 4, 8):
            return "is supported with 2, 4 or 8 bits only"
        case "gptq" if raw.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
            return f"has a layout that is not supported ({raw['checkpoint_format']})"
        case "awq" if raw.get("bits", raw.get("w_bit")) != 4 or not raw.get("zero_point", True):
            return "is supported with 4 bits and zero points only"
        case "awq" if str(raw.get("version", raw.get("format", "gemm"))).lower() != "gemm":
            return f"has a layout that is not supported ({raw.get('version', raw.get('format'))})"
        case "awq" if any(name.endswith("act.scales") for name in names):
            return "scales activations in this architecture, which is not supported"
    return None


_BITSANDBYTES_EXPERT = re.compile(r"\.experts\.\d+\..*(\.absmax|\.SCB)$")


def _make_quantizer(
    settings: QuantizationSettings, source: QuantizedSource, numerics: NumericsClass, device: torch.device
) -> HfQuantizer:
    raw = dict(settings.raw)
    try:
        match settings.method:
            case "gptq" | "awq":
                return _PackedIntegers(settings)
            case "fp8":
                # Its kernels would be downloaded; neither they nor accelerate are needed to expand.
                return _Fp8(AutoQuantizationConfig.from_dict({**raw, "dequantize": True}))
            case "mxfp4":
                return _Mxfp4(AutoQuantizationConfig.from_dict({**raw, "dequantize": True}))
            case "torchao":
                quantizer: HfQuantizer = _Torchao.read(raw, source, numerics)
            case _:
                quantizer = AutoHfQuantizer.from_config({**raw, "quant_method": settings.method}, pre_quantized=True)
        if settings.method == "bitsandbytes":
            # It warns in each product that float32 inputs are rounded to fp16, which is what int8 means there.
            logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        quantizer.validate_environment(device_map={"": device})
    except (ImportError, RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise _refusal(source, settings, f"cannot be loaded here: {reason}") from error
    return quantizer


class _Torchao(TorchAoHfQuantizer):  # type: ignore[misc]
    """transformers' own, which takes what its tensors mean from the model store instead of from the files' headers."""

    def __init__(self, config: QuantizationConfigMixin, stored: Mapping[str, str]) -> None:
        super().__init__(config, pre_quantized=True)
        self._stored = stored
        self.metadata: dict[str, str] = {}

    def __deepcopy__(self, _: dict[int, Any]) -> _Torchao:
        # Conversions are copied for every tensor, and the quantizer that they refer to with them.
        return self

    @classmethod
    def read(cls, raw: Mapping[str, Any], source: QuantizedSource, numerics: NumericsClass) -> _Torchao:
        """Raises ValueError for what would only fail in the first step."""
        try:
            stored: dict[str, str] = json.loads(source.read_file(TORCHAO_METADATA_FILE))
        except LocalProtocolError as error:
            raise ValueError("it was pulled by an earlier version, remove it and pull it again") from error
        for text in stored.values():
            described = json.loads(text)
            if isinstance(described, dict) and described.get("_type") == "Float8Tensor":
                dtype = described["_data"]["dtype"]["_data"]
                if getattr(torch, dtype) != numerics.dtype:
                    raise ValueError(f"its products are in {dtype}, and those of {numerics.name} are not")
        return cls(AutoQuantizationConfig.from_dict(dict(raw)), stored)

    def describe(self, model: PreTrainedModel) -> None:
        """Keeps what belongs to this model, under the names in it: torchao searches all of them for each tensor."""
        described = {}
        for name, _ in model.named_parameters():
            text = self._stored.get(name, self._stored.get(f"{model.base_model_prefix}.{name}"))
            if text is not None:
                described[name] = text
        self.metadata = {**described, "tensor_names": json.dumps(list(described))}


class _PackedIntegers(HfQuantizer):  # type: ignore[misc]
    """GPTQ and AWQ, expanded. transformers' own quantizers of these need a GPU or packages that build kernels."""

    serialized_names: Mapping[str, list[str]] = {"weight": ["qweight", "qzeros", "scales", "g_idx"]}

    def __init__(self, settings: QuantizationSettings) -> None:
        config = QuantizationConfigMixin(settings.method)
        config.dequantize = True
        super().__init__(config, pre_quantized=True)
        self.settings = settings

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": _ExpandIntegers}

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _ExpandIntegers(ConversionOps):  # type: ignore[misc]
    """Makes weights of packed integers: of one linear layer, or of all experts before they are stacked."""

    def __init__(self, hf_quantizer: _PackedIntegers) -> None:
        self.hf_quantizer = hf_quantizer

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, list[torch.Tensor]], model: PreTrainedModel, full_layer_name: str, **_: Any
    ) -> dict[str, Any]:
        dtype = model.get_parameter(full_layer_name).dtype
        expanded = {}
        for key, packed in input_dict.items():
            if not key.endswith("qweight"):
                continue
            beside = [input_dict.get(key.removesuffix("qweight") + leaf) for leaf in ("qzeros", "scales", "g_idx")]
            expanded[key] = [
                self._expand(qweight, *(of_all[index] if of_all else None for of_all in beside), dtype=dtype)
                for index, qweight in enumerate(packed)
            ]
        return {full_layer_name: expanded["qweight"][0]} if "qweight" in expanded else expanded

    def _expand(
        self,
        qweight: torch.Tensor,
        qzeros: torch.Tensor | None,
        scales_GO: torch.Tensor | None,
        groups_I: torch.Tensor | None,
        *,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        if qzeros is None or scales_GO is None:
            raise KeyError("qzeros and scales")
        if self.hf_quantizer.settings.method == "awq":
            return expand_awq(qweight, qzeros, scales_GO, dtype=dtype)
        raw = self.hf_quantizer.settings.raw
        return expand_gptq(
            qweight, qzeros, scales_GO, groups_I,
            bits=raw["bits"], zeros_are_less_one=raw.get("checkpoint_format", "gptq") == "gptq", dtype=dtype,
        )  # fmt: skip

    @property
    def reverse_op(self) -> ConversionOps:
        raise NotImplementedError


def expand_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales_GO: torch.Tensor,
    groups_I: torch.Tensor | None,
    *,
    bits: int,
    zeros_are_less_one: bool,
    dtype: torch.dtype,
    slab_elements: int = _SLAB_ELEMENTS,
) -> torch.Tensor:
    """The weight ``[O, I]`` of a linear layer as GPTQ stores it: ``(q - zero) * scale``, exact but for the last cast.

    Args:
        qweight: int32 ``[I / P, O]``, each word with P values of consecutive inputs, the first in the lowest bits.
        qzeros: int32 ``[G, O / P]``, packed along the outputs.
        groups_I: group of each input; None when they follow one another.
        zeros_are_less_one: the layout ``gptq``. One is added to the packed words, as gptqmodel does.

    Source: Frantar et al., "GPTQ", 2022; AutoGPTQ's layout.
    """
    per_word, mask = 32 // bits, 2**bits - 1
    num_inputs, num_outputs = qweight.shape[0] * per_word, qweight.shape[1]
    shifts_P = torch.arange(0, 32, bits, dtype=torch.int32, device=qweight.device)
    if zeros_are_less_one:
        ones = sum(1 << shift for shift in range(0, 32, bits))
        qzeros = qzeros + torch.tensor(ones, dtype=torch.uint32).view(torch.int32).to(qzeros.device)
    zeros_GO = (qzeros[:, :, None] >> shifts_P & mask).flatten(1)
    if groups_I is None:
        groups_I = torch.arange(num_inputs, device=qweight.device) // (num_inputs // len(scales_GO))
    weight_OI = torch.empty((num_outputs, num_inputs), dtype=dtype, device=qweight.device)
    width = max(1, slab_elements // num_inputs)
    for start in range(0, num_outputs, width):
        outs = slice(start, start + width)
        q_IO = (qweight[:, None, outs] >> shifts_P[:, None] & mask).flatten(0, 1)
        scale_IO = scales_GO[:, outs].float()[groups_I.long()]
        weight_OI[outs] = ((q_IO - zeros_GO[:, outs][groups_I.long()]) * scale_IO).t()
    return weight_OI


_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of a word hold which of its eight consecutive outputs: AutoAWQ's layout ``gemm``."""


def expand_awq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales_GO: torch.Tensor,
    *,
    dtype: torch.dtype,
    slab_elements: int = _SLAB_ELEMENTS,
) -> torch.Tensor:
    """The weight ``[O, I]`` of a linear layer as AutoAWQ stores it, computed like that of GPTQ.

    Args:
        qweight: int32 ``[I, O / P]``.
        qzeros: int32 ``[G, O / P]``.

    Source: Lin et al., "AWQ", 2023; AutoAWQ's layout ``gemm``.
    """
    num_inputs, num_words = qweight.shape
    per_word, group_size = len(_AWQ_NIBBLES), num_inputs // len(scales_GO)
    shifts_P = 4 * torch.tensor(_AWQ_NIBBLES, dtype=torch.int32, device=qweight.device)
    weight_OI = torch.empty((num_words * per_word, num_inputs), dtype=dtype, device=qweight.device)
    width = max(1, slab_elements // (num_inputs * per_word))
    for start in range(0, num_words, width):
        words, outs = slice(start, start + width), slice(start * per_word, (start + width) * per_word)
        q_GIO = (qweight[:, words, None] >> shifts_P & 15).reshape(len(scales_GO), group_size, -1)
        zeros_GO = (qzeros[:, words, None] >> shifts_P & 15).flatten(1)
        expanded_GIO = (q_GIO - zeros_GO[:, None]) * scales_GO[:, None, outs].float()
        weight_OI[outs] = expanded_GIO.flatten(0, 1).t()
    return weight_OI


class _Fp8(FineGrainedFP8HfQuantizer):  # type: ignore[misc]
    """transformers' own, expanding some rows at a time: a whole weight takes twice its float32 size beside it."""

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": _ExpandFp8}


class _ExpandFp8(Fp8Dequantize):  # type: ignore[misc]
    def _dequantize_one(
        self, quantized: torch.Tensor, scales: torch.Tensor, output_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        num_blocks = scales.shape[0] if scales.dim() == 2 else 1
        is_cut = quantized.is_floating_point() and quantized.dim() == 2 and quantized.shape[0] % num_blocks == 0
        if not is_cut or output_dtype is None:
            whole: torch.Tensor = super()._dequantize_one(quantized, scales, output_dtype=output_dtype)
            return whole
        expanded = torch.empty(quantized.shape, dtype=output_dtype, device=quantized.device)
        rows_of_block = quantized.shape[0] // num_blocks
        step = max(1, _SLAB_ELEMENTS // (rows_of_block * quantized.shape[1]))
        for block in range(0, num_blocks, step):
            rows = slice(block * rows_of_block, (block + step) * rows_of_block)
            cut = scales[block : block + step] if scales.dim() == 2 else scales
            expanded[rows] = super()._dequantize_one(quantized[rows], cut, output_dtype=output_dtype)
        return expanded


class _Mxfp4(Mxfp4HfQuantizer):  # type: ignore[misc]
    """transformers' own, expanding one expert at a time: a layer's at once take several times the result beside it."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        """Nothing: the modules of the plain model take the expanded weights."""

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": _ExpandMxfp4}


class _ExpandMxfp4(ConversionOps):  # type: ignore[misc]
    def __init__(self, hf_quantizer: HfQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, list[torch.Tensor]], model: PreTrainedModel, full_layer_name: str, **_: Any
    ) -> dict[str, torch.Tensor]:
        leaf = full_layer_name.rpartition(".")[2]
        (blocks_E,), (scales_E,) = input_dict[f"{leaf}_blocks"], input_dict[f"{leaf}_scales"]
        weight_EIO = torch.empty_like(model.get_parameter(full_layer_name), device=blocks_E.device)
        for expert, weight_IO in enumerate(weight_EIO):
            one = slice(expert, expert + 1)
            weight_IO.copy_(convert_moe_packed_tensors(blocks_E[one], scales_E[one], dtype=weight_IO.dtype)[0])
        return {full_layer_name: weight_EIO}

    @property
    def reverse_op(self) -> ConversionOps:
        raise NotImplementedError


def _decompress(module: torch.nn.Module) -> None:
    """Expands a module of compressed-tensors now; transformers would do it for all at once in the first step."""
    from compressed_tensors.compressors import decompress_module

    scheme: Any = module.quantization_scheme
    quantizes_rows = scheme.input_activations is not None or scheme.output_activations is not None
    decompress_module(module, leave_decompressed=quantizes_rows)
    if not quantizes_rows:
        # What is left of the method: its forward is that of the class again, as an attribute of the instance.
        module.__dict__.pop("forward", None)
