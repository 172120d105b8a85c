"""Linear layers on a CPU: the same parameters, the product taken the other way round.

torch hands ``x @ W.T`` to a BLAS whose parallel loop runs over the rows of its first operand. A decode step has one
row, so one core does all the work, and a step of a few rows fares little better. Where the output features are split
into chunks, every core reads its own part of the weights: measured on two cores with weights out of cache, 1.9 times as
fast for one row, 2.5 for four, 1.7 for sixteen.

Which way round is the faster one goes by the number of tokens. What matters as much is how the tokens lie: a product
with a few tokens as its columns takes four times as long where these lie side by side as where they are rows seen the
other way round. Kernels take four of them at a time, and one less, of all numbers, for longer: then a row of zeros is
added.

Shapes: T tokens, I input features, O output features, C chunks of output features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_COLUMNS_UP_TO_TOKENS = 5
"""Up to here tokens are columns: weights times inputs, chunk by chunk."""

_ROWS_UP_TO_TOKENS = 31
"""Up to here they are rows: inputs times weights, chunk by chunk. As columns, 15 take twice as long. Above, one product
with all weights is as fast."""

_PLAIN_FROM_TOKENS = 128
"""From here on torch's own form keeps all cores busy, and its outputs lie as what follows likes them."""

_NUM_CHUNKS = (8, 4, 2)
"""Of output features: the first that divides them. More chunks than cores, so that a slower core takes fewer."""


class SplitLinear(torch.nn.Linear):
    """A linear layer that multiplies weights by inputs. An existing layer becomes one by its class alone."""

    num_chunks: int
    is_output_contiguous: bool
    _chunks: tuple[torch.nn.Parameter, torch.Tensor]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Takes ``[..., T, I]``, returns ``[..., T, O]``, for several tokens as a transposed view unless told."""
        # Every call of torch counts here, for one token as much as the product of a small layer.
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        if input.numel() == self.in_features:
            x_1I, chunks = input.reshape(1, self.in_features), self._weight_COI(weight)
            if self.in_features > self.out_features:
                y = torch.bmm(x_1I.expand(self.num_chunks, 1, -1), chunks.transpose(1, 2))
            else:
                # By way of a transpose: for the strides of a plain view the BLAS takes a path four times slower.
                y = torch.bmm(chunks, x_1I.t().expand(self.num_chunks, -1, -1))
            y = y.view(*input.shape[:-1], self.out_features)
            return y if bias is None else y.add_(bias)
        x_TI = input.reshape(-1, self.in_features)
        num_tokens = x_TI.shape[0]
        if num_tokens >= _PLAIN_FROM_TOKENS:
            return super().forward(input)
        if num_tokens > _ROWS_UP_TO_TOKENS:
            y_TO = torch.mm(self.weight, x_TI.t()).t()
        else:
            # What the layer before returned is a transposed view, whose columns lie side by side.
            x_TI = F.pad(x_TI, (0, 0, 0, 1)) if num_tokens % 4 == 3 else x_TI.contiguous()
            if num_tokens <= _COLUMNS_UP_TO_TOKENS:
                x_CIT = x_TI.t().expand(self.num_chunks, -1, -1)
                y_TO = torch.bmm(self._weight_COI(weight), x_CIT).flatten(0, 1).t()
            else:
                x_CTI = x_TI.expand(self.num_chunks, -1, -1)
                y_TO = torch.bmm(x_CTI, self._weight_COI(weight).transpose(1, 2)).transpose(0, 1).flatten(1)
            y_TO = y_TO[:num_tokens]
        if bias is not None:
            y_TO += bias
        return (y_TO.contiguous() if self.is_output_contiguous else y_TO).reshape(*input.shape[:-1], -1)

    def _weight_COI(self, weight: torch.nn.Parameter | None) -> torch.Tensor:
        """A view of the weights in chunks, made again when the parameter is another one."""
        chunks = self.__dict__.get("_chunks")
        if chunks is None or chunks[0] is not weight:
            chunks = self.__dict__["_chunks"] = self.weight, self.weight.view(self.num_chunks, -1, self.in_features)
        view: torch.Tensor = chunks[1]
        return view


def speed_up_linears(model: torch.nn.Module, *, is_output_contiguous: bool = False) -> None:
    """Turns the float32 linear layers of a model on the CPU into SplitLinear.

    Other types are left alone: torch has fast paths of its own for them.

    Args:
        is_output_contiguous: for classes that take it for granted; it costs a copy.
    """
    for module in model.modules():
        if type(module) is not torch.nn.Linear or type(module.weight) is not torch.nn.Parameter:
            continue
        weight = module.weight
        chunks = next((c for c in _NUM_CHUNKS if weight.shape[0] % c == 0), None)
        if chunks is None or weight.device.type != "cpu" or weight.dtype != torch.float32 or not weight.is_contiguous():
            continue
        module.__class__ = SplitLinear
        # By setattr: the type checker takes attributes of a module for parameters.
        setattr(module, "num_chunks", chunks)  # noqa: B010
        setattr(module, "is_output_contiguous", is_output_contiguous)  # noqa: B010
