"""One decoder layer as one member of a fusion group holds it: its slice of the weights, and what it does with them.

The hidden state x is split by columns, and so is the input of every linear map: member k holds ``W[:, columns_k]``,
which makes a part of every output. Owner j sums the parts of its own outputs in the order of the members, so that
nothing depends on which came first. RMSNorm needs the whole row for one number only, its mean square, and that number
commutes with the linear map: ``norm(x) W^T = rsqrt(mean(x^2) + eps) * sum_k (x_k * gamma_k) W_k^T``. The sum of squares
of the own columns is sent as one more value, and no member ever needs another's columns.

What a family does beside is its own: rotary embedding, norms of heads and activation are transformers' modules and
functions. In a class that rounds the inputs of GEMMs, inputs that are not normed yet are first brought into fp16's
range by a power of two for each row, which is exact, and their products back.

Experts are chosen by the sums before the norm's factor is applied: it is positive, so the order is the same, and sums
in one order are equal bit by bit on all members, whatever they compute on. A member that chose otherwise than another
would add channels of another expert.

Shapes: T rows, d own columns, D hidden size, N own query heads, K own KV heads, U of them that are different, H head
dim, C own channels, F all channels, E experts, k experts of a row, R outputs of a linear map, W values per row of an
exchange.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig

from fusion_node.engine.architectures import ARCHITECTURES, SLIDING
from fusion_node.engine.attention import PackedBatch, packed_attention
from fusion_node.engine.f16r32 import product
from fusion_node.engine.numerics import NumericsClass, round_to
from fusion_node.errors import ConfigError
from fusion_node.slices import Dims, SliceBounds

_FP16_EXPONENT = 15
"""Rows are brought below 2^15 before they are rounded: the largest fp16 is just below 2^16."""

_MAX_SHIFT = 100
"""Of the exponents of float32, so that a power of two is finite for any row."""


def fusion_dims(config: PretrainedConfig) -> Dims:
    """Sizes of the layers of a model that fuses.

    Raises:
        ConfigError: this family's layers cannot be split among members, and the message lists those that can; or not
            with these settings.
    """
    families = [name for name, family in ARCHITECTURES.items() if family.fuses]
    if config.model_type not in families:
        raise ConfigError(
            f"a {config.model_type} model cannot be served by a fusion group; these can: {', '.join(families)}"
        )
    num_experts = next((n for name in ("num_experts", "num_local_experts") if (n := getattr(config, name, None))), 0)
    is_mixed = getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1
    if num_experts and is_mixed:
        raise ConfigError("only some layers of this model have experts: it cannot be served by a fusion group")
    heads: int = config.num_attention_heads
    channels: int = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return Dims(
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=config.num_key_value_heads or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        channels=channels if num_experts else config.intermediate_size,
        num_experts=num_experts,
        experts_per_row=config.num_experts_per_tok if num_experts else 0,
    )


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Where the outputs of queries, keys and values stand in the merged map of a layer: owner by owner, each head once.

    Attributes:
        heads: in order, each as its projection and its index: ``("q", 3)``.
        of_member: what each member is sent of the outputs: a slice, or their places when a head is sent to several.
    """

    heads: tuple[tuple[str, int], ...]
    of_member: tuple[slice | torch.Tensor, ...]

    @classmethod
    def of(cls, bounds: Sequence[SliceBounds], head_dim: int, device: torch.device) -> HeadRows:
        wanted = [
            [
                *(("q", head) for head in owner.heads),
                *(("k", head) for head in dict.fromkeys(owner.kv_heads)),
                *(("v", head) for head in dict.fromkeys(owner.kv_heads)),
            ]
            for owner in bounds
        ]
        heads = tuple(dict.fromkeys(itertools.chain(*wanted)))
        place = {head: index for index, head in enumerate(heads)}
        of_member: list[slice | torch.Tensor] = []
        for own in wanted:
            places = [place[head] for head in own]
            if places == list(range(places[0], places[0] + len(places))):
                of_member.append(slice(places[0] * head_dim, (places[-1] + 1) * head_dim))
            else:
                rows = [row for p in places for row in range(p * head_dim, (p + 1) * head_dim)]
                of_member.append(torch.tensor(rows, device=device))
        return cls(heads, tuple(of_member))


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts rows are handed to, from the highest score down, and how much each counts.

    Attributes:
        scale_T1: the norm's factor, which the choice did not need.
    """

    experts_Tk: torch.Tensor
    weights_Tk: torch.Tensor
    scale_T1: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rotary:
    """Position embeddings ``[1, T, H]`` of the rows of a batch."""

    cos_1TH: torch.Tensor
    sin_1TH: torch.Tensor


class SlicedExperts(torch.nn.Module):
    """The experts of a layer: of each the own columns of gate and up, and the own channels of down.

    Its names and flags are those by which fusion_node.engine.f16r32 knows experts of transformers.
    """

    is_transposed = False

    def __init__(self, dims: Dims, own: SliceBounds, act_fn: Any, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.act_fn = act_fn
        num_experts, num_channels = dims.num_experts, len(own.channels)
        self.gate_up_proj = _empty(num_experts, 2 * dims.channels, len(own.columns), dtype=dtype, device=device)
        self.down_proj = _empty(num_experts, dims.hidden, num_channels, dtype=dtype, device=device)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gated: torch.Tensor = self.act_fn(gate) * up
        return gated

    def gate_up(self, x_Td: torch.Tensor, experts_Tk: torch.Tensor) -> torch.Tensor:
        """Parts of the gates and ups of the chosen experts, ``[T, k, 2F]``."""
        num_rows, top_k = experts_Tk.shape
        out = torch.empty((num_rows * top_k, self.gate_up_proj.shape[1]), device=x_Td.device)
        for expert, places in self._hits(experts_Tk):
            out[places] = product(x_Td[places // top_k], self.gate_up_proj[expert].t())
        return out.view(num_rows, top_k, -1)

    def down(self, inner_TkC: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Parts of the outputs, ``[T, D]``, of all chosen experts together."""
        num_rows, top_k = routing.experts_Tk.shape
        inner_SC = inner_TkC.flatten(0, 1)
        out = torch.empty((num_rows * top_k, self.down_proj.shape[1]), device=inner_SC.device)
        for expert, places in self._hits(routing.experts_Tk):
            out[places] = product(inner_SC[places], self.down_proj[expert].t())
        return (out.view(num_rows, top_k, -1) * routing.weights_Tk.unsqueeze(-1)).sum(dim=1)

    def _hits(self, experts_Tk: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Each expert that is chosen, and where among the flattened choices."""
        chosen, order = torch.sort(experts_Tk.reshape(-1), stable=True)
        start = 0
        for expert, count in enumerate(torch.bincount(chosen, minlength=len(self.down_proj)).tolist()):
            if count:
                yield expert, order[start : start + count]
                start += count


class SlicedLayer(torch.nn.Module):
    """What member ``index`` holds and computes of one layer. Its parameters are uninitialised until they are read.

    Args:
        theirs: the family's own layer, on the meta device: says how it norms, rotates and attends.
        head_rows: of all layers alike.
    """

    def __init__(
        self,
        theirs: Any,
        *,
        dims: Dims,
        bounds: Sequence[SliceBounds],
        index: int,
        head_rows: HeadRows,
        numerics: NumericsClass,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.layer_idx: int = theirs.self_attn.layer_idx
        self.dims = dims
        self.own = own = bounds[index]
        self._bounds = tuple(bounds)
        self._numerics = numerics
        self._head_rows = head_rows
        num_columns, num_inputs = len(own.columns), len(own.heads) * dims.head_dim
        attention, mlp = theirs.self_attn, theirs.mlp
        self._eps: tuple[float, float] = (
            theirs.input_layernorm.variance_epsilon,
            theirs.post_attention_layernorm.variance_epsilon,
        )
        self._scaling: float = attention.scaling
        self._window = _window_of(attention)
        self._rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        plain = partial(_empty, dtype=numerics.dtype, device=device)
        gemm = partial(_linear, dtype=numerics.weight_dtype(device), device=device)
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.weight = plain(dims.head_dim)
        num_kv = len(dict.fromkeys(own.kv_heads))
        self.input_gamma = plain(num_columns)
        self.post_gamma = plain(num_columns)
        self.qkv = gemm(len(head_rows.heads) * dims.head_dim, num_columns)
        self.o = gemm(dims.hidden, num_inputs)
        has_bias = attention.q_proj.bias is not None
        self.qkv_bias = plain((len(own.heads) + 2 * num_kv) * dims.head_dim) if has_bias else None
        self.o_bias = plain(num_columns) if attention.o_proj.bias is not None else None
        # Which of the KV heads that came stands at which place of those that are kept.
        came = {head: place for place, head in enumerate(dict.fromkeys(own.kv_heads))}
        spread = [came[head] for head in own.kv_heads]
        self._spread = None if spread == list(range(num_kv)) else torch.tensor(spread, device=device)
        self._num_kv = num_kv

        has_mlp_bias = not dims.num_experts and mlp.gate_proj.bias is not None
        self.gate_up_bias = plain(2 * len(own.channels)) if has_mlp_bias else None
        self.down_bias = plain(num_columns) if has_mlp_bias else None
        if dims.num_experts:
            self.router = plain(dims.num_experts, num_columns)
            self.experts = SlicedExperts(
                dims, own, mlp.experts.act_fn, dtype=numerics.weight_dtype(device), device=device
            )
            self._norms_shares: bool = getattr(mlp.gate, "norm_topk_prob", True)
        else:
            self.gate_up = gemm(2 * dims.channels, num_columns)
            self.down = gemm(dims.hidden, len(own.channels))
            self._act_fn = mlp.act_fn

    def send_qkv(self, x_Td: torch.Tensor) -> list[torch.Tensor]:
        """Per member, its part of ``[q, k, v, sum of squares]``."""
        y_TR = self._mapped(self.qkv, x_Td * self.input_gamma)
        return _dealt(y_TR, self._head_rows.of_member, _squares(x_Td))

    def attend(self, sum_TW: torch.Tensor, rotary: Rotary, batch: PackedBatch) -> list[torch.Tensor]:
        """Sums of queries, keys and values become, per member, its part of the attention's outputs."""
        head_dim, num_rows = self.dims.head_dim, len(sum_TW)
        y = self._normed(sum_TW, self._eps[0])
        if self.qkv_bias is not None:
            y = y + self.qkv_bias
        q, k, v = (
            part.view(num_rows, -1, head_dim)
            for part in torch.split(y, [len(self.own.heads) * head_dim, *[self._num_kv * head_dim] * 2], dim=1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q_1NTH, k_1UTH, v_1UTH = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        q_1NTH, k_1UTH = self._rotate(q_1NTH, k_1UTH, rotary.cos_1TH, rotary.sin_1TH)
        if self._spread is not None:
            k_1UTH, v_1UTH = (t.index_select(1, self._spread) for t in (k_1UTH, v_1UTH))
        out_1TNH, _ = packed_attention(
            self, q_1NTH, k_1UTH, v_1UTH, None, scaling=self._scaling, batch=batch, sliding_window=self._window
        )
        return _dealt(self.o(out_1TNH.reshape(num_rows, -1)), self._columns)

    def add_attention(self, x_Td: torch.Tensor, sum_Td: torch.Tensor) -> torch.Tensor:
        """The residual after the attention."""
        return x_Td + (sum_Td if self.o_bias is None else sum_Td + self.o_bias)

    def send_scores(self, h_Td: torch.Tensor) -> list[torch.Tensor]:
        """The same for every member: parts of the experts' scores, and the sum of squares."""
        scores_TE = torch.mm(h_Td * self.post_gamma, self.router.t())
        return [torch.cat((scores_TE, _squares(h_Td)), dim=1)] * len(self._bounds)

    def route(self, sum_TW: torch.Tensor) -> Routing:
        """The experts of each row, equal on all members."""
        scale_T1, sums_TE = self._scale(sum_TW, self._eps[1]), sum_TW[:, :-1]
        # Not topk, which may take either of two equal ones.
        order = torch.sort(sums_TE, dim=1, descending=True, stable=True).indices
        experts_Tk = order[:, : self.dims.experts_per_row]
        weights_Tk = torch.softmax(sums_TE * scale_T1, dim=1).gather(1, experts_Tk)
        if self._norms_shares:
            weights_Tk = weights_Tk / weights_Tk.sum(dim=1, keepdim=True)
        return Routing(experts_Tk, weights_Tk, scale_T1)

    def send_gate_up(self, h_Td: torch.Tensor, routing: Routing | None) -> list[torch.Tensor]:
        """Per member, its part of ``[gate, up, sum of squares]``, or of the chosen experts' gates and ups."""
        x_Td = h_Td * self.post_gamma
        if routing is None:
            return _dealt(self._mapped(self.gate_up, x_Td), self._channels, _squares(h_Td))
        shift_T1 = self._shift(x_Td)
        if shift_T1 is not None:
            x_Td = torch.ldexp(x_Td, shift_T1)
        y_TkR = self.experts.gate_up(round_to(x_Td, self._numerics.gemm_dtype), routing.experts_Tk)
        if shift_T1 is not None:
            y_TkR = torch.ldexp(y_TkR, -shift_T1.unsqueeze(1))
        return [y_TkR[:, :, place].reshape(len(h_Td), -1) for place in self._channels]

    def send_down(self, sum_TW: torch.Tensor, routing: Routing | None) -> list[torch.Tensor]:
        """Sums of gates and ups become, per member, its part of the MLP's outputs."""
        if routing is not None:
            num_rows, top_k = routing.experts_Tk.shape
            gate_up = sum_TW.view(num_rows, top_k, -1) * routing.scale_T1.unsqueeze(1)
            inner_TkC = round_to(self.experts._apply_gate(gate_up), self._numerics.gemm_dtype)
            return _dealt(self.experts.down(inner_TkC, routing), self._columns)
        y = self._normed(sum_TW, self._eps[1])
        if self.gate_up_bias is not None:
            y = y + self.gate_up_bias
        gate, up = y.chunk(2, dim=1)
        return _dealt(self.down(self._act_fn(gate) * up), self._columns)

    def add_mlp(self, h_Td: torch.Tensor, sum_Td: torch.Tensor) -> torch.Tensor:
        """The residual after the layer."""
        return h_Td + (sum_Td if self.down_bias is None else sum_Td + self.down_bias)

    @property
    def _columns(self) -> list[slice]:
        return [slice(owner.columns.start, owner.columns.stop) for owner in self._bounds]

    @property
    def _channels(self) -> list[slice]:
        return [slice(2 * owner.channels.start, 2 * owner.channels.stop) for owner in self._bounds]

    def _mapped(self, linear: torch.nn.Module, x_Td: torch.Tensor) -> torch.Tensor:
        """A linear map of what is not normed yet."""
        shift_T1 = self._shift(x_Td)
        if shift_T1 is not None:
            x_Td = torch.ldexp(x_Td, shift_T1)
        y_TR: torch.Tensor = linear(x_Td)
        return y_TR if shift_T1 is None else torch.ldexp(y_TR, -shift_T1)

    def _shift(self, x_Td: torch.Tensor) -> torch.Tensor | None:
        """By which power of two each row is brought into fp16's range, if it is rounded at all."""
        if not self._numerics.rounds_gemm_inputs:
            return None
        exponent_T1 = torch.frexp(x_Td.abs().amax(dim=1, keepdim=True)).exponent
        return (_FP16_EXPONENT - exponent_T1).clamp_(-_MAX_SHIFT, _MAX_SHIFT)

    def _scale(self, sum_TW: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.rsqrt(sum_TW[:, -1:] / self.dims.hidden + eps)

    def _normed(self, sum_TW: torch.Tensor, eps: float) -> torch.Tensor:
        """Summed outputs of what was not normed, as if it had been."""
        return sum_TW[:, :-1] * self._scale(sum_TW, eps)


def _window_of(attention: Any) -> int | None:
    """As the family's own attention hands it on: its attribute, or else what its configuration says."""
    if SLIDING not in ARCHITECTURES[attention.config.model_type].features:
        return None
    of_config: int | None = getattr(attention.config, "sliding_window", None)
    return getattr(attention, "sliding_window", of_config)


def _squares(x_Td: torch.Tensor) -> torch.Tensor:
    return x_Td.square().sum(dim=1, keepdim=True)


def _dealt(
    y_TR: torch.Tensor, places: Sequence[slice | torch.Tensor], last_T1: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Each member's part of the outputs, contiguous, and one more value for each of them."""
    parts = [y_TR[:, p] if isinstance(p, slice) else y_TR.index_select(1, p) for p in places]
    if last_T1 is None:
        return [part.contiguous() for part in parts]
    return [torch.cat((part, last_T1), dim=1) for part in parts]


def _empty(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def _linear(num_outputs: int, num_inputs: int, *, dtype: torch.dtype, device: torch.device) -> torch.nn.Linear:
    # On the meta device, because the class would fill its weights with random numbers.
    linear = torch.nn.Linear(num_inputs, num_outputs, bias=False, device="meta")
    linear.weight = _empty(num_outputs, num_inputs, dtype=dtype, device=device)
    return linear
