"""How far two honest nodes of one numerics class are apart, and how far one that serves something else is from both.

Layers 10 to 20 of the built-in model, on rows that the layers before them made of the texts below. Every arm computes
the same committed rows, so nothing accumulates across stages. The distance of a token is the whitened relative error

    eps = |D^-1 (h_arm - h_auditor)| / |D^-1 (h_auditor - h_in)|,   D = rms over all tokens of h_auditor - h_in

where the auditor is the engine, in the class that was promised, on all tokens of a text at once.

Shapes: T tokens of a text, D hidden size, K KV heads, H head dim, P slots of a pool.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.overrides import TorchFunctionMode

from benchmarks.report import Check, main
from fusion_node.client.tokenizer import Tokenizer
from fusion_node.engine.boundary import Boundary
from fusion_node.engine.kv_cache import KVPool
from fusion_node.engine.numerics import KV8_SUFFIX, NUMERICS, NumericsClass, numerics_class
from fusion_node.engine.session_log_core import StepRows
from fusion_node.engine.stage import Stage, StepInput
from fusion_node.engine.tensor_codec import decode_rows, encode_rows
from fusion_node.store import ModelStore, StoredModel
from fusion_node.types import LayerRange

LAYERS = LayerRange(10, 20)
MODEL = "SmolLM2-135M-Instruct"
CPU = torch.device("cpu")

MIN_INT8_OVER_HONEST = 20.0
"""What f16r32 is there for: its honest noise that far below the error of int8 weights (docs/numerics.md)."""

TEXTS = (
    "The lighthouse keeper had counted ships for thirty years. On calm nights he wrote their names in a ledger, and on "
    "stormy ones he only wrote the hour, because names were hard to read through rain. When the lamp was automated he "
    "kept the ledger going from memory, and the fishermen said that it had become more accurate.",
    "Photosynthesis takes place in two stages. In the light reactions, water is split and oxygen is released, while "
    "energy is stored in ATP and NADPH. In the Calvin cycle that energy is used to fix carbon dioxide into sugars. The "
    "first stage needs light; the second needs only its products, which is why it was once called the dark reaction.",
    "def merge(left, right):\n    result = []\n    i = j = 0\n    while i < len(left) and j < len(right):\n        if "
    "left[i] <= right[j]:\n            result.append(left[i])\n            i += 1\n        else:\n            "
    "result.append(right[j])\n            j += 1\n    return result + left[i:] + right[j:]\n",
    "Question: A train leaves at 9:40 and arrives at 13:05. It stops twice for ten minutes. How long does it move? "
    "Answer: From 9:40 to 13:05 there are 3 hours and 25 minutes, which is 205 minutes. The two stops take 20 minutes "
    "together, so the train moves for 185 minutes, or 3 hours and 5 minutes.",
    "Preheat the oven to 220 degrees. Mix the flour with the salt and rub in the butter until it looks like sand. Add "
    "just enough cold water to bring it together, wrap it, and let it rest for half an hour. Roll it out on a floured "
    "board, line the tin, prick the base, and bake it blind for fifteen minutes before you add the filling.",
    "The committee met on Tuesday to discuss the proposed changes to the parking regulations. Three members were in "
    "favour, two against, and one wanted to know why the matter had not been settled in March. The chair explained "
    "that it had, but that nobody had written it down.",
)

Array = npt.NDArray[np.float64]


def run(quick: bool) -> tuple[list[Check], dict[str, Any]]:
    """Measures all arms; see the head of this file."""
    torch.set_num_threads(2)
    model = ModelStore().find(MODEL)
    texts = TEXTS[:2] if quick else TEXTS
    names = ("f16r32", "bf16") if quick else ("f16r32", "bf16", "fp16", "fp32")
    classes = {name: _measure(model, texts, numerics_class(name)) for name in names}
    _print(classes)
    arms = classes["f16r32"]
    honest = np.concatenate([eps for name, eps in arms.items() if name.startswith("honest")])
    int8 = arms["int8 weights, per channel"]
    in_bf16 = classes["bf16"]
    checks = [
        Check("int8-over-honest", "f16r32: int8 weights / worst honest arm, medians",
              float(np.median(int8)) / _worst_median(arms), "x", MIN_INT8_OVER_HONEST, ">="),
        Check("int8-separated", "f16r32: nearest token of int8 weights / farthest honest token",
              float(int8.min() / honest.max()), "x", 1.0, ">="),
        Check("one-int8-layer", "f16r32: int8 in one of ten layers / worst honest arm, medians",
              float(np.median(arms["int8 weights, one layer of ten"])) / _worst_median(arms), "x", 4.0, ">="),
        Check("int8-over-honest-bf16", "bf16, for comparison: int8 weights / worst honest arm, medians",
              float(np.median(in_bf16["int8 weights, per channel"])) / _worst_median(in_bf16), "x", 1.0, ">="),
    ]  # fmt: skip
    data = {name: {arm: _summary(eps) for arm, eps in arms.items()} for name, arms in classes.items()}
    return checks, data


def _measure(model: StoredModel, texts: Sequence[str], numerics: NumericsClass) -> dict[str, Array]:
    """Distances of all tokens by arm."""
    inputs = _committed_rows(model, texts, numerics)
    stage = Stage.load(model, LAYERS, numerics=numerics, device=CPU)
    auditor = prefilled(stage, inputs)

    def distance(outputs: Sequence[torch.Tensor]) -> Array:
        return _whitened(outputs, auditor, inputs)

    arms = {
        "honest, sums in 4 parts": distance(prefilled(stage, inputs, mode=_SumsInParts(4))),
        "honest, token by token": distance([_decoded(stage, rows) for rows in inputs]),
        "honest, softmax shares in 16 bits": distance(prefilled(stage, inputs, mode=_RoundedShares(numerics))),
        "int8 KV, per head and token": distance(prefilled(stage, inputs, pool=_Int8Pool)),
        "fp8 KV": distance(prefilled(stage, inputs, pool=_Fp8Pool)),
    }
    if numerics.dtype == torch.float32:
        arms["honest, float64 between roundings"] = distance(prefilled(_load_wide(model, numerics), inputs))
    for other in NUMERICS:
        if other != numerics.name and not other.endswith(KV8_SUFFIX):
            computed = Stage.load(model, LAYERS, numerics=numerics_class(other), device=CPU)
            arms[f"{other} instead"] = distance(prefilled(computed, inputs))
    for name, change in _CHEATS.items():
        cheat = Stage.load(_Changed(model, change), LAYERS, numerics=numerics, device=CPU)
        arms[name] = distance(prefilled(cheat, inputs))
    return arms


def _load_wide(model: StoredModel, numerics: NumericsClass) -> Stage:
    """What the class rounds is rounded, all else is float64: as near to the definition as one can be."""
    gemm, query, kv = (
        torch.float64 if t in (None, torch.float32) else t
        for t in (numerics.gemm_dtype, numerics.attention_input_dtype, numerics.kv_dtype)
    )
    wide = NumericsClass(numerics.name, torch.float64, gemm, query, kv, numerics.wire_dtype)
    return Stage.load(model, LAYERS, numerics=wide, device=CPU)


def _committed_rows(model: StoredModel, texts: Sequence[str], numerics: NumericsClass) -> list[torch.Tensor]:
    """What the layers in front hand over, in the class and through its wire."""
    boundary, tokenizer = Boundary.load(model, numerics=numerics, device=CPU), Tokenizer(model.path)
    front = Stage.load(model, LayerRange(0, LAYERS.start), numerics=numerics, device=CPU)
    embedded = [boundary.embed(tokenizer.encode(text)) for text in texts]
    sent = [encode_rows(rows_TD, numerics.wire_dtype) for rows_TD in prefilled(front, embedded)]
    return [decode_rows(meta, payload) for meta, payload in sent]


def prefilled(
    stage: Stage,
    inputs: Sequence[torch.Tensor],
    *,
    mode: AbstractContextManager[Any] | None = None,
    pool: type[KVPool] = KVPool,
) -> list[torch.Tensor]:
    outputs = []
    with mode or nullcontext():
        for rows_TD in inputs:
            kv = pool(stage.kv_layouts, len(rows_TD), dtype=stage.numerics.kv_dtype, device=CPU)
            outputs += stage.forward([_step(rows_TD, 0)], kv)
    return outputs


def _decoded(stage: Stage, rows_TD: torch.Tensor) -> torch.Tensor:
    pool = stage.new_pool(len(rows_TD))
    return torch.cat([stage.forward([_step(rows_TD[i : i + 1], i)], pool)[0] for i in range(len(rows_TD))])


def _step(rows_TD: torch.Tensor, first: int) -> StepInput:
    positions = tuple(range(first, first + len(rows_TD)))
    step = StepRows(
        live_rows=tuple(range(len(rows_TD))), nodes=tuple(p + 1 for p in positions), positions=positions,
        first_slot=first, is_chain=True, visible=(), num_committed=0, move=None,
    )  # fmt: skip
    return StepInput(step, rows_TD, (range(first + len(rows_TD)),))


def _whitened(
    outputs: Sequence[torch.Tensor], auditor: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Array:
    arm, right, start = (torch.cat(list(t)).double().numpy() for t in (outputs, auditor, inputs))
    scale_D = np.sqrt(((right - start) ** 2).mean(axis=0))
    error, added = (np.linalg.norm(t / scale_D, axis=1) for t in (arm - right, right - start))
    eps: Array = error / added
    return eps


class _SumsInParts(TorchFunctionMode):
    """Every product of matrices as a sum of products of parts, as a kernel with split-K would take it."""

    def __init__(self, num_parts: int) -> None:
        super().__init__()
        self._num_parts = num_parts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            x, w, *rest = args
            bias = rest[0] if rest else kwargs.get("bias")
            y = self._summed(x, w.t())
            return y if bias is None else y + bias
        if func in (torch.mm, torch.bmm, torch.matmul):
            return self._summed(*args)
        return func(*args, **kwargs)

    def _summed(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        wide = torch.float32 if a.dtype.itemsize < 4 else a.dtype
        parts = zip(a.to(wide).chunk(self._num_parts, -1), b.to(wide).chunk(self._num_parts, -2), strict=True)
        total: Any = sum(part_a @ part_b for part_a, part_b in parts)
        return total.to(a.dtype)  # type: ignore[no-any-return]


class _RoundedShares(TorchFunctionMode):
    """Attention whose softmax is rounded to 16 bits before it meets the values, as flash attention's is on a GPU."""

    def __init__(self, numerics: NumericsClass) -> None:
        super().__init__()
        self._dtype = numerics.kv_dtype if numerics.kv_dtype.itemsize == 2 else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, keys, values = (t.float() for t in args[:3])
        repeats = query.shape[1] // keys.shape[1]
        keys, values = (t.repeat_interleave(repeats, dim=1) for t in (keys, values))
        scores = query @ keys.transpose(-2, -1) * kwargs["scale"]
        if kwargs.get("is_causal"):
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        elif kwargs.get("attn_mask") is not None:
            scores = scores + kwargs["attn_mask"]
        shares = (scores - scores.amax(-1, keepdim=True)).exp()
        rounded = shares if self._dtype is None else shares.to(self._dtype).float()
        return (rounded @ values / shares.sum(-1, keepdim=True)).to(args[0].dtype)


class _Int8Pool(KVPool):
    """Keys and values with eight bits per number and one scale per head and token."""

    def write(self, layer: int, slots: slice | torch.Tensor, keys_KTH: torch.Tensor, values_KTH: torch.Tensor) -> None:
        super().write(layer, slots, _int8(keys_KTH.float()), _int8(values_KTH.float()))


class _Fp8Pool(KVPool):
    """Keys and values in fp8 (e4m3), unscaled."""

    def write(self, layer: int, slots: slice | torch.Tensor, keys_KTH: torch.Tensor, values_KTH: torch.Tensor) -> None:
        as_fp8 = (t.float().clamp(-448, 448).to(torch.float8_e4m3fn).float() for t in (keys_KTH, values_KTH))
        super().write(layer, slots, *as_fp8)


def _int8(x: torch.Tensor) -> torch.Tensor:
    """Rounded to 255 levels per vector of the last dimension, symmetric."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (x / scale).round().clamp(-127, 127) * scale


def _int8_grouped(x: torch.Tensor) -> torch.Tensor:
    return _int8(x.unflatten(-1, (-1, 64))).flatten(-2)


Change = Callable[[str, torch.Tensor], torch.Tensor]


def _everywhere(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda name, weight: change(weight) if "proj" in name else weight


def _in_one(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda name, weight: change(weight) if part in name and "proj" in name else weight


_CHEATS: dict[str, Change] = {
    "int8 weights, per channel": _everywhere(_int8),
    "int8 weights, groups of 64": _everywhere(_int8_grouped),
    "int8 weights, one layer of ten": _in_one(".layers.15.", _int8),
    "int8 weights, one matrix of seventy": _in_one(".layers.15.mlp.down_", _int8),
}


@dataclass(frozen=True)
class _Changed:
    """A stored model whose weights are changed on the way to the engine: what a node could serve in its place."""

    model: StoredModel
    change: Change

    @property
    def path(self) -> Path:
        return self.model.path

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def config(self) -> dict[str, Any]:
        return self.model.config

    @property
    def tensor_names(self) -> Collection[str]:
        return self.model.tensor_names

    def open_tensors(self, names: Iterable[str]) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
        for name, dtype, shape, data in self.model.open_tensors(names):
            stored = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[dtype]
            weight = torch.frombuffer(data, dtype=stored).view(shape).float()
            changed = self.change(name, weight).contiguous()
            yield name, "F32", shape, changed.view(torch.uint8).numpy().reshape(-1).data


def _worst_median(arms: Mapping[str, Array]) -> float:
    return max(float(np.median(eps)) for name, eps in arms.items() if name.startswith("honest"))


def _summary(eps: Array) -> dict[str, float]:
    values = {"min": eps.min(), "median": np.median(eps), "p99": np.quantile(eps, 0.99), "max": eps.max()}
    return {name: float(f"{value:.3g}") for name, value in values.items()}


def _print(classes: Mapping[str, Mapping[str, Array]]) -> None:
    for name, arms in classes.items():
        print(f"\n{name}{'min':>46}{'median':>10}{'max':>10}   of {len(next(iter(arms.values())))} tokens")
        for arm, eps in arms.items():
            print(f"  {arm:38}{eps.min():>10.1e}{np.median(eps):>10.1e}{eps.max():>10.1e}")


if __name__ == "__main__":
    sys.exit(
        main(
            "numerics",
            run,
            description="Honest noise of every numerics class against what a node could serve in its place; 15 min.",
        )
    )
