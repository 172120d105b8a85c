"""Linear layers on a CPU: the same products as torch's own, for any number of tokens however they lie."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from fusion_node.engine.linear import SplitLinear, speed_up_linears


def layer(*, bias: bool, is_output_contiguous: bool = False, sizes: tuple[int, int] = (48, 64)) -> torch.nn.Linear:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(*sizes, bias=bias))
    speed_up_linears(model, is_output_contiguous=is_output_contiguous)
    assert isinstance(model[0], SplitLinear)
    return model[0]


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(48, 64), (64, 48)])
@torch.inference_mode()
def test_products_are_those_of_torch(sizes: tuple[int, int], bias: bool, is_transposed: bool) -> None:
    split, contiguous = layer(bias=bias, sizes=sizes), layer(bias=bias, sizes=sizes, is_output_contiguous=True)
    for num_tokens in (*range(1, 36), 127, 128, 200):
        x_1TI = torch.randn(1, num_tokens, sizes[0])
        if is_transposed:
            x_1TI = x_1TI.transpose(1, 2).contiguous().transpose(1, 2)
        expected = torch.nn.functional.linear(x_1TI, split.weight, split.bias)
        torch.testing.assert_close(split(x_1TI), expected, rtol=1e-5, atol=1e-5)
        out = contiguous(x_1TI)
        assert out.is_contiguous()
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_few_tokens_never_lie_side_by_side_as_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output of one layer is the input of the next: the BLAS takes a path four times slower for such columns."""
    operands: list[torch.Tensor] = []
    bmm = torch.bmm

    def noted(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        operands.extend((first, second))
        return bmm(first, second)

    layers: list[Any] = [layer(bias=False, sizes=(48, 64)), layer(bias=False, sizes=(64, 48))]
    monkeypatch.setattr(torch, "bmm", noted)
    for num_tokens in range(2, 32):
        operands.clear()
        layers[1](layers[0](torch.randn(1, num_tokens, 48)))
        assert len(operands) == 4
        for first, second in list(pairwise(operands))[::2]:
            assert first.stride(2) == 1, "the rows of the first operand are contiguous"
            assert second.stride(1) == 1, "the columns of the second operand are contiguous"
