"""GEMMs of the numerics class f16r32: inputs rounded to fp16, products summed in float32, outputs float32.

Generic over decoder classes of transformers: every linear map of a module rounds its input, and its experts run
through the function below. What decides rather than computes (routers, sparse-attention indexers) stays float32:
rounding there buys nothing and lets near ties fall the other way.

A matrix that is neither is refused. An architecture that multiplies by one in a way that is not known here would
otherwise be announced as f16r32 and compute something else.

Shapes: T packed tokens, k experts per token, E experts, D hidden size, F feed-forward, I and O inputs and outputs.
Source: docs/numerics.md.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fusion_node.engine.numerics import NumericsClass, round_to
from fusion_node.errors import ConfigError

EXPERTS_NAME = "fusion_f16r32"

_SLAB_ELEMENTS = 2**24
"""How many weights are rounded at once: 32 MiB beside the shard."""

_DECIDING = frozenset({"gate", "router", "shared_expert_gate", "indexer"})
"""Modules of these names choose or weigh, in transformers' families: ``mlp.gate``, ``mlp.router``,
``mlp.shared_expert_gate``, ``self_attn.indexer``. The MLP's own gate is called ``gate_proj``."""


def prepare(model: torch.nn.Module, numerics: NumericsClass, device: torch.device) -> None:
    """Before the weights: gives every parameter on the meta device the type that it will have, and chooses experts.

    Raises:
        ConfigError: the class rounds GEMM inputs, and the module has a matrix of unknown use.
    """
    _sum_in_float32()
    if not numerics.rounds_gemm_inputs:
        return
    gemm = dict(_gemm_weights(model))
    for name, parameter in model.named_parameters():
        # Experts stack their biases and Cohere's heads their gains, so these may have two dimensions.
        is_vector = parameter.dim() < 2 or name.endswith(("_bias", "norm.weight"))
        if not is_vector and name not in gemm and not _decides(name):
            raise ConfigError(
                f"this architecture has a matrix {name!r} that {numerics.name} says nothing about: "
                "serve it in fp32 or bf16"
            )
    for name, owner in gemm.items():
        # Rows of an embedding are multiplied by a scale in some families, which has to happen in dtype.
        if not isinstance(owner, torch.nn.Embedding):
            leaf = name.rpartition(".")[2]
            meta = torch.empty_like(getattr(owner, leaf), dtype=numerics.weight_dtype(device))
            setattr(owner, leaf, torch.nn.Parameter(meta, requires_grad=False))
        if _is_experts(owner):
            # The experts' own copy of the configuration decides, whatever the model around them was built with.
            owner.config._experts_implementation = EXPERTS_NAME  # type: ignore[union-attr]


def apply(model: torch.nn.Module, numerics: NumericsClass) -> None:
    """After the weights: rounds those that are kept wide, and lets every linear map round its input.

    Raises:
        ConfigError: a weight lies beyond the range of ``gemm_dtype``.
    """
    if not numerics.rounds_gemm_inputs:
        return
    rounded: dict[int, torch.nn.Parameter] = {}
    for name, owner in dict(_gemm_weights(model)).items():
        leaf = name.rpartition(".")[2]
        weight = getattr(owner, leaf)
        # Embedding and head may be one tensor, and have to stay one.
        if id(weight) not in rounded:
            values = rounded_values(weight.detach(), numerics.gemm_dtype)
            if values is None:
                raise ConfigError(f"{name} holds values beyond the range of {numerics.name}: serve the model in bf16")
            rounded[id(weight)] = torch.nn.Parameter(values, requires_grad=False)
        setattr(owner, leaf, rounded[id(weight)])
        if isinstance(owner, torch.nn.Linear):
            base: Any = type(owner)
            owner.__class__ = _rounded(base)


def rounded_values(
    weight: torch.Tensor, dtype: torch.dtype, *, slab_elements: int = _SLAB_ELEMENTS
) -> torch.Tensor | None:
    """The weight with values of ``dtype``, in its own type and memory; None when one is beyond the range.

    In slabs, because the experts of a layer are one tensor, and a second copy of it would be most of a small shard.
    """
    # Memory that torch did not allocate is a file, mapped: it must not be written to.
    out = weight if weight.untyped_storage().resizable() else torch.empty_like(weight)
    rows = max(1, slab_elements // weight[0].numel())
    for first in range(0, len(weight), rows):
        slab = weight[first : first + rows].to(dtype)
        if not torch.isfinite(slab).all():
            return None
        if out is not weight or weight.dtype != dtype:
            out[first : first + rows] = slab
    return out


class _RoundedLinear(torch.nn.Linear):
    """``y = round(x) W^T + b``: x in any type, W of fp16 values, b, sums and y in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded = round_to(x, torch.float16)
        if self.weight.dtype != torch.float16:
            return super().forward(rounded.to(self.weight.dtype))
        y = product(rounded.flatten(0, -2), self.weight.t()).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


@functools.cache
def _rounded(base: Any) -> Any:
    """The class above on top of another linear layer of the engine, whose kernel then does the product."""
    if issubclass(base, _RoundedLinear):
        return base
    if base is torch.nn.Linear:
        return _RoundedLinear
    return type(f"Rounded{base.__name__}", (_RoundedLinear, base), {})


def product(x_TI: torch.Tensor, w_IO: torch.Tensor) -> torch.Tensor:
    """``[T, O]`` in float32 of an fp16 ``x`` and a ``w`` of fp16 values, summed in float32.

    A product of two fp16 numbers has 22 significant bits, so it is exact in float32, and widening first is the same
    arithmetic as a tensor core's.
    """
    if w_IO.dtype == torch.float16 and _multiplies_wide(w_IO.device):
        return torch.mm(x_TI, w_IO, out_dtype=torch.float32)
    # The other way round, so that on a CPU every core reads its own part of the weights (fusion_node.engine.linear).
    return torch.mm(w_IO.float().t(), x_TI.float().t()).t()


@functools.cache
def _multiplies_wide(device: torch.device) -> bool:
    """Whether this device multiplies fp16 into float32. Asked of the device, as versions and drivers differ."""
    probe = torch.ones((8, 8), dtype=torch.float16, device=device)
    try:
        torch.mm(probe, probe, out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def rounded_experts(
    self: Any, hidden_TD: torch.Tensor, top_k_index_Tk: torch.Tensor, top_k_weights_Tk: torch.Tensor
) -> torch.Tensor:
    """The experts function: each hit expert's rows at once. Gate, routing weights and their sum are float32.

    Args:
        self: a module under transformers' ``use_experts_implementation``, whose flags say how its weights lie.
    """
    num_tokens, top_k = top_k_index_Tk.shape
    experts, order = torch.sort(top_k_index_Tk.reshape(-1))
    tokens = order // top_k
    counts = torch.bincount(experts, minlength=self.num_experts).tolist()
    x_TD = round_to(hidden_TD, torch.float16)
    y_SD = hidden_TD.new_empty((num_tokens * top_k, hidden_TD.shape[-1]))
    up_name = "gate_up_proj" if self.has_gate else "up_proj"
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        rows = slice(start, start + count)
        start += count
        up = _expert_linear(self, up_name, expert, x_TD[tokens[rows]])
        inner = self._apply_gate(up) if self.has_gate else self.act_fn(up)
        out = _expert_linear(self, "down_proj", expert, round_to(inner, torch.float16))
        if self.has_post_expert_norm:
            out = self.post_expert_norm(out)
        y_SD[order[rows]] = out
    return (y_SD.view(num_tokens, top_k, -1) * top_k_weights_Tk.unsqueeze(-1)).sum(dim=1)


def _expert_linear(experts: Any, name: str, expert: int, x_TI: torch.Tensor) -> torch.Tensor:
    weight = getattr(experts, name)[expert]
    y = product(x_TI, weight if experts.is_transposed else weight.t())
    return y + getattr(experts, f"{name}_bias")[expert] if experts.has_bias else y


def _is_experts(module: torch.nn.Module) -> bool:
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


def _decides(name: str) -> bool:
    return not _DECIDING.isdisjoint(name.split("."))


def _gemm_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Parameters that are rounded, by name, with their owners: linear maps, experts, embedding (maybe the head)."""
    for name, module in model.named_modules():
        if _decides(name):
            continue
        prefix = f"{name}." if name else ""
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            yield f"{prefix}weight", module
        elif _is_experts(module):
            leaves = ("gate_up_proj", "up_proj", "down_proj")
            yield from ((f"{prefix}{leaf}", module) for leaf in leaves if hasattr(module, leaf))


def _sum_in_float32() -> None:
    """Forbids what cuBLAS may otherwise do: TF32 inputs, and partial sums in 16 bits. CPUs do neither by default."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, rounded_experts)
