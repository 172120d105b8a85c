"""Each numerics class against an independent implementation of docs/numerics.md in numpy, rounding by rounding.

The reference below computes one decoder layer in float64 between the places where the document says that a value is
rounded. A class is implemented when the engine agrees with it, and with no variant of it that leaves a rounding out or
adds one.

Shapes: T tokens, D hidden size, N query heads, K KV heads, H head dim, F feed-forward, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fusion_node.engine import f16r32
from fusion_node.engine.architectures import build_layers, load_config
from fusion_node.engine.boundary import Boundary
from fusion_node.engine.kv_cache import KVPool
from fusion_node.engine.numerics import numerics_class, quantize_rows, round_to
from fusion_node.engine.session_log_core import StepRows
from fusion_node.engine.stage import Stage, StepInput
from fusion_node.engine.tensor_codec import RowsNotFinite, decode_rows, encode_rows
from fusion_node.errors import ConfigError
from fusion_node.types import LayerRange
from tests.engine.tiny import TINY, TinyModel, tiny_model

CPU = torch.device("cpu")
F16R32 = numerics_class("f16r32")
LAYER = 3
NUM_SEQUENCES, NUM_TOKENS = 12, 4
"""Many short sequences: a rounding that fell the other way in a key is then felt by few tokens."""

Array = npt.NDArray[Any]
Round = Callable[[Array], Array]


def to_f32(a: Array) -> Array:
    return a.astype(np.float32).astype(np.float64)


def to_f16(a: Array) -> Array:
    return np.clip(to_f32(a), -65504, 65504).astype(np.float16).astype(np.float64)


def to_bf16(a: Array) -> Array:
    bits = a.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def to_kv8(a_TKH: Array) -> Array:
    """Each head of a position by itself."""
    scales = (np.abs(a_TKH).max(-1, keepdims=True).astype(np.float32) / np.float32(127)).astype(np.float32)
    quotients = a_TKH.astype(np.float32) / np.where(scales > 0, scales, np.float32(1))
    return (np.rint(quotients) * scales).astype(np.float64)


CLASSES: dict[str, dict[str, Round]] = {
    "fp32": {"else": to_f32, "gemm": to_f32, "attention": to_f32, "kv": to_f32},
    "f16r32": {"else": to_f32, "gemm": to_f16, "attention": to_f16, "kv": to_f16},
    "bf16": {"else": to_bf16, "gemm": to_bf16, "attention": to_bf16, "kv": to_bf16},
    "fp16": {"else": to_f16, "gemm": to_f16, "attention": to_f16, "kv": to_f16},
    "fp32+kv8": {"else": to_f32, "gemm": to_f32, "attention": to_f32, "kv": to_kv8},
    "f16r32+kv8": {"else": to_f32, "gemm": to_f16, "attention": to_f16, "kv": to_kv8},
    "bf16+kv8": {"else": to_bf16, "gemm": to_bf16, "attention": to_bf16, "kv": lambda a: to_bf16(to_kv8(a))},
}


@dataclass(frozen=True)
class Reference:
    """One layer of a llama-like decoder (biases, norms of queries and keys, experts: as the weights have them).

    Attributes:
        instead: place → rounding that replaces what the class says there.
    """

    numerics: str
    weights: Mapping[str, Array]
    config: Mapping[str, Any]
    instead: Mapping[str, Round]

    def at(self, kind: str, place: str, value: Array) -> Array:
        rounding: Round = self.instead.get(place, CLASSES[self.numerics][kind])
        return rounding(value)

    def op(self, place: str, value: Array) -> Array:
        """An operation that is no GEMM puts this out."""
        return self.at("else", place, value)

    def linear(self, name: str, x: Array, x_place: str) -> Array:
        w = self.at("gemm", f"{name} weight", self.weights[f"{name}.weight"])
        bias = self.op(f"{name} bias", self.weights.get(f"{name}.bias", np.zeros(len(w))))
        return self.op(f"{name} output", self.at("gemm", x_place, x) @ w.T + bias)

    def norm(self, name: str, x: Array) -> Array:
        scale = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        gain = self.op(f"{name} gain", self.weights[f"{name}.weight"])
        return self.op(f"{name} output", gain * self.op(f"{name} scaled", x * scale))

    def rotate(self, x_TNH: Array, positions: Array) -> Array:
        half = x_TNH.shape[-1] // 2
        theta = self.config["rope_parameters"]["rope_theta"]
        frequencies = 1 / theta ** (np.arange(half) / half)
        angles = to_f32(positions[:, None] * to_f32(frequencies))
        cos, sin = (self.op("rotary tables", np.tile(f(angles), 2))[:, None] for f in (np.cos, np.sin))
        turned = np.concatenate([-x_TNH[..., half:], x_TNH[..., :half]], axis=-1)
        products = self.op("rotary products", x_TNH * cos), self.op("rotary products", turned * sin)
        return self.op("rotary sum", products[0] + products[1])

    def attention(self, x_TD: Array) -> Array:
        num_tokens, positions = len(x_TD), np.arange(len(x_TD))
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        q, k, v = (
            self.linear(f"self_attn.{n}_proj", x_TD, "qkv input").reshape(num_tokens, count, -1)
            for n, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if "self_attn.q_norm.weight" in self.weights:
            q, k = self.norm("self_attn.q_norm", q), self.norm("self_attn.k_norm", k)
        q = self.at("attention", "query", self.rotate(q, positions))
        k, v = self.at("kv", "key", self.rotate(k, positions)), self.at("kv", "value", v)
        out = np.empty_like(q)
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, shared].T * q.shape[-1] ** -0.5
            scores = np.where(positions[None] <= positions[:, None], scores, -np.inf)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            weighted = self.instead.get("shares", to_f32)(shares) @ v[:, shared]
            out[:, head] = self.op("attention output", weighted / shares.sum(-1, keepdims=True))
        return self.linear("self_attn.o_proj", out.reshape(num_tokens, -1), "o input")

    def activated(self, gate: Array, up: Array) -> Array:
        return self.op("gating product", self.op("activation", gate / (1 + np.exp(-gate))) * up)

    def mlp(self, x_TD: Array) -> Array:
        if "mlp.experts.gate_up_proj" in self.weights:
            return self.experts(x_TD)
        gate, up = (self.linear(f"mlp.{n}_proj", x_TD, "gate and up input") for n in ("gate", "up"))
        return self.linear("mlp.down_proj", self.activated(gate, up), "down input")

    def experts(self, x_TD: Array) -> Array:
        """As in Mixtral: softmax over all experts, the best of them weighted by their share of the best's sum."""
        router = self.op("router weight", self.weights["mlp.gate.weight"])
        logits = self.op("router logits", self.op("router input", x_TD) @ router.T)
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        out = np.zeros_like(x_TD)
        for token, row in enumerate(shares):
            best = np.argsort(-row)[: self.config["num_experts_per_tok"]]
            for expert in best:
                out[token] += to_f32(row[expert] / row[best].sum()) * self.expert(expert, x_TD[token])
        return self.op("experts output", out)

    def expert(self, expert: int, x_D: Array) -> Array:
        up_FD, down_DF = (
            self.at("gemm", f"mlp.experts.{n} weight", self.weights[f"mlp.experts.{n}"][expert])
            for n in ("gate_up_proj", "down_proj")
        )
        gate, up = np.split(self.op("expert output", self.at("gemm", "expert input", x_D) @ up_FD.T), 2)
        inner = self.at("gemm", "expert down input", self.activated(gate, up))
        return self.op("expert output", inner @ down_DF.T)

    def layer(self, x_TD: Array) -> Array:
        x_TD = self.op("residual", x_TD + self.attention(self.norm("input_layernorm", x_TD)))
        return self.op("residual", x_TD + self.mlp(self.norm("post_attention_layernorm", x_TD)))


def make(kind: str) -> TinyModel:
    match kind:
        case "biases":
            model = tiny_model("llama", attention_bias=True, mlp_bias=True)
        case "norms of q and k":
            model = tiny_model("qwen3")
        case _:
            model = tiny_model("mixtral", sliding_window=None, as_in_module=True)
    with torch.no_grad():
        for name, parameter in model.whole.named_parameters():
            # Gains that a rounding changes, and biases that matter beside what they are added to.
            if "norm" in name:
                parameter.normal_(1, 0.1)
            elif name.endswith("bias"):
                parameter.normal_(0, 1)
    return model


KINDS = ("biases", "norms of q and k", "experts")


def weights_of(model: TinyModel) -> dict[str, Array]:
    prefix = f"model.layers.{LAYER}."
    state = model.whole.state_dict()
    return {n.removeprefix(prefix): t.double().numpy() for n, t in state.items() if n.startswith(prefix)}


def reference(model: TinyModel, numerics: str, instead: Mapping[str, Round] | None = None) -> Array:
    of_class = Reference(numerics, weights_of(model), model.config, instead or {})
    return np.concatenate([of_class.layer(rows_TD.double().numpy()) for rows_TD in rows_for(numerics)])


def rows_for(numerics: str) -> list[torch.Tensor]:
    rows = np.random.default_rng(5).normal(0, 1, (NUM_SEQUENCES, NUM_TOKENS, 48))
    return list(torch.from_numpy(CLASSES[numerics]["else"](rows)).to(numerics_class(numerics).dtype))


def load(model: TinyModel, numerics: str) -> Stage:
    return Stage.load(model, LayerRange(LAYER, LAYER + 1), numerics=numerics_class(numerics), device=CPU)


def run(stage: Stage, rows: list[torch.Tensor], pool: KVPool | None = None) -> Array:
    """All sequences in one packed call."""
    batch = [chain(r, 0, range(i * NUM_TOKENS, (i + 1) * NUM_TOKENS)) for i, r in enumerate(rows)]
    outs = stage.forward(batch, pool or stage.new_pool(NUM_SEQUENCES * NUM_TOKENS))
    return torch.cat(outs).double().numpy()


def chain(rows: torch.Tensor, first: int, run: range) -> StepInput:
    """A step of rows at the positions from ``first`` on, of a session whose slots are ``run``."""
    count = len(rows)
    step = StepRows(
        live_rows=tuple(range(count)),
        nodes=tuple(range(first + 1, first + count + 1)),
        positions=tuple(range(first, first + count)),
        first_slot=first,
        is_chain=True,
        visible=(),
        num_committed=0,
        move=None,
    )
    return StepInput(step, rows, (run[: first + count],))


def distance(ours: Array, theirs: Array, rows: list[torch.Tensor]) -> float:
    """The median over tokens of the difference, relative to what the layers added to the token's row.

    The median, because a sum in another order moves a value across the edge between two fp16 numbers now and then,
    and that token is off by what one rounding is worth. That is honest noise, and docs/numerics.md says how much.
    """
    added = np.linalg.norm(theirs - torch.cat(rows).double().numpy(), axis=1)
    return float(np.median(np.linalg.norm(ours - theirs, axis=1) / added))


# The definition leaves free whether the softmax's numerators are rounded; torch's CPU kernel does in 16 bits.
SHARES: dict[str, dict[str, Round]] = {
    "bf16": {"shares": to_bf16},
    "fp16": {"shares": to_f16},
    "bf16+kv8": {"shares": to_bf16},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numerics", CLASSES)
def test_engine_agrees_with_the_definition_to_float32_noise(numerics: str, kind: str) -> None:
    model, rows = make(kind), rows_for(numerics)
    definition = reference(model, numerics, SHARES.get(numerics))
    assert distance(run(load(model, numerics), rows), definition, rows) < 1e-6


LINEARS = tuple(f"self_attn.{n}_proj" for n in "qkvo") + tuple(f"mlp.{n}_proj" for n in ("gate", "up", "down"))
ROUNDED = {
    "biases": (*(f"{n} weight" for n in LINEARS), "qkv input", "query", "key", "value", "o input", "gate and up input",
               "down input"),
    "experts": ("mlp.experts.gate_up_proj weight", "mlp.experts.down_proj weight", "expert input",
                "expert down input"),
}  # fmt: skip
KEPT = {
    # Not the output of v_proj: nothing happens to it before it is rounded as a value.
    "biases": (*(f"{n} output" for n in LINEARS if "v_proj" not in n), *(f"{n} bias" for n in LINEARS),
               "input_layernorm scaled", "input_layernorm gain", "post_attention_layernorm gain", "rotary tables",
               "rotary products", "activation", "residual"),
    "norms of q and k": ("self_attn.q_norm gain", "self_attn.k_norm output"),
    "experts": ("router weight", "router input", "router logits", "expert output", "experts output"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "place", "rounding"),
    [(kind, place, to_f32) for kind, places in ROUNDED.items() for place in places]
    + [(kind, place, to_f16) for kind, places in KEPT.items() for place in places],
)
def test_f16r32_engine_rounds_in_every_place_of_the_definition_and_in_no_other(
    kind: str, place: str, rounding: Round
) -> None:
    model, rows = make(kind), rows_for("f16r32")
    variant = reference(model, "f16r32", {place: rounding})
    assert distance(run(load(model, "f16r32"), rows), variant, rows) > 1e-5


def test_a_class_is_told_from_its_neighbours_by_one_layer() -> None:
    model, rows = make("biases"), rows_for("f16r32")
    ours = run(load(model, "f16r32"), rows)
    for other in ("fp32", "bf16", "fp16", "f16r32+kv8"):
        theirs = Reference(other, weights_of(model), model.config, {})
        assert distance(ours, np.concatenate([theirs.layer(r.double().numpy()) for r in rows]), rows) > 1e-4


def test_keys_and_values_rest_in_fp16_rounded_to_nearest_even() -> None:
    model, rows = make("biases"), rows_for("f16r32")
    stage = load(model, "f16r32")
    pool = stage.new_pool(NUM_SEQUENCES * NUM_TOKENS)
    run(stage, rows, pool)
    keys_KSH, values_KSH = pool.read(0, slice(0, NUM_TOKENS), torch.float16)
    assert pool.dtype == torch.float16
    assert pool.bytes_per_slot == 2 * 2 * 2 * 12
    weights = Reference("f16r32", weights_of(model), model.config, {})
    normed = weights.norm("input_layernorm", rows[0].double().numpy())
    key, value = (
        weights.linear(f"self_attn.{n}_proj", normed, "qkv input").reshape(NUM_TOKENS, 2, 12) for n in ("k", "v")
    )
    expected = weights.rotate(key, np.arange(NUM_TOKENS)), value
    for ours_KSH, theirs_SKH in zip((keys_KSH, values_KSH), expected, strict=True):
        equal = ours_KSH.double().numpy() == to_f16(theirs_SKH).transpose(1, 0, 2)
        assert equal.mean() > 0.97  # the others were so near the middle that the order of a sum decided


def test_kv8_keeps_a_byte_per_value_and_a_scale_per_head_and_position() -> None:
    rows = torch.tensor([[[127.0, 0.5, 1.5, -2.5], [0.0, 0.0, 0.0, 0.0]], [[-1e-30, 0.0, 0.0, 1e-30], [3e38, 0, 0, 0]]])
    quantized, scales = quantize_rows(rows)
    assert quantized.tolist() == [[[127, 0, 2, -2], [0, 0, 0, 0]], [[-127, 0, 0, 127], [127, 0, 0, 0]]]
    assert scales[..., 0].tolist() == [[1.0, 0.0], [np.float32(1e-30) / 127, pytest.approx(3e38 / 127)]]
    stage = load(make("biases"), "fp32+kv8")
    assert stage.kv_bytes_per_position == 2 * 2 * 12 + 2 * 2 * 4
    pool, rows_KTH = stage.new_pool(8), torch.randn((2, 3, 12), generator=torch.Generator().manual_seed(2))
    for slots in (slice(2, 5), torch.tensor([7, 0, 3])):
        pool.write(0, slots, rows_KTH, -rows_KTH)
        keys_KSH, values_KSH = pool.read(0, slots, torch.float32)
        assert (keys_KSH == -values_KSH).all()
        assert (keys_KSH.double().numpy() == to_f32(to_kv8(rows_KTH.numpy()))).all()


def test_rows_travel_in_fp16_rounded_to_nearest_even() -> None:
    # Halfway between two neighbours, the even one: 1 + 2^-11 → 1, 1 + 3·2^-11 → 1 + 2^-9. Subnormals are kept.
    rows = torch.tensor([[1 + 2**-11, 1 + 3 * 2**-11, 3e-8, -6e-8, 65519.0]])
    meta, payload = encode_rows(rows, F16R32.wire_dtype)
    assert meta.dtype == "f16"
    expected = [1.0, 1 + 2**-9, 2.0**-24, -(2.0**-24), 65504.0]
    assert decode_rows(meta, payload).tolist() == [expected]
    assert bytes(payload) == rows.numpy().astype("<f2").tobytes()


def test_a_row_beyond_fp16_is_not_sent() -> None:
    """Saturating here would make an answer depend on where the layers are cut."""
    with pytest.raises(RowsNotFinite, match="larger than f16 can hold"):
        encode_rows(torch.tensor([[65520.0]]), F16R32.wire_dtype)


def test_boundary_rounds_the_embedding_and_both_inputs_of_the_head() -> None:
    for model in (tiny_model("llama"), tiny_model("mistral")):  # tied, and not
        boundary = Boundary.load(model, numerics=F16R32, device=CPU)
        state = {n: t.double().numpy() for n, t in model.whole.state_dict().items()}
        embedded = boundary.embed([5, 7, 130])
        assert embedded.dtype == torch.float32
        assert (embedded.double().numpy() == to_f16(state["model.embed_tokens.weight"])[[5, 7, 130]]).all()
        rows = np.random.default_rng(1).normal(0, 1, (9, 48))
        logits = boundary.logits(torch.from_numpy(to_f16(rows)).half())
        norm = Reference("f16r32", {"norm.weight": state["model.norm.weight"]}, model.config, {})
        normed = norm.norm("norm", to_f16(rows))
        expected = to_f16(normed) @ to_f16(state["lm_head.weight"]).T
        assert logits.dtype == np.float32
        error = np.abs(logits - expected).max(axis=1) / np.abs(expected).max(axis=1)
        assert np.median(error) < 1e-6
        unrounded = np.abs(normed @ to_f16(state["lm_head.weight"]).T - expected).max(axis=1)
        assert np.median(unrounded / np.abs(expected).max(axis=1)) > 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gemm_inputs_beyond_fp16_become_its_largest_number(dtype: torch.dtype) -> None:
    rounded = round_to(torch.tensor([1e5, -1e5, torch.inf, -torch.inf, 65536.0, torch.nan], dtype=dtype), torch.float16)
    assert rounded[:5].tolist() == [65504.0, -65504.0, 65504.0, -65504.0, 65504.0]
    assert rounded[5].isnan()


def test_a_linear_map_of_a_huge_row_is_finite_and_of_a_nan_is_nan() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    with torch.no_grad():
        model[0].weight.fill_(0.5)
        model[0].bias.fill_(1.0)
    f16r32.prepare(model, F16R32, CPU)
    model[0].weight = torch.nn.Parameter(torch.full((3, 2), 0.5))
    f16r32.apply(model, F16R32)
    assert model(torch.tensor([[1e6, 2.0]])).tolist() == [[65504 / 2 + 1 + 1] * 3]
    assert model(torch.tensor([[torch.nan, 2.0]])).isnan().all()


def test_huge_queries_keys_and_values_stay_finite() -> None:
    model = make("biases")
    with torch.no_grad():
        for name, parameter in model.whole.named_parameters():
            if f"layers.{LAYER}.self_attn" in name and name.endswith("proj.bias"):
                parameter.fill_(1e6)
    assert np.isfinite(run(load(model, "f16r32"), rows_for("f16r32"))).all()


def test_a_weight_beyond_fp16_is_refused() -> None:
    model = make("biases")
    with torch.no_grad():
        model.whole.get_parameter(f"model.layers.{LAYER}.mlp.up_proj.weight")[3, 5] = 7e4
    with pytest.raises(ConfigError, match=r"up_proj\.weight holds values beyond the range of f16r32"):
        load(model, "f16r32")


def test_weights_are_rounded_in_their_memory_slab_by_slab_but_never_in_a_mapped_file() -> None:
    stored = np.random.default_rng(4).normal(0, 1, (5, 4)).astype(np.float32)
    mapped, own = torch.frombuffer(bytearray(stored.tobytes()), dtype=torch.float32).view(5, 4), torch.tensor(stored)
    for weight in (mapped, own):
        values = f16r32.rounded_values(weight, torch.float16, slab_elements=8)
        assert values is not None
        assert (values.numpy() == to_f16(stored)).all()
        assert (values.data_ptr() == own.data_ptr()) == (weight is own)
    assert (mapped.numpy() == stored).all()
    assert f16r32.rounded_values(own * 1e5, torch.float16, slab_elements=8) is None


def test_a_matrix_of_unknown_use_is_refused() -> None:
    model = torch.nn.Module()
    model.mixer = torch.nn.Conv1d(4, 4, 3, device="meta")
    with pytest.raises(ConfigError, match=r"matrix 'mixer\.weight' that f16r32 says nothing about"):
        f16r32.prepare(model, F16R32, CPU)
    f16r32.prepare(model, numerics_class("fp32"), CPU)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_experts_of_every_layout_are_those_of_transformers_but_for_rounding(family: str) -> None:
    """Weights that lie either way, with biases and without, each family's own gate and router."""
    model = tiny_model(family)
    rows = [r[:, :48] for r in rows_for("fp32")]
    ours, exact = (run(load(model, numerics), rows) for numerics in ("f16r32", "fp32"))
    assert 1e-5 < distance(ours, exact, rows) < 1e-2


@pytest.mark.parametrize("family", TINY)
def test_every_architecture_is_served_in_f16r32_with_every_matrix_accounted_for(family: str) -> None:
    model = build_layers(load_config(tiny_model(family)), LayerRange(0, 7), dtype=torch.float32)
    f16r32.prepare(model, F16R32, torch.device("cuda"))
    left = {n for n, p in model.named_parameters() if p.dim() > 1 and p.dtype == torch.float32}
    kept = re.compile(r"\.(gate|router|indexer|shared_expert_gate)\.|_bias$|norm\.weight$")
    assert [name for name in left if not kept.search(name)] == []


def test_weights_of_a_gpu_are_declared_in_fp16_and_routers_in_float32() -> None:
    model = build_layers(load_config(make("experts")), LayerRange(0, 1), dtype=torch.float32)
    f16r32.prepare(model, F16R32, torch.device("cuda"))
    types = {name.removeprefix("layers.0."): p.dtype for name, p in model.named_parameters()}
    assert types == {
        **{f"self_attn.{n}_proj.weight": torch.float16 for n in "qkvo"},
        "mlp.experts.gate_up_proj": torch.float16,
        "mlp.experts.down_proj": torch.float16,
        "mlp.gate.weight": torch.float32,
        "input_layernorm.weight": torch.float32,
        "post_attention_layernorm.weight": torch.float32,
    }


def test_fp16_weights_and_their_values_in_float32_are_the_same_arithmetic() -> None:
    rng = torch.Generator().manual_seed(1)
    x, w = torch.randn((5, 64), generator=rng).half(), torch.randn((64, 32), generator=rng).half()
    assert torch.equal(f16r32.product(x, w), f16r32.product(x, w.float()))
    exact = x.double() @ w.double()
    assert (f16r32.product(x, w) - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize(
    ("numerics", "family", "noise"),
    [
        ("fp32", "llama", 1e-6),
        ("f16r32", "llama", 5e-4),
        ("f16r32", "mixtral", 5e-4),
        ("f16r32", "deepseek_v3", 5e-4),
        ("bf16", "llama", 2e-2),
    ],
)
def test_packed_mixed_batches_equal_single_sequences_within_noise(numerics: str, family: str, noise: float) -> None:
    stage = Stage.load(tiny_model(family), LayerRange(0, 3), numerics=numerics_class(numerics), device=CPU)
    rows = [r.to(stage.numerics.dtype) for r in torch.randn((3, 12, 48), generator=torch.Generator().manual_seed(2))]
    alone = [stage.forward([chain(r, 0, range(12))], stage.new_pool(12))[0] for r in rows]
    pool, runs = stage.new_pool(36), [range(24, 36), range(12), range(12, 24)]
    together: list[list[torch.Tensor]] = [[], [], []]
    # A prefill, then the decode of one beside the prefill of another, then all at once in unequal parts.
    for cuts in ([(0, 0, 7)], [(0, 7, 8), (1, 0, 9)], [(0, 8, 12), (1, 9, 10), (2, 0, 12)], [(1, 10, 12)]):
        outs = stage.forward([chain(rows[i][a:b], a, runs[i]) for i, a, b in cuts], pool)
        for (i, *_), out in zip(cuts, outs, strict=True):
            together[i].append(out)
    for ours, theirs, r in zip(together, alone, rows, strict=True):
        assert distance(torch.cat(ours).double().numpy(), theirs.double().numpy(), [r]) < noise
