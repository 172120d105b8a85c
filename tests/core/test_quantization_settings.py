"""What the store says about quantised models: their label, their id, and what torchao writes into file headers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from fusion_node.cli.models import models_app
from fusion_node.errors import StoreCorrupted
from fusion_node.store import ModelStore, StoredModel
from fusion_node.store.quantization import TORCHAO_METADATA_FILE, quantization_settings

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
WEIGHTS = {"num_bits": 4, "type": "int"}


def pull(
    tmp_path: Path, name: str, quantization: dict[str, Any] | None, metadata: list[dict[str, str] | None]
) -> StoredModel:
    """One safetensors file for each entry of ``metadata``; the tensors are the same in all models."""
    folder = tmp_path / name
    folder.mkdir()
    config = CONFIG if quantization is None else CONFIG | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {f"model.layers.{index}.weight": np.full((4, 4), index, np.int8) for index in range(2)}
    if len(metadata) == 1:
        save_file(tensors, folder / "model.safetensors", metadata[0])
    else:
        for index, (tensor, about) in enumerate(zip(tensors, metadata, strict=True)):
            path = folder / f"model-{index + 1:05d}-of-{len(tensors):05d}.safetensors"
            save_file({tensor: tensors[tensor]}, path, about)
    return ModelStore(tmp_path / "home").pull(str(folder))


@pytest.mark.parametrize(
    ("raw", "method", "label"),
    [
        (NF4, "bitsandbytes", "bitsandbytes nf4"),
        ({"load_in_8bit": True}, "bitsandbytes", "bitsandbytes int8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq", "gptq int4 g128"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "gptq", "gptq int8"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "awq", "awq int4 g64"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": {"weights": WEIGHTS}},
            },
            "compressed-tensors",
            "compressed-tensors pack-quantized int4",
        ),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}},
            "torchao",
            "torchao Int8WeightOnly",
        ),
        ({"quant_method": "mxfp4"}, "mxfp4", "mxfp4"),
        # Whatever a file says, the label is one line of printable text that fits a record.
        ({"quant_method": "x\n\x1b[31m" + "y" * 500}, "x31m" + "y" * 60, "x31m" + "y" * 60),
        ({}, "unknown", "unknown"),
        ({"quant_method": "torchao", "quant_type": [1]}, "torchao", "torchao 1"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 7}}, "compressed-tensors", "compressed-tensors"),
    ],
)
def test_label_of_a_quantization_names_method_and_format(raw: dict[str, Any], method: str, label: str) -> None:
    settings = quantization_settings({**CONFIG, "quantization_config": raw})
    assert settings is not None
    assert (settings.method, settings.label) == (method, label)
    assert quantization_settings({"text_config": {"quantization_config": raw}}) == settings


def test_config_without_quantization_has_none() -> None:
    assert quantization_settings(CONFIG) is None
    assert quantization_settings({**CONFIG, "quantization_config": None}) is None


def test_quantization_is_part_of_the_model_id(tmp_path: Path) -> None:
    models = [
        pull(tmp_path, "plain", None, [None]),
        pull(tmp_path, "nf4", NF4, [None]),
        pull(tmp_path, "fp4", {**NF4, "bnb_4bit_quant_type": "fp4"}, [None]),
    ]
    assert len({model.model_id for model in models}) == 3
    assert [model.quantization for model in models] == ["", "bitsandbytes nf4", "bitsandbytes fp4"]


def test_headers_of_torchao_are_part_of_the_model_id_however_the_files_are_cut(tmp_path: Path) -> None:
    method = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}
    about = {f"model.layers.{index}.weight": f'{{"_type": "Int8Tensor", "scale": {index}}}' for index in range(2)}
    names = {"tensor_names": json.dumps(list(about)), "format": "pt"}
    one = pull(tmp_path, "one", method, [about | names])
    two = pull(tmp_path, "two", method, [names | {name: about[name]} for name in reversed(about)][::-1])
    other = pull(tmp_path, "other", method, [about | names | {"model.layers.0.weight": '{"_type": "Int4Tensor"}'}])
    assert one.model_id == two.model_id
    assert one.model_id != other.model_id
    assert json.loads(one.read_file(TORCHAO_METADATA_FILE)) == about | {
        "tensor_names": json.dumps(list(about), separators=(",", ":"))
    }
    (one.path / TORCHAO_METADATA_FILE).write_text("{}")
    with pytest.raises(StoreCorrupted, match=TORCHAO_METADATA_FILE):
        one.read_file(TORCHAO_METADATA_FILE)


def test_models_show_tells_the_quantization(tmp_path: Path) -> None:
    pull(tmp_path, "nf4", NF4, [None])
    pull(tmp_path, "plain", None, [None])

    def show(*arguments: str) -> str:
        result = CliRunner().invoke(models_app, ["show", *arguments, "--home", str(tmp_path / "home")])
        assert result.exit_code == 0
        return result.output

    assert "bitsandbytes nf4" in show("nf4")
    assert json.loads(show("nf4", "--json"))["quantization"] == "bitsandbytes nf4"
    assert json.loads(show("plain", "--json"))["quantization"] == ""
