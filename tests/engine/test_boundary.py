"""The user's ends of a model: rows are taken from the embedding where a family does nothing else in front."""

from __future__ import annotations

import pytest
import torch

from fusion_node.engine.boundary import Boundary
from fusion_node.engine.numerics import numerics_class
from tests.engine.tiny import TINY, tiny_model
from tests.scenarios.swarm import CPU


@pytest.mark.parametrize("numerics", ["fp32", "bf16"])
@pytest.mark.parametrize("model_type", sorted(TINY))
def test_rows_are_those_of_the_familys_own_forward(model_type: str, numerics: str) -> None:
    boundary = Boundary.load(tiny_model(model_type), numerics=numerics_class(numerics), device=CPU)
    ids = [*range(131), 5, 5]
    with torch.inference_mode():
        expected = boundary._through_front(torch.tensor(ids))
    for rows in (boundary.embed(ids), boundary.embed(ids)):
        assert rows.dtype == expected.dtype
        assert torch.equal(rows, expected)
    assert torch.equal(boundary.embed(range(7, 8)), expected[7:8])


def test_a_family_that_does_more_goes_through_its_forward() -> None:
    found = []
    for model_type in ("llama", "granite"):
        boundary = Boundary.load(tiny_model(model_type), numerics=numerics_class("fp32"), device=CPU)
        boundary.embed([1])
        found.append(boundary._is_table)
    assert found == [True, False]
