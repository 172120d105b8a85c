"""The linear half of a draft head in closed form: ridge regression to the target's next hidden state.

Shapes: N pairs, B texts, T positions, S = T - 1 starts of chains, D hidden size, I inputs of a linear map.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fusion_node.engine.boundary import Boundary
from fusion_node.engine.draft_batches import Batch, embed, normed_rows
from fusion_node.engine.trained_head import TrainedHead, normed
from fusion_node.errors import ConfigError

_MIN_SCALE = 0.05
"""Of a standardised input, relative to the others: what hardly varies is not blown up."""


class Standardised(torch.nn.Module):
    """A linear map of inputs with mean 0 and variance 1: one learning rate fits all of them.

    Hidden states of a language model have a few coordinates that are a hundred times the others.
    """

    def __init__(self, mean_I: torch.Tensor, scale_I: torch.Tensor, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.register_buffer("mean", mean_I)
        self.register_buffer("scale", scale_I)
        self.mean: torch.Tensor
        self.scale: torch.Tensor
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear((x - self.mean) / self.scale, self.weight, self.bias)

    def folded(self) -> torch.nn.Linear:
        """The same map of plain inputs."""
        linear = torch.nn.Linear(self.weight.shape[1], self.weight.shape[0])
        # On the CPU, as not every device has float64.
        weight = self.weight.detach().cpu().double() / self.scale.cpu()
        linear.weight.data = weight.float()
        linear.bias.data = (self.bias.detach().cpu().double() - weight @ self.mean.cpu().double()).float()
        return linear


@dataclass(slots=True)
class _Sums:
    """What ridge regression needs of pairs of inputs and outputs."""

    gram_II: torch.Tensor
    cross_ID: torch.Tensor
    sum_I: torch.Tensor
    sum_D: torch.Tensor
    square: float = 0.0
    count: int = 0

    @classmethod
    def empty(cls, num_inputs: int, num_outputs: int) -> _Sums:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float64)

        return cls(zeros(num_inputs, num_inputs), zeros(num_inputs, num_outputs), zeros(num_inputs), zeros(num_outputs))

    def add(self, x_NI: torch.Tensor, y_ND: torch.Tensor) -> None:
        """Products in float32 on the device, sums in float64 here."""
        self.gram_II += (x_NI.t() @ x_NI).cpu().double()
        self.cross_ID += (x_NI.t() @ y_ND).cpu().double()
        self.sum_I += x_NI.sum(0).cpu().double()
        self.sum_D += y_ND.sum(0).cpu().double()
        self.square += float(y_ND.square().sum())
        self.count += len(x_NI)

    def solve(self, ridge: float) -> Standardised:
        """The map from standardised inputs; its bias is the mean of the outputs.

        Raises:
            ConfigError: there were no pairs.
        """
        if self.count == 0:
            raise ConfigError("there is nothing to learn from: give more texts, or longer answers with --answer-tokens")
        mean_I, mean_D = self.sum_I / self.count, self.sum_D / self.count
        variance_I = (self.gram_II.diagonal() / self.count - mean_I.square()).clamp(min=0)
        scale_I = variance_I.sqrt().clamp(min=_MIN_SCALE * float(variance_I.mean().sqrt()) + 1e-9)
        outer = torch.outer(scale_I, scale_I)
        covariance_II = (self.gram_II / self.count - torch.outer(mean_I, mean_I)) / outer
        cross_ID = (self.cross_ID / self.count - torch.outer(mean_I, mean_D)) / scale_I[:, None]
        # What chance makes of a covariance falls with the pairs per input, and so does what has to be held against it:
        # measured on the built-in model with 1,152 and 2,305 inputs and with 3,000 and 19,000 pairs.
        penalty = ridge * len(mean_I) / self.count
        covariance_II.diagonal().add_(penalty * float(covariance_II.diagonal().mean()) + 1e-9)
        weight_ID = torch.cholesky_solve(cross_ID, torch.linalg.cholesky(covariance_II))
        linear = torch.nn.Linear(len(mean_I), len(mean_D))
        linear.weight.data = weight_ID.t().float().contiguous()
        linear.bias.data = mean_D.float()
        return Standardised(mean_I.float(), scale_I.float(), linear)


def solve_linear_maps(
    head: TrainedHead,
    target: Boundary,
    batches: Callable[[], Iterator[Batch]],
    *,
    ridge: float,
) -> float:
    """Gives the head its two linear maps, from two passes over the data.

    Returns:
        What the target's hidden states were divided by, so that the head's have a root mean square of 1 at most.
    """
    size, num_features = head.config.hidden_size, len(head.config.feature_layers)
    first = _Sums.empty((num_features + 1) * size, size)
    for batch in batches():
        x_BSI, y_BSD, _ = _first_pairs(target, batch)
        valid = batch.valid(1)
        first.add(x_BSI[valid], y_BSD[valid])
    unit = math.sqrt(first.square / max(1, first.count * size)) or 1.0
    first.cross_ID /= unit
    first.sum_D /= unit
    device = head.log_scales.device
    fc = first.solve(ridge).to(device)
    second = _Sums.empty(2 * size, size)
    for batch in batches():
        x_BSI, y_BSD, embedded_BTD = _first_pairs(target, batch)
        with torch.no_grad():
            said = fc(x_BSI)
        x_next = torch.cat((normed(said[:, :-1]), normed(embedded_BTD[:, 2:])), dim=-1)
        valid = batch.valid(2)
        second.add(x_next[valid], y_BSD[:, 1:][valid] / unit)
    head.fc, head.fc_next = fc, second.solve(ridge).to(device)  # type: ignore[assignment]
    head.log_scales.data += math.log(unit)
    return unit


def _first_pairs(target: Boundary, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs of step 1 and the hidden states that they should give, ``[B, T - 1, I]`` and ``[B, T - 1, D]``."""
    embedded_BTD = embed(target, batch.ids_BT)
    x_BSI = torch.cat((normed(batch.features_BTkD[:, :-1]).flatten(-2), normed(embedded_BTD[:, 1:])), dim=-1)
    y_BTD = normed_rows(target, batch.features_BTkD[:, :, -1])
    return x_BSI, y_BTD[:, 1:], embedded_BTD
