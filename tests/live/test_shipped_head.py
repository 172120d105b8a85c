"""The draft head that comes with the program guesses what the built-in model says."""

from __future__ import annotations

import pytest

from benchmarks.speculation import novel
from benchmarks.speculation.cells import read_prompts
from fusion_node.engine.shipped_heads import shipped_head
from fusion_node.engine.trained_head import TrainedHead
from fusion_node.store import StoredModel

pytestmark = pytest.mark.live


def test_shipped_head_guesses_a_third_of_new_text(builtin_model: StoredModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_HOME", str(builtin_model.path.parents[1]))
    folder = shipped_head(builtin_model.model_id)
    assert folder is not None
    config = TrainedHead.load(folder).config
    assert config.feature_layers == (builtin_model.num_layers,), "it reads what the last stage returns anyway"
    found = novel.acceptance_of(folder, read_prompts(novel.PROMPTS)[:4], 24, "fp32")
    # Measured: 0.45 and 0.71; of all sixteen prompts 0.375 and 0.715. A head of the closed form alone has 0.25.
    assert found["first"][0] >= 0.4
    assert found["first_8"][0] >= 0.66


def test_no_head_is_shipped_for_a_model_of_another_id() -> None:
    assert shipped_head("ab" * 32) is None
