"""Quantised checkpoints in uneven stages against transformers running the same checkpoint whole.

Each method makes a tiny folder in its published layout: by its own package where that can be done on a CPU, by hand
otherwise. Where transformers needs further packages to run a method, the reference is the plain model with the weights
that the layout stands for.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fusion_node.engine.boundary import Boundary
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.quantized import (
    METHODS,
    Quantization,
    expand_awq,
    expand_gptq,
    expected_bytes,
    is_boundary_quantized,
)
from fusion_node.engine.session_log_core import SessionLog, StepRows
from fusion_node.engine.stage import Stage, StepInput
from fusion_node.errors import ConfigError, StoreCorrupted
from fusion_node.store import ModelStore, StoredModel
from fusion_node.types import LayerRange

CPU = torch.device("cpu")
FP32 = numerics_class("fp32")
IDS = list(range(5, 18))
CUTS = (0, 1, 3, 4)

Tensors = dict[str, torch.Tensor]


def tiny(model_type: str = "llama", **overrides: Any) -> Any:
    """Four layers, hidden size 64; every size is a multiple of the blocks that the methods quantise by."""
    config = AutoConfig.for_model(
        model_type,
        **{
            "num_hidden_layers": CUTS[-1],
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 131,
            "max_position_embeddings": 256,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
            **overrides,
        },
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            elif "norm" not in name:
                parameter.normal_(0, 0.1)
    return model


def write(model: Any, folder: Path, quantize: Callable[[str, torch.Tensor], Tensors | None], settings: Any) -> Any:
    """Saves a model with some tensors in another layout: ``quantize`` says which, or None for one that stays."""
    model.save_pretrained(folder)
    tensors: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors |= quantize(name, tensor) or {name: tensor}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return model


def is_matrix(name: str, tensor: torch.Tensor) -> bool:
    return ".layers." in name and name.endswith("_proj.weight") and tensor.dim() == 2


def by_transformers(folder: Path, **settings: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings).eval()


def quantized_by_transformers(folder: Path, config: Any) -> Any:
    tiny().save_pretrained(folder / "plain")
    model = AutoModelForCausalLM.from_pretrained(
        folder / "plain", quantization_config=config, dtype=torch.float32, device_map="cpu"
    )
    model.save_pretrained(folder)
    # A machine with a GPU would be asked for it otherwise.
    reference = by_transformers(folder, device_map="cpu")
    for module in reference.modules():
        # On CPUs with bfloat16 bitsandbytes multiplies in it, and refuses widths that are no multiple of its blocks.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return reference


def make_nf4(folder: Path) -> Any:
    from transformers import BitsAndBytesConfig

    return quantized_by_transformers(
        folder,
        BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        ),
    )


def make_int8(folder: Path) -> Any:
    from transformers import BitsAndBytesConfig

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    return quantized_by_transformers(folder, BitsAndBytesConfig(load_in_8bit=True))


def make_torchao(folder: Path, kind: str) -> Any:
    import torchao.quantization
    from transformers import TorchAoConfig

    return quantized_by_transformers(folder, TorchAoConfig(getattr(torchao.quantization, kind)(version=2)))


def make_compressed(
    folder: Path,
    *,
    bits: int,
    kind: str,
    form: str,
    quantizes_rows: bool = False,
    ignore: tuple[str, ...] = ("lm_head",),
) -> Any:
    from compressed_tensors.compressors import compress_module
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    grouping: dict[str, Any] = {"strategy": "group", "group_size": 32} if bits == 4 else {"strategy": "channel"}
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(num_bits=bits, type=kind, **grouping),
        input_activations=QuantizationArgs(num_bits=8, strategy="token", dynamic=True) if quantizes_rows else None,
        format=form,
    )
    config = QuantizationConfig(
        config_groups={"all": scheme}, ignore=list(ignore), quantization_status="compressed", format=form
    )
    model, largest = tiny(), {"int4": 7.5, "int8": 127.5, "float8": 448.0}[f"{kind}{bits}"]
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            rows = module.weight.detach().unflatten(1, (-1, grouping.get("group_size", module.weight.shape[1])))
            module.weight_scale.data = rows.abs().amax(-1) / largest
            compress_module(module)
    settings = config.model_dump(mode="json") | {"quant_method": "compressed-tensors"}
    write(model, folder, lambda *_: None, settings)
    return by_transformers(folder)


def fp8_of(name: str, weight_OI: torch.Tensor) -> Tensors | None:
    if not is_matrix(name, weight_OI):
        return None
    blocks = weight_OI.unflatten(1, (-1, 32)).unflatten(0, (-1, 32))
    scale = blocks.abs().amax((1, 3)) / 448
    values = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).flatten(2).flatten(0, 1)
    return {name: values, f"{name}_scale_inv": scale}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}


def make_fp8(folder: Path) -> Any:
    write(tiny(), folder, fp8_of, FP8)
    return by_transformers(folder)


def make_fp8_experts(folder: Path) -> Any:
    model = tiny("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[1])
    write(model, folder, fp8_of, FP8)
    return by_transformers(folder)


def mxfp4_of(name: str, weight_EIO: torch.Tensor) -> Tensors | None:
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return None
    blocks = weight_EIO.transpose(1, 2).unflatten(2, (-1, 32))
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2
    half = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = ((blocks / exponent.exp2()[..., None])[..., None] - torch.cat([half, -half])).abs().argmin(-1)
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return {f"{name}_blocks": packed, f"{name}_scales": (exponent + 127).to(torch.uint8)}


def make_mxfp4(folder: Path) -> Any:
    from transformers import Mxfp4Config

    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "rope_parameters": rope}
    write(tiny("gpt_oss", **sizes), folder, mxfp4_of, settings)
    return by_transformers(folder, quantization_config=Mxfp4Config(dequantize=True))


def pack(values: torch.Tensor, order: Iterable[int], bits: int) -> torch.Tensor:
    """Along the last dimension, the value of index ``order[k]`` in the k-th lowest bits of a word."""
    order = list(order)
    words = sum(values.long().unflatten(-1, (-1, len(order)))[..., i] << bits * k for k, i in enumerate(order))
    assert isinstance(words, torch.Tensor)
    return words.to(torch.uint32).view(torch.int32)


def integers_of(
    weight_OI: torch.Tensor, bits: int, group_size: int, groups_I: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Asymmetric rounding: integers ``[I, O]``, zeros and scales ``[G, O]``, and the weights that these stand for."""
    num_inputs = weight_OI.shape[1]
    if groups_I is None:
        groups_I = torch.arange(num_inputs) // group_size
    order = torch.argsort(groups_I, stable=True)
    x_GIO = weight_OI.t()[order].unflatten(0, (-1, group_size))
    low, high = x_GIO.amin(1).clamp(max=0), x_GIO.amax(1).clamp(min=0)
    scales_GO = ((high - low) / (2**bits - 1)).half()
    zeros_GO = (-low / scales_GO.float()).round().clamp(1, 2**bits - 1)
    q_IO = (weight_OI.t() / scales_GO.float()[groups_I] + zeros_GO[groups_I]).round().clamp(0, 2**bits - 1)
    expanded_IO = (q_IO - zeros_GO[groups_I]) * scales_GO.float()[groups_I]
    return q_IO, zeros_GO, scales_GO, expanded_IO.t()


def gptq_of(
    weight_OI: torch.Tensor, bits: int, group_size: int, groups_I: torch.Tensor | None, version: str
) -> tuple[Tensors, torch.Tensor]:
    q_IO, zeros_GO, scales_GO, expanded = integers_of(weight_OI, bits, group_size, groups_I)
    words = range(32 // bits)
    stored = {
        "qweight": pack(q_IO.t(), words, bits).t(),
        "qzeros": pack(zeros_GO - int(version == "gptq"), words, bits),
        "scales": scales_GO,
    }
    return stored | ({} if groups_I is None else {"g_idx": groups_I.int()}), expanded


def awq_of(weight_OI: torch.Tensor, group_size: int) -> tuple[Tensors, torch.Tensor]:
    q_IO, zeros_GO, scales_GO, expanded = integers_of(weight_OI, 4, group_size)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": pack(q_IO, order, 4), "qzeros": pack(zeros_GO, order, 4), "scales": scales_GO}, expanded


def make_integers(folder: Path, method: str, *, acts_in_order: bool = False, model: Any = None) -> Any:
    expanded: Tensors = {}
    generator = torch.Generator().manual_seed(1)

    def quantize(name: str, weight: torch.Tensor) -> Tensors | None:
        if not is_matrix(name, weight):
            return None
        groups = torch.arange(weight.shape[1]) // 32
        if acts_in_order:
            groups = groups[torch.randperm(len(groups), generator=generator)]
        stored, expanded[name] = awq_of(weight, 32) if method == "awq" else gptq_of(weight, 4, 32, groups, "gptq")
        return {name.removesuffix("weight") + leaf: tensor for leaf, tensor in stored.items()}

    settings: dict[str, Any] = {"quant_method": method, "bits": 4, "group_size": 32}
    settings |= {"version": "gemm", "zero_point": True} if method == "awq" else {"desc_act": acts_in_order}
    whole = write(tiny() if model is None else model, folder, quantize, settings)
    # The weights that the layout stands for, in the layout of the hub, which has experts one by one.
    plain = folder / "expanded"
    write(whole, plain, lambda name, _: {name: expanded[name]} if name in expanded else None, None)
    return by_transformers(plain)


def make_gptq_experts(folder: Path) -> Any:
    model = tiny("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    return make_integers(folder, "gptq", model=model)


@dataclass(frozen=True)
class Case:
    """A checkpoint, and how near its stages must come to the reference.

    Attributes:
        bound: relative to the largest logit. Above 1e-5 only where activations are rounded to 8 bits: float32 noise
            that moves one across a boundary moves it by 1/127 of its row.
    """

    name: str
    method: str
    label: str
    make: Callable[[Path], Any]
    bound: float = 1e-5


CASES = [
    Case("nf4", "bitsandbytes", "bitsandbytes nf4", make_nf4),
    Case("int8", "bitsandbytes", "bitsandbytes int8", make_int8, bound=2e-2),
    Case("torchao-int8", "torchao", "torchao Int8WeightOnly", lambda f: make_torchao(f, "Int8WeightOnlyConfig")),
    Case("torchao-float8", "torchao", "torchao Float8WeightOnly", lambda f: make_torchao(f, "Float8WeightOnlyConfig")),
    Case(
        "compressed-int4",
        "compressed-tensors",
        "compressed-tensors pack-quantized int4",
        lambda f: make_compressed(f, bits=4, kind="int", form="pack-quantized"),
    ),
    Case(
        "compressed-float8",
        "compressed-tensors",
        "compressed-tensors float-quantized float8",
        lambda f: make_compressed(f, bits=8, kind="float", form="float-quantized"),
    ),
    Case(
        "compressed-int8-rows",
        "compressed-tensors",
        "compressed-tensors int-quantized int8",
        lambda f: make_compressed(f, bits=8, kind="int", form="int-quantized", quantizes_rows=True),
        bound=2e-2,
    ),
    Case("fp8", "fp8", "fp8", make_fp8),
    Case("fp8-experts", "fp8", "fp8", make_fp8_experts),
    Case("mxfp4", "mxfp4", "mxfp4", make_mxfp4),
    Case("gptq", "gptq", "gptq int4 g32", lambda f: make_integers(f, "gptq")),
    Case("gptq-act-order", "gptq", "gptq int4 g32", lambda f: make_integers(f, "gptq", acts_in_order=True)),
    Case("gptq-experts", "gptq", "gptq int4 g32", make_gptq_experts),
    Case("awq", "awq", "awq int4 g32", lambda f: make_integers(f, "awq")),
]


class Watched:
    """A stored model that remembers which tensors were opened."""

    def __init__(self, model: StoredModel) -> None:
        self._model = model
        self.read: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def open_tensors(self, names: Iterable[str]) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
        names = list(names)
        self.read += names
        return self._model.open_tensors(names)


def need_packages_of(method: str) -> None:
    # Moving a model of torchao to a device, and fp8 at all, need accelerate in transformers, and not here.
    further = ("accelerate",) if method in ("fp8", "torchao") else ()
    for package in (*METHODS[method].packages, *further):
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            pytest.skip(f"needs {package}: pip install 'fusion-node[quantized]'")


def pull(folder: Path) -> StoredModel:
    return ModelStore(folder.parent / "home").pull(str(folder))


def run(model: Any, stages: Iterable[Stage], boundary: Boundary) -> np.ndarray:
    rows = boundary.embed(IDS)
    for stage in stages:
        step = SessionLog(32).apply(0, first_node=1, num_rows=len(IDS), parent=0)
        assert isinstance(step, StepRows)
        (rows,) = stage.forward([StepInput(step, rows, (range(len(IDS)),))], stage.new_pool(len(IDS)))
    return boundary.logits(rows)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_uneven_stages_of_a_quantised_checkpoint_equal_transformers(case: Case, tmp_path: Path) -> None:
    need_packages_of(case.method)
    reference = case.make(tmp_path / case.name)
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([IDS])).logits[0].numpy()
    model = pull(tmp_path / case.name)
    assert model.quantization == case.label
    stages, sources = [], []
    for start, stop in itertools.pairwise(CUTS):
        sources.append(source := Watched(model))
        stages.append(Stage.load(source, LayerRange(start, stop), numerics=FP32, device=CPU))
        read = {name.split(".layers.")[1].split(".")[0] for name in source.read}
        assert read == {str(index) for index in range(start, stop)}
        assert len(source.read) == len(set(source.read))
    logits = run(model, stages, Boundary.load(model, numerics=FP32, device=CPU))
    assert np.abs(logits - expected).max() <= case.bound * np.abs(expected).max()

    resident = sum(stage.num_weight_bytes for stage in stages)
    in_layers = [tensor for tensor in model.manifest.tensors if ".layers." in tensor.name]
    assert resident == pytest.approx(expected_bytes(model.config, in_layers, itemsize=4), rel=0.12)
    stored = sum(tensor.num_bytes for tensor in in_layers)
    if METHODS[case.method].is_expanded:
        plain = sum(p.nbytes for name, p in reference.named_parameters() if name.endswith("_proj.weight"))
        assert resident > max(plain, 1.5 * stored)
    else:
        assert 0.8 * stored < resident < 1.1 * stored


def test_quantised_head_is_loaded_on_the_users_side(tmp_path: Path) -> None:
    need_packages_of("compressed-tensors")
    reference = make_compressed(tmp_path / "head", bits=8, kind="int", form="int-quantized", ignore=())
    model = pull(tmp_path / "head")
    assert is_boundary_quantized(model.tensor_names)
    stage = Stage.load(model, LayerRange(0, CUTS[-1]), numerics=FP32, device=CPU)
    logits = run(model, [stage], Boundary.load(model, numerics=FP32, device=CPU))
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([IDS])).logits[0].numpy()
    assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("name", "is_quantized"),
    [
        ("lm_head.weight", False),
        ("lm_head.bias", False),
        ("model.embed_tokens.weight", False),
        ("model.norm.weight", False),
        ("model.layers.0.self_attn.q_proj.qweight", False),
        ("model.layers.0.post_attention_layernorm.weight_scale", False),
        ("model.rotary_emb.inv_freq", False),
        ("lm_head.weight_scale_inv", True),
        ("lm_head.weight.absmax", True),
        ("lm_head.qweight", True),
        ("lm_head._weight_qdata", True),
        ("model.embed_tokens._weight_scale", True),
        ("model.language_model.embed_tokens.weight_packed", True),
    ],
)
def test_both_ends_are_quantised_when_they_have_more_than_weights(name: str, is_quantized: bool) -> None:
    assert is_boundary_quantized(["model.norm.weight", name]) is is_quantized


@dataclass(frozen=True)
class Declared:
    """A checkpoint that only says what it is: nothing of it may be read."""

    config: dict[str, Any]
    tensor_names: tuple[str, ...] = ()
    name: str = "some/model"

    def read_file(self, name: str) -> bytes:
        raise AssertionError(f"{name} was read")


AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True}
INT4 = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}


@pytest.mark.parametrize(
    ("settings", "names", "numerics", "message"),
    [
        ({"quant_method": "vptq"}, (), "fp32", "vptq, which is not supported; these are: awq, bitsandbytes"),
        ({"quant_method": "gptq", "bits": 3}, (), "fp32", "2, 4 or 8 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, (), "fp32", "layout .* .marlin"),
        (AWQ | {"version": "gemv"}, (), "fp32", "layout .* .gemv"),
        (AWQ | {"zero_point": False}, (), "fp32", "zero points"),
        (AWQ, ("model.layers.0.mlp.act.scales",), "fp32", "scales activations"),
        (INT4, (), "fp32", "torchao Int4WeightOnly, which has no kernels for the CPU: it needs --device cuda"),
        ({"load_in_8bit": True}, (), "f16r32", "not in that of f16r32: choose fp32 or bf16"),
        (
            {"load_in_4bit": True},
            ("model.layers.0.mlp.experts.3.up_proj.weight.absmax",),
            "bf16",
            "experts in a form that is not supported",
        ),
    ],
)
def test_what_cannot_be_loaded_is_refused_before_a_weight_is_read(
    settings: dict[str, Any], names: tuple[str, ...], numerics: str, message: str
) -> None:
    source = Declared({"model_type": "llama", "quantization_config": settings}, names)
    with pytest.raises(ConfigError, match=message):
        Quantization.find(source, numerics=numerics_class(numerics), device=CPU, is_installed=lambda _: True)


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.packages])
def test_method_without_its_package_is_refused_by_the_packages_name(method: str) -> None:
    source = Declared({"quantization_config": {"quant_method": method}})
    with pytest.raises(ConfigError, match=rf"needs .*{METHODS[method].packages[-1]}: run pip install"):
        Quantization.find(source, numerics=FP32, device=CPU, is_installed=lambda _: False)


def test_plain_checkpoint_has_no_quantization() -> None:
    assert Quantization.find(Declared({}), numerics=FP32, device=CPU) is None


def test_checkpoint_without_the_scales_of_a_weight_is_refused_by_the_weights_name(tmp_path: Path) -> None:
    make_integers(tmp_path / "short", "gptq")
    tensors = load_file(tmp_path / "short" / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.qzeros"]
    save_file(tensors, tmp_path / "short" / "model.safetensors")
    model = pull(tmp_path / "short")
    with pytest.raises(StoreCorrupted, match=r"layers\.2\.mlp\.up_proj\.weight are not those of gptq int4 g32.*qzeros"):
        Stage.load(model, LayerRange(2, 3), numerics=FP32, device=CPU)


def test_expanded_weights_are_served_in_the_class_that_rounds_inputs(tmp_path: Path) -> None:
    reference = make_integers(tmp_path / "awq", "awq")
    model = pull(tmp_path / "awq")
    rounding = numerics_class("f16r32")
    stage = Stage.load(model, LayerRange(0, CUTS[-1]), numerics=rounding, device=CPU)
    logits = run(model, [stage], Boundary.load(model, numerics=rounding, device=CPU))
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([IDS])).logits[0].numpy()
    assert 1e-6 < np.abs(logits - expected).max() / np.abs(expected).max() < 5e-3


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("in_order", [True, False])
def test_gptq_is_expanded_to_the_weights_that_it_stands_for(bits: int, version: str, in_order: bool) -> None:
    generator = torch.Generator().manual_seed(bits)
    weight = torch.randn((96, 1024), generator=generator)
    groups = None if in_order else (torch.arange(1024) // 128)[torch.randperm(1024, generator=generator)]
    stored, expected = gptq_of(weight, bits, 128, groups, version)
    expanded = expand_gptq(
        stored["qweight"], stored["qzeros"], stored["scales"], stored.get("g_idx"),
        bits=bits, zeros_are_less_one=version == "gptq", dtype=torch.float32, slab_elements=36 * 1024,
    )  # fmt: skip
    assert torch.equal(expanded, expected)


def test_awq_is_expanded_to_the_weights_that_it_stands_for() -> None:
    weight = torch.randn((136, 1024), generator=torch.Generator().manual_seed(3))
    stored, expected = awq_of(weight, 128)
    expanded = expand_awq(
        stored["qweight"], stored["qzeros"], stored["scales"], dtype=torch.bfloat16, slab_elements=5 * 8 * 1024
    )
    assert torch.equal(expanded, expected.bfloat16())
