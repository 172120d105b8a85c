"""What is read for a shard, how it becomes the modules' tensors, and how much memory that takes.

``python -m tests.engine.test_weights HOME`` loads layers 1:4 of the model ``experts`` and prints what it took.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fusion_node.engine.boundary import Boundary
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.stage import Stage
from fusion_node.errors import ConfigError, StoreCorrupted
from fusion_node.store import ModelStore
from fusion_node.types import LayerRange
from tests.engine.tiny import TINY, TinyModel, tiny_model

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
FP32 = numerics_class("fp32")
MIDDLE = LayerRange(2, 5)

WITH_EXPERTS = ("qwen3_moe", "glm4_moe", "gpt_oss", "mixtral", "olmoe", "deepseek_v3")


def load(model: TinyModel, layers: LayerRange = MIDDLE, numerics: str = "fp32") -> Stage:
    return Stage.load(model, layers, numerics=numerics_class(numerics), device=CPU)


def tensors(stage: Stage) -> dict[str, torch.Tensor]:
    module = stage._model
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def layer_of(name: str) -> int | None:
    found = re.search(r"\.layers\.(\d+)\.", f".{name}")
    return None if found is None else int(found[1])


@pytest.mark.parametrize("model_type", TINY)
def test_a_stage_holds_its_layers_and_nothing_else(model_type: str) -> None:
    model = tiny_model(model_type)
    stage = load(model)
    whole = {name.removeprefix("model."): t for name, t in model.whole.state_dict().items()}
    expected = {name: t for name, t in whole.items() if layer_of(name) in range(2, 5)}
    held = {name: t for name, t in tensors(stage).items() if not name.startswith("rotary_emb.")}
    assert held.keys() == expected.keys()
    for name, tensor in held.items():
        assert torch.equal(tensor, expected[name]), name
    num_bytes = sum(t.nbytes for t in expected.values())
    assert stage.num_weight_bytes == num_bytes
    # Of the rest of the model there is nothing, not even unused: only the few rotary frequencies beside the layers.
    assert not any(t.is_meta for t in tensors(stage).values())
    allocated = sum(t.nbytes for t in tensors(stage).values())
    assert allocated - num_bytes < 1024
    assert {layer_of(name) for name in model.read} == {2, 3, 4}


@pytest.mark.parametrize("model_type", TINY)
def test_a_boundary_reads_no_layer(model_type: str) -> None:
    model = tiny_model(model_type)
    Boundary.load(model, numerics=FP32, device=CPU)
    assert {layer_of(name) for name in model.read} == {None}


@pytest.mark.parametrize("model_type", WITH_EXPERTS)
def test_experts_stored_one_by_one_and_all_in_one_give_the_same_tensors(model_type: str) -> None:
    ours, hubs = tiny_model(model_type, as_in_module=True), tiny_model(model_type)
    if model_type != "gpt_oss":  # which the hub, too, holds in one
        assert len(hubs.tensor_names) > len(ours.tensor_names)
    a, b = tensors(load(ours)), tensors(load(hubs))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_tensor_that_needs_no_conversion_is_the_stored_one_without_a_copy() -> None:
    model = tiny_model("qwen3_moe")
    held = tensors(load(model))
    stored = model.stored["model.layers.3.self_attn.q_proj.weight"]
    assert held["layers.3.self_attn.q_proj.weight"].data_ptr() == stored.data_ptr()


@pytest.mark.parametrize("numerics", ["bf16", "fp16"])
def test_what_transformers_keeps_in_float32_stays_so(numerics: str) -> None:
    dtype = numerics_class(numerics).dtype
    held = tensors(load(tiny_model("deepseek_v3"), numerics=numerics))
    assert held["layers.4.mlp.gate.weight"].dtype == torch.float32
    assert held["layers.4.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert held["layers.4.mlp.experts.gate_up_proj"].dtype == dtype
    assert held["layers.4.self_attn.o_proj.weight"].dtype == dtype
    norms = tensors(load(tiny_model("gpt_oss"), numerics=numerics))["layers.4.input_layernorm.weight"]
    assert norms.dtype == (torch.float32 if numerics == "fp16" else dtype)


@pytest.mark.parametrize("wrapper", ["gemma3", "mistral3"])
def test_the_text_part_of_a_larger_checkpoint_is_served_as_the_decoder_that_it_is(wrapper: str) -> None:
    inner = tiny_model({"gemma3": "gemma3_text", "mistral3": "mistral"}[wrapper])
    for prefix, head in (("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")):
        renamed = {
            name.replace("model.", prefix, 1) if name.startswith("model.") else name.replace("lm_head.", head, 1): t
            for name, t in inner.stored.items()
        }
        outer = replace(inner, config={"model_type": wrapper, "text_config": inner.config, "vision_config": {}})
        outer.__dict__["stored"] = {**renamed, "vision_tower.embeddings.weight": torch.zeros(3)}
        a, b = load(inner), load(outer)
        assert all(torch.equal(t, tensors(b)[name]) for name, t in tensors(a).items())
        logits = [
            boundary.logits(boundary.embed([5, 6]))
            for boundary in (Boundary.load(m, numerics=FP32, device=CPU) for m in (inner, outer))
        ]
        np.testing.assert_array_equal(*logits)
        assert "vision_tower.embeddings.weight" not in outer.read


def test_tied_embeddings_are_stored_and_held_once() -> None:
    model = tiny_model("llama")
    assert "lm_head.weight" not in model.tensor_names
    boundary = Boundary.load(model, numerics=FP32, device=CPU)
    embedding = boundary._front.get_submodule("embed_tokens").weight
    assert boundary._back.get_submodule("lm_head").weight is embedding


# Checkpoints that are not what their configuration says.


@pytest.mark.parametrize("wrong", [{"hidden_size": "48"}, {"layer_types": ["none"]}])
def test_a_configuration_that_its_class_does_not_take_is_refused(wrong: dict[str, object]) -> None:
    model = tiny_model("qwen2")
    model = replace(model, config={**model.config, **wrong})
    with pytest.raises(ConfigError, match=r"config\.json of tiny-qwen2 is not one of a qwen2 model: "):
        load(model)


def without(model: TinyModel, name: str) -> TinyModel:
    return changed(model, {k: t for k, t in model.stored.items() if k != name})


def changed(model: TinyModel, stored: dict[str, torch.Tensor]) -> TinyModel:
    other = replace(model, read=[])
    other.__dict__["stored"] = stored
    return other


def test_a_checkpoint_without_a_tensor_is_refused_by_its_name_before_anything_is_read() -> None:
    model = without(tiny_model("llama"), "model.layers.3.mlp.up_proj.weight")
    with pytest.raises(StoreCorrupted, match=r"lacks layers\.3\.mlp\.up_proj\.weight"):
        load(model)
    assert model.read == []


def test_a_missing_expert_is_found() -> None:
    model = without(tiny_model("mixtral"), "model.layers.3.block_sparse_moe.experts.2.w3.weight")
    with pytest.raises(StoreCorrupted, match=r"makes layers\.3\.mlp\.experts\.gate_up_proj of 7 tensors, .* needs 8"):
        load(model)


def test_one_expert_too_many_is_found() -> None:
    model = tiny_model("olmoe")
    name = "model.layers.3.mlp.experts.{}.down_proj.weight"
    model = changed(model, {**model.stored, name.format(6): model.stored[name.format(5)]})
    with pytest.raises(StoreCorrupted, match=r"of 7 tensors, but its configuration needs 6"):
        load(model)


@pytest.mark.parametrize(
    "name", ["model.layers.3.self_attn.o_proj.weight", "model.layers.3.mlp.experts.1.up_proj.weight"]
)
def test_a_tensor_of_another_shape_is_refused(name: str) -> None:
    model = tiny_model("olmoe")
    model = changed(model, {**model.stored, name: torch.zeros(5, 48)})
    with pytest.raises(StoreCorrupted, match=rf"{re.escape(name.removeprefix('model.'))} .* \(5, 48\)"):
        load(model)


def test_the_same_tensor_in_two_forms_is_refused() -> None:
    model = tiny_model("olmoe")
    fused = tiny_model("olmoe", as_in_module=True).stored
    model = changed(model, {**model.stored, **fused})
    with pytest.raises(StoreCorrupted, match=r"holds layers\.2\.mlp\.experts\.down_proj twice"):
        load(model)


# Memory.


@pytest.mark.slow
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_peak_memory_while_experts_are_loaded_is_little_more_than_the_shard(
    stored: torch.dtype, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(
        "qwen3_moe", num_hidden_layers=4, hidden_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        moe_intermediate_size=832, num_experts=16, num_experts_per_tok=2, vocab_size=32, intermediate_size=64,
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    folder = tmp_path / "experts"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = TinyModel(folder, "", {}, whole).stored
    save_file({name: torch.ones(t.shape, dtype=stored) for name, t in state.items()}, folder / "model.safetensors")
    ModelStore(tmp_path / "home").pull(str(folder))
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.test_weights", str(tmp_path / "home")],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    took = json.loads(done.stdout)
    assert took["shard"] > 240_000_000
    assert took["peak"] <= 1.15 * took["shard"], took


def _print_memory(home: Path) -> None:
    model = ModelStore(home).find("experts")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on

    def resident(field: str) -> int:
        found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024

    before = resident("VmRSS")
    stage = Stage.load(model, LayerRange(1, 4), numerics=FP32, device=CPU)
    print(
        json.dumps({"shard": stage.num_weight_bytes, "peak": resident("VmHWM") - before, "anon": resident("RssAnon")})
    )


if __name__ == "__main__":
    _print_memory(Path(sys.argv[1]))
