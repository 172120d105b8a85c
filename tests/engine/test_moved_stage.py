"""A stage that goes over to other layers reads only what it lacks, and computes what a new one would."""

from __future__ import annotations

import re

import pytest
import torch

from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.session_log_core import SessionLog, StepRows
from fusion_node.engine.stage import Stage, StepInput
from fusion_node.errors import InvalidLayers
from fusion_node.types import LayerRange
from tests.engine.tiny import tiny_model

CPU = torch.device("cpu")
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def layers_read(names: list[str]) -> set[int]:
    return {int(found[1]) for name in names if (found := _LAYER.search(name))}


def outputs(stage: Stage, rows_TD: torch.Tensor) -> torch.Tensor:
    pool = stage.new_pool(64)
    step = SessionLog(64).apply(0, first_node=1, num_rows=len(rows_TD), parent=0, parents=(), advance=len(rows_TD))
    assert isinstance(step, StepRows)
    (out,) = stage.forward([StepInput(step, rows_TD, (range(len(rows_TD)),))], pool)
    return out


@pytest.mark.parametrize("numerics", ["fp32", "f16r32"])
@pytest.mark.parametrize(
    ("before", "after", "read"),
    [
        ((0, 4), (2, 6), {4, 5}),
        ((3, 6), (1, 5), {1, 2}),
        ((2, 4), (1, 6), {1, 4, 5}),
        ((0, 3), (4, 7), {4, 5, 6}),
        ((0, 5), (1, 3), set()),
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "mistral", "olmoe"])
def test_moved_stage_reads_what_it_lacks_and_equals_a_new_one(
    model_type: str, before: tuple[int, int], after: tuple[int, int], read: set[int], numerics: str
) -> None:
    model = tiny_model(model_type)
    first = Stage.load(model, LayerRange(*before), numerics=numerics_class(numerics), device=CPU)
    rows_TD = torch.randn((9, 48), generator=torch.Generator().manual_seed(1))
    untouched = outputs(first, rows_TD)
    model.read.clear()
    told: list[int] = []
    moved = first.moved(model, LayerRange(*after), on_tensor=lambda _, num_bytes: told.append(num_bytes))
    assert layers_read(model.read) == read
    fresh = Stage.load(model, LayerRange(*after), numerics=numerics_class(numerics), device=CPU)
    assert moved.num_weight_bytes == fresh.num_weight_bytes
    assert sum(told) == fresh.num_weight_bytes * len(read) // len(moved.layers)
    assert torch.equal(outputs(moved, rows_TD), outputs(fresh, rows_TD))
    # The stage that it came from serves on until it is given up.
    assert torch.equal(outputs(first, rows_TD), untouched)


def test_kept_layers_are_in_memory_once() -> None:
    model = tiny_model("llama")
    first = Stage.load(model, LayerRange(0, 4), numerics=numerics_class("f16r32"), device=CPU)
    moved = first.moved(model, LayerRange(2, 6))
    places = [{p.data_ptr() for p in stage._model.layers.parameters()} for stage in (first, moved)]
    assert len(places[0] & places[1]) == len(places[0]) // 2


def test_a_stage_cannot_move_to_where_no_range_begins() -> None:
    model = tiny_model("glm_moe_dsa")
    first = Stage.load(model, LayerRange(0, 5), numerics=numerics_class("fp32"), device=CPU)
    with pytest.raises(InvalidLayers):
        first.moved(model, LayerRange(3, 7))
    moved = first.moved(model, LayerRange(2, 7))
    fresh = Stage.load(model, LayerRange(2, 7), numerics=numerics_class("fp32"), device=CPU)
    rows_TD = torch.randn((9, 48), generator=torch.Generator().manual_seed(1))
    assert torch.equal(outputs(moved, rows_TD), outputs(fresh, rows_TD))
