"""From the model store into the slices of one member: tensors are read and checked whole, and only slices are kept.

A slice of columns lies all over a tensor, so that every block of it has to be read, and is checked like any other. What
is read is mapped (fusion_node.store.model): beside the slices there is never more than one tensor, and what the
verifier reads ahead. What the other members hold is gone before the next tensor comes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from fusion_node.engine.sliced_layer import HeadRows, SlicedLayer
from fusion_node.engine.weights import OnTensor, TensorSource, stored_pieces
from fusion_node.errors import LocalProtocolError
from fusion_node.slices import Dims, SliceBounds

_NAME = re.compile(r"^layers\.(\d+)\.(.+)$")


@dataclass(frozen=True, slots=True)
class _Cut:
    """Rows of a stored tensor that are kept, and where.

    Attributes:
        first_row: of the place that they take in ``parameter``, or in an expert's part of it.
        columns: of the stored tensor; None: it has none.
    """

    parameter: torch.Tensor
    first_row: int
    rows: range
    columns: range | None = None


def fill_slices(
    layers: Sequence[SlicedLayer],
    model: PreTrainedModel,
    source: TensorSource,
    *,
    dims: Dims,
    bounds: Sequence[SliceBounds],
    head_rows: HeadRows,
    on_tensor: OnTensor | None = None,
) -> None:
    """Gives every parameter of ``layers`` its values.

    Args:
        model: the same layers of the family's own class, on the meta device.
        on_tensor: called with the name of each tensor and the bytes that are kept of it.

    Raises:
        StoreCorrupted: a tensor is missing, has another shape, or does not match the manifest.
    """
    cuts = {layer.layer_idx: _cuts(layer, dims, bounds, head_rows) for layer in layers}
    for piece in stored_pieces(model, source):
        found = _NAME.match(piece.name)
        if found is None or found[2] not in cuts[int(found[1])]:
            raise LocalProtocolError(f"nothing is known of slices of {piece.name}")
        num_bytes = 0
        for cut in cuts[int(found[1])][found[2]]:
            target = cut.parameter.detach()
            if piece.expert is not None:
                target = target[piece.expert]
            start = max(cut.rows.start, piece.first_row)
            stop = min(cut.rows.stop, piece.first_row + len(piece.tensor))
            if start >= stop:
                continue
            kept = piece.tensor[start - piece.first_row : stop - piece.first_row]
            if cut.columns is not None:
                kept = kept[:, cut.columns.start : cut.columns.stop]
            place = target[cut.first_row + start - cut.rows.start :][: stop - start]
            place.copy_(kept)
            num_bytes += place.nbytes
            del kept
        if on_tensor is not None:
            on_tensor(piece.name, num_bytes)
        # Not kept until the next is there.
        del piece


def _cuts(layer: SlicedLayer, dims: Dims, bounds: Sequence[SliceBounds], head_rows: HeadRows) -> dict[str, list[_Cut]]:
    """By the name of a parameter within the family's own layer, what is kept of it."""
    own, head_dim = layer.own, dims.head_dim
    inputs = range(own.heads.start * head_dim, own.heads.stop * head_dim)
    every_column = range(dims.hidden)
    cuts: dict[str, list[_Cut]] = {
        "input_layernorm.weight": [_Cut(layer.input_gamma, 0, own.columns)],
        "post_attention_layernorm.weight": [_Cut(layer.post_gamma, 0, own.columns)],
        "self_attn.q_proj.weight": [],
        "self_attn.k_proj.weight": [],
        "self_attn.v_proj.weight": [],
        "self_attn.o_proj.weight": [_Cut(layer.o.weight, 0, every_column, inputs)],
    }
    for place, (kind, head) in enumerate(head_rows.heads):
        rows = range(head * head_dim, (head + 1) * head_dim)
        cuts[f"self_attn.{kind}_proj.weight"].append(_Cut(layer.qkv.weight, place * head_dim, rows, own.columns))
    if layer.qkv_bias is not None:
        kv_heads = list(dict.fromkeys(own.kv_heads))
        wanted = [("q", h) for h in own.heads] + [(kind, h) for kind in ("k", "v") for h in kv_heads]
        for place, (kind, head) in enumerate(wanted):
            rows = range(head * head_dim, (head + 1) * head_dim)
            cuts.setdefault(f"self_attn.{kind}_proj.bias", []).append(_Cut(layer.qkv_bias, place * head_dim, rows))
    if layer.o_bias is not None:
        cuts["self_attn.o_proj.bias"] = [_Cut(layer.o_bias, 0, own.columns)]
    for name in ("q_norm", "k_norm"):
        norm = getattr(layer, name)
        if norm is not None:
            cuts[f"self_attn.{name}.weight"] = [_Cut(norm.weight, 0, range(len(norm.weight)))]
    if dims.num_experts:
        gates = _both(layer.experts.gate_up_proj, [b.channels for b in bounds], dims.channels, own.columns)
        cuts["mlp.gate.weight"] = [_Cut(layer.router, 0, range(dims.num_experts), own.columns)]
        cuts["mlp.experts.gate_up_proj"] = [cut for of_kind in gates for cut in of_kind]
        cuts["mlp.experts.down_proj"] = [_Cut(layer.experts.down_proj, 0, every_column, own.channels)]
        return cuts
    gate, up = _both(layer.gate_up.weight, [b.channels for b in bounds], 0, own.columns)
    cuts["mlp.gate_proj.weight"], cuts["mlp.up_proj.weight"] = gate, up
    cuts["mlp.down_proj.weight"] = [_Cut(layer.down.weight, 0, every_column, own.channels)]
    if layer.gate_up_bias is not None and layer.down_bias is not None:
        cuts["mlp.gate_proj.bias"] = [_Cut(layer.gate_up_bias, 0, own.channels)]
        cuts["mlp.up_proj.bias"] = [_Cut(layer.gate_up_bias, len(own.channels), own.channels)]
        cuts["mlp.down_proj.bias"] = [_Cut(layer.down_bias, 0, own.columns)]
    return cuts


def _both(
    parameter: torch.Tensor, channels: Sequence[range], first_up: int, columns: range
) -> tuple[list[_Cut], list[_Cut]]:
    """Gates and ups, which stand owner by owner, each owner's gates before its ups.

    Args:
        first_up: the row of the first up; 0 where the ups are a tensor of their own.
    """
    gate = [_Cut(parameter, 2 * c.start, c, columns) for c in channels]
    up = [
        _Cut(parameter, 2 * c.start + len(c), range(first_up + c.start, first_up + c.stop), columns) for c in channels
    ]
    return gate, up
