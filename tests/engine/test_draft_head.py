"""Draft heads: published checkpoints in every layout, and their trees against a head that is run node by node."""

from __future__ import annotations

import json
import math
import os
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from fusion_node.engine import draft_head
from fusion_node.engine.boundary import Boundary
from fusion_node.engine.draft_head import DraftHead
from fusion_node.engine.draft_head_kinds import EagleHead
from fusion_node.engine.drafts import Verified
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.trained_head import HeadConfig, TrainedHead
from fusion_node.errors import ConfigError
from tests.engine.tiny import tiny_model

Tensors = dict[str, torch.Tensor]

SIZE, VOCABULARY, LAYERS, DRAFT_VOCABULARY = 48, 131, 7, 40
TAPS = (2, 3, 4)
INNER, HEADS, KV_HEADS, DIM = 64, 4, 2, 12
SETTINGS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": SIZE, "intermediate_size": INNER,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": 1, "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 256, "rope_theta": 10_000.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def boundary() -> Boundary:
    tiny = tiny_model("llama", tie_word_embeddings=False)
    return Boundary.load(tiny, numerics=numerics_class("fp32"), device=torch.device("cpu"))


def layer_tensors(name: str, width: int, seed: int) -> Tensors:
    torch.manual_seed(seed)
    shapes = {
        "self_attn.q_proj.weight": (HEADS * DIM, width), "self_attn.k_proj.weight": (KV_HEADS * DIM, width),
        "self_attn.v_proj.weight": (KV_HEADS * DIM, width), "self_attn.o_proj.weight": (SIZE, HEADS * DIM),
        "mlp.gate_proj.weight": (INNER, SIZE), "mlp.up_proj.weight": (INNER, SIZE),
        "mlp.down_proj.weight": (SIZE, INNER), "post_attention_layernorm.weight": (SIZE,),
    }  # fmt: skip
    return {f"{name}.{key}": torch.randn(shape) * 0.12 + (len(shape) == 1) for key, shape in shapes.items()}


def eagle1(seed: int = 0, *, num_layers: int = 1) -> Tensors:
    """As SafeAILab's cnets1.py saves it: the embedding comes along, the first layer has no input norm."""
    tensors = {"embed_tokens.weight": torch.randn(VOCABULARY, SIZE), "fc.bias": torch.randn(SIZE) * 0.1}
    for layer in range(num_layers):
        tensors |= layer_tensors(f"layers.{layer}", SIZE, seed + layer)
        if layer:
            tensors[f"layers.{layer}.input_layernorm.weight"] = torch.rand(SIZE) + 0.5
    return tensors | {"fc.weight": torch.randn(SIZE, 2 * SIZE) * 0.1}


def eagle3(seed: int = 0, *, layer: str = "midlayer", num_taps: int = 3) -> Tensors:
    """As SafeAILab's cnets.py saves it (``midlayer``); vLLM and speculators say ``layers.0``."""
    tensors = layer_tensors(layer, 2 * SIZE, seed)
    ids = torch.randperm(VOCABULARY)[:DRAFT_VOCABULARY].sort().values
    known = torch.zeros(VOCABULARY, dtype=torch.bool)
    known[ids] = True
    return tensors | {
        f"{layer}.hidden_norm.weight": torch.rand(SIZE) + 0.5,
        f"{layer}.input_layernorm.weight": torch.rand(SIZE) + 0.5,
        "norm.weight": torch.rand(SIZE) + 0.5,
        "fc.weight": torch.randn(SIZE, num_taps * SIZE) * 0.1,
        "lm_head.weight": torch.randn(DRAFT_VOCABULARY, SIZE),
        "d2t": ids - torch.arange(DRAFT_VOCABULARY),
        "t2d": known,
    }


EAGLE3_SETTINGS = SETTINGS | {"draft_vocab_size": DRAFT_VOCABULARY, "architectures": ["LlamaForCausalLMEagle3"]}


def write(folder: Path, settings: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def load(folder: Path, boundary: Boundary, **changes: Any) -> DraftHead:
    sizes = {"hidden_size": SIZE, "vocabulary": VOCABULARY, "num_layers": LAYERS} | changes
    return DraftHead.load(folder, boundary, **sizes)


class Reference:
    """A head run node by node: no batch, no pool and no mask, keys and values in lists.

    Written from the papers' own code: rotary positions count pairs of row and token, the first pair is at 0.
    """

    def __init__(self, tensors: Tensors, boundary: Boundary, *, norms_residual: bool = False) -> None:
        self.w = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        self.boundary = boundary
        self.is_eagle3 = "norm.weight" in tensors
        self.norms_residual = norms_residual
        self.num_layers = 1 + max(int(name.split(".")[1]) for name in self.w if name.startswith("layers."))
        self.ids = self.w["d2t"] + torch.arange(DRAFT_VOCABULARY) if self.is_eagle3 else torch.arange(VOCABULARY)

    def norm(self, name: str, x_D: torch.Tensor) -> torch.Tensor:
        return x_D * torch.rsqrt(x_D.square().mean() + 1e-5) * self.w[f"{name}.weight"]

    def rotated(self, x_NH: torch.Tensor, position: int) -> torch.Tensor:
        angles = position * 10_000.0 ** (-torch.arange(0, DIM, 2) / DIM)
        cos, sin = angles.cos().repeat(2), angles.sin().repeat(2)
        half = torch.cat((-x_NH[:, DIM // 2 :], x_NH[:, : DIM // 2]), dim=1)
        return x_NH * cos + half * sin

    def hidden(self, rows_D: torch.Tensor, taps_LD: torch.Tensor) -> torch.Tensor:
        return self.w["fc.weight"] @ taps_LD.flatten() if self.is_eagle3 else self.boundary.norm(rows_D[None])[0]

    def run(
        self, hidden_D: torch.Tensor, token: int, position: int, seen: list[list[tuple[torch.Tensor, torch.Tensor]]]
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """The output, and per layer its own key and value."""
        w, embedded_D = self.w, self.boundary.embed([token])[0]
        own = []
        x_D = hidden_D if self.is_eagle3 else w["fc.weight"] @ torch.cat((embedded_D, hidden_D)) + w["fc.bias"]
        for layer in range(self.num_layers):
            name = f"layers.{layer}"
            if layer == 0 and self.is_eagle3:
                normed_D = self.norm(f"{name}.hidden_norm", x_D)
                into = torch.cat((self.norm(f"{name}.input_layernorm", embedded_D), normed_D))
                x_D = normed_D if self.norms_residual else x_D
            else:
                into = x_D if layer == 0 else self.norm(f"{name}.input_layernorm", x_D)
            query, key, value = ((w[f"{name}.self_attn.{kind}_proj.weight"] @ into).view(-1, DIM) for kind in "qkv")
            query, key = self.rotated(query, position), self.rotated(key, position)
            own.append((key, value))
            keys, values = (torch.stack([entry[layer][i] for entry in [*seen, own]]) for i in (0, 1))
            heads = []
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                shares = (keys[:, group] @ query[head] / DIM**0.5).softmax(dim=0)
                heads.append(shares @ values[:, group])
            x_D = x_D + w[f"{name}.self_attn.o_proj.weight"] @ torch.cat(heads)
            normed_D = self.norm(f"{name}.post_attention_layernorm", x_D)
            gate, up, down = (w[f"{name}.mlp.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
            x_D = x_D + down @ (F.silu(gate @ normed_D) * (up @ normed_D))
        return x_D, own

    def shares(self, out_D: torch.Tensor) -> dict[int, float]:
        if self.is_eagle3:
            logits = self.w["lm_head.weight"] @ self.norm("norm", out_D)
        else:
            logits = self.boundary.head(out_D[None])[0]
        return dict(zip(self.ids.tolist(), logits.softmax(dim=0).tolist(), strict=True))


class ReferenceTree:
    """What a drafter over it must say: true pairs replace guessed ones, nodes stay as they were computed."""

    def __init__(self, reference: Reference, prompt: Sequence[int]) -> None:
        self.reference = reference
        self.text = list(prompt)
        self.context: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        self.root: torch.Tensor | None = None
        self.nodes: dict[tuple[int, ...], tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]] = {}

    def extend(self, token: int, rows_D: torch.Tensor, taps_LD: torch.Tensor) -> None:
        hidden_D = self.reference.hidden(rows_D, taps_LD)
        self.root, own = self.reference.run(hidden_D, token, len(self.text) - 1, self.context)
        self.context.append(own)
        self.text.append(token)
        self.nodes = {path[1:]: node for path, node in self.nodes.items() if path[0] == token and len(path) > 1}

    def shares(self, path: tuple[int, ...]) -> dict[int, float]:
        assert self.root is not None
        out_D = self.root
        for depth in range(1, len(path) + 1):
            if path[:depth] not in self.nodes:
                above = [self.nodes[path[:d]][1] for d in range(1, depth)]
                position = len(self.text) - 2 + depth
                self.nodes[path[:depth]] = self.reference.run(out_D, path[depth - 1], position, [*self.context, *above])
            out_D = self.nodes[path[:depth]][0]
        return self.reference.shares(out_D)


LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[], Tensors]]] = {
    "eagle-1": (SETTINGS, eagle1),
    "eagle-1 of two layers": (SETTINGS | {"num_hidden_layers": 2}, lambda: eagle1(num_layers=2)),
    "eagle-2 of vllm": (
        SETTINGS | {"architectures": ["EagleLlamaForCausalLM"], "model_type": "eagle"},
        lambda: {f"model.{name}" if not name.startswith("fc") else name: t for name, t in eagle1(3).items()},
    ),
    "eagle-3": (EAGLE3_SETTINGS, eagle3),
    "eagle-3 of sglang": (
        EAGLE3_SETTINGS
        | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True}},
        lambda: eagle3(1),
    ),
    "eagle-3 of speculators": (
        {
            "speculators_model_type": "eagle3",
            "draft_vocab_size": DRAFT_VOCABULARY,
            "norm_before_residual": True,
            "target_hidden_size": None,
            "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
            "transformer_layer_config": SETTINGS,
        },
        lambda: eagle3(2, layer="layers.0"),
    ),
}


def verified(tokens: Sequence[int], rng: torch.Generator) -> Verified:
    rows, taps = torch.randn(len(tokens), SIZE, generator=rng), torch.randn(len(tokens), 3, SIZE, generator=rng)
    return Verified(tokens, rows_TD=rows.numpy(), taps_TLD=taps.numpy(), tap_layers=TAPS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tree_of_a_published_head_is_as_if_run_node_by_node(layout: str, boundary: Boundary, tmp_path: Path) -> None:
    settings, make = LAYOUTS[layout]
    torch.manual_seed(5)
    tensors = make()
    head = load(write(tmp_path, settings, tensors), boundary)
    short = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    reference = Reference(short, boundary, norms_residual=settings.get("norm_before_residual", False))
    assert head.tap_layers == (TAPS if reference.is_eagle3 else ())
    drafter = head.drafter(200)
    prompt = [3, 1, 4, 1, 5]
    drafter.begin(prompt)
    tree = ReferenceTree(reference, prompt)
    rng, torch_rng = random.Random(7), torch.Generator().manual_seed(7)
    assert drafter.propose([(), (1,)], 4) == [[], []]
    num_survivors = 0
    for _ in range(14):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
        seen = verified(tokens, torch_rng)
        assert seen.rows_TD is not None
        assert seen.taps_TLD is not None
        drafter.extend(seen)
        for index, token in enumerate(tokens):
            tree.extend(token, torch.from_numpy(seen.rows_TD[index]), torch.from_numpy(seen.taps_TLD[index]))
        num_survivors += len(tree.nodes)
        paths = [tuple(rng.randrange(3) for _ in range(rng.randrange(5))) for _ in range(8)]
        for path, found in zip(paths, drafter.propose(paths, 8), strict=True):
            shares = tree.shares(path)
            assert len(found) == 8
            assert max(abs(share - shares[token]) for token, share in found) < 1e-5
            assert sum(share for _, share in found) > sum(sorted(shares.values())[-8:]) - 1e-4
            assert len({token for token, _ in found}) == 8
    assert num_survivors > 10


def test_tree_of_an_own_head_is_as_its_training_unrolls_chains(boundary: Boundary, tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = HeadConfig(
        hidden_size=SIZE, vocab_size=VOCABULARY, draft_vocab_size=30, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=DIM, intermediate_size=INNER, feature_layers=(2, LAYERS),
        log_scales=(0.3, -0.2),
    )  # fmt: skip
    own = TrainedHead(config)
    own.token_ids = torch.randperm(VOCABULARY)[:30].sort().values
    own.save(tmp_path, dtype=torch.float32)
    own = TrainedHead.load(tmp_path)
    text = [5, 9, 2, 7, 7, 1, 8, 3]
    rows = torch.randn(len(text), 2, SIZE)
    with torch.inference_mode():
        hiddens = own.unroll(rows[None], boundary.embed(text)[None], 4)
    head = load(tmp_path, boundary)
    assert head.tap_layers == (2,)
    drafter = head.drafter(50)
    drafter.begin(text[:1])
    known = 4
    # The row of a position is the one that the next token was chosen from.
    drafter.extend(
        Verified(
            text[1 : known + 1],
            rows_TD=rows[:known, 1].numpy(),
            taps_TLD=rows[:known, [0, 0, 0]].numpy(),
            tap_layers=(1, 2, 5),
        )
    )
    paths = [tuple(text[known + 1 : known + 1 + depth]) for depth in range(3)]
    for depth, found in enumerate(drafter.propose([*paths, (0,)], 30)[:3]):
        with torch.inference_mode():
            head_WD = boundary.head_rows(own.token_ids.tolist())
            logits = own.logits(hiddens[depth][0, known - 1], head_WD, depth + 1)
        shares = dict(zip(own.token_ids.tolist(), logits.softmax(dim=0).tolist(), strict=True))
        assert len(found) == 16
        assert max(abs(share - shares[token]) for token, share in found) < 1e-5


def test_without_the_rows_of_the_newest_token_nothing_is_drafted(boundary: Boundary, tmp_path: Path) -> None:
    drafter = load(write(tmp_path, EAGLE3_SETTINGS, eagle3()), boundary).drafter(60)
    rng = torch.Generator().manual_seed(0)
    drafter.begin([1, 2])
    drafter.extend(verified([3], rng))
    assert all(drafter.propose([(), (4,)], 2))
    only_rows = Verified([4], rows_TD=np.zeros((1, SIZE), dtype=np.float32))
    drafter.extend(only_rows)
    assert drafter.propose([(), (5,)], 2) == [[], []]
    drafter.extend(verified([5], rng))
    assert all(drafter.propose([(), (4,)], 2))
    drafter.close()
    drafter.begin([1])
    assert drafter.propose([()], 2) == [[]]


def test_tree_is_bounded_and_nothing_is_drafted_beyond_the_positions(boundary: Boundary, tmp_path: Path) -> None:
    head = load(write(tmp_path, SETTINGS, eagle1()), boundary)
    rng = torch.Generator().manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_head, "MAX_TREE_NODES", 6)
        drafter = head.drafter(12)
        drafter.begin([1, 2])
        drafter.extend(verified([3], rng))
        found = drafter.propose([(token,) for token in range(10)], 1)
        assert sum(map(bool, found)) == 6
        assert drafter.propose([(11,)], 1) == [[]]
        drafter.extend(verified([9], rng))
        assert all(drafter.propose([(token,) for token in range(6)], 1))
        drafter.extend(verified([1, 1, 1, 1, 1, 1], rng))
        assert list(map(bool, drafter.propose([(), (1,), (1, 1)], 1))) == [True, True, False]
        drafter.extend(verified([1] * 20, rng))
        assert drafter.propose([(), (1,)], 1) == [[], []]


def test_shared_noise_is_that_of_the_token_in_the_target_vocabulary(boundary: Boundary, tmp_path: Path) -> None:
    class Noise:
        temperature = 0.5

        def at(self, position: int) -> np.ndarray[Any, np.dtype[np.float32]]:
            return np.random.default_rng(position).gumbel(size=VOCABULARY).astype(np.float32)

    head = load(write(tmp_path, EAGLE3_SETTINGS, eagle3()), boundary)
    plain, noisy = head.drafter(60), head.drafter(60)
    for drafter, noise in ((plain, None), (noisy, Noise())):
        drafter.begin([1, 2], noise)
        drafter.extend(verified([3], torch.Generator().manual_seed(0)))
    patch = pytest.MonkeyPatch()
    patch.setattr("fusion_node.engine.draft_model.MAX_KEPT_CANDIDATES", DRAFT_VOCABULARY)
    for depth, path in enumerate([(), (5,)]):
        shares = dict(plain.propose([path], DRAFT_VOCABULARY)[0])
        scores = {token: np.log(share) / 0.5 + Noise().at(3 + depth)[token] for token, share in shares.items()}
        assert noisy.propose([path], 1)[0][0][0] == max(scores, key=lambda token: scores[token])
    patch.undo()


def without(tensors: Tensors, name: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if key != name}


BAD: dict[str, tuple[dict[str, Any], Callable[[], Tensors], str]] = {
    "another hidden size": (SETTINGS | {"hidden_size": 64}, eagle1, "hidden size of 64, and this one's is 48"),
    "another vocabulary": (SETTINGS | {"vocab_size": 99}, eagle1, "99 token ids, and this one has 131"),
    "an activation": (SETTINGS | {"hidden_act": "gelu"}, eagle1, "activation 'gelu'"),
    "layers it lacks": (SETTINGS | {"num_hidden_layers": 2}, eagle1, r"lacks layers.1.self_attn.q_proj.weight"),
    "too many layers": (SETTINGS | {"num_hidden_layers": 900}, eagle1, "sizes do not fit"),
    "a size that is none": (SETTINGS | {"hidden_size": "48"}, eagle1, "not the configuration of an EAGLE head"),
    "taps beyond the model": (
        EAGLE3_SETTINGS | {"eagle_aux_hidden_state_layer_ids": [1, 2, 8]}, eagle3, "the model, with 7, has not",
    ),
    "no fc": (SETTINGS, lambda: without(eagle1(), "fc.weight"), "holds no EAGLE head"),
    "another fc": (EAGLE3_SETTINGS, lambda: eagle3(num_taps=2), r"fc.weight .* shape \(48, 96\), .*\(48, 144\)"),
    "no d2t": (EAGLE3_SETTINGS, lambda: without(eagle3(), "d2t"), "lacks d2t"),
    "a d2t beyond the vocabulary": (
        EAGLE3_SETTINGS, lambda: eagle3() | {"d2t": torch.full((DRAFT_VOCABULARY,), 100)}, "contradict each other",
    ),
    "a t2d of another": (
        EAGLE3_SETTINGS, lambda: eagle3() | {"t2d": torch.zeros(VOCABULARY, dtype=torch.bool)}, "contradict",
    ),
    "no number": (SETTINGS, lambda: eagle1() | {"fc.bias": torch.full((SIZE,), torch.nan)}, "not finite"),
    "a draft vocabulary that is none": (
        EAGLE3_SETTINGS | {"draft_vocab_size": "all"}, eagle3, "draft vocabulary is not a part",
    ),
    "a draft vocabulary without end": (
        EAGLE3_SETTINGS | {"draft_vocab_size": 10**15}, eagle3, "draft vocabulary is not a part",
    ),
    "rotary positions of no kind": (
        SETTINGS | {"rope_scaling": {"rope_type": "other", "factor": 2.0}}, eagle1, "of a kind that is not read",
    ),
    "rotary positions that are not finite": (SETTINGS | {"rope_theta": 0.0}, eagle1, "positions are not finite"),
    "a base that is no number": (SETTINGS | {"rope_theta": "a"}, eagle1, "of a kind that is not read"),
    "heads without end": (SETTINGS | {"head_dim": 10**12}, eagle1, r"q_proj.weight .*\(48, 48\)"),
    "eight bits": (
        SETTINGS, lambda: eagle1() | {"fc.weight": torch.ones(SIZE, 2 * SIZE).to(torch.float8_e4m3fn)}, "F8_E4M3",
    ),
    "whole numbers": (
        SETTINGS, lambda: eagle1() | {"fc.weight": torch.ones(SIZE, 2 * SIZE, dtype=torch.int8)}, "I8",
    ),
    "a tensor twice": (SETTINGS, lambda: eagle1() | {"model.fc.bias": torch.zeros(SIZE)}, "holds fc.bias twice"),
    "a bias of another size": (SETTINGS, lambda: eagle1() | {"fc.bias": torch.zeros(5)}, r"fc.bias .*\(5,\)"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_head_that_does_not_fit_is_refused_with_what_differs(bad: str, boundary: Boundary, tmp_path: Path) -> None:
    settings, make, message = BAD[bad]
    with pytest.raises(ConfigError, match=message):
        load(write(tmp_path, settings, make()), boundary)


def test_folder_without_a_sound_head_is_refused(boundary: Boundary, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        load(tmp_path, boundary)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ConfigError, match="not the configuration of a draft head"):
        load(tmp_path, boundary)
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    with pytest.raises(ConfigError, match="holds 0 safetensors files"):
        load(tmp_path, boundary)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ConfigError, match="as a pickle, which can run code"):
        load(tmp_path, boundary)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match="cannot be read: fetch it again"):
        load(tmp_path, boundary)


def test_embedding_of_the_head_is_used_only_where_the_target_has_another_width(
    boundary: Boundary, tmp_path: Path
) -> None:
    same = load(write(tmp_path / "same", SETTINGS, eagle1()), boundary).kind
    assert isinstance(same, EagleHead)
    assert torch.equal(same.embed([4]), boundary.embed([4]))
    wide = EAGLE3_SETTINGS | {"target_hidden_size": 32}
    tensors = eagle3() | {"embed_tokens.weight": torch.randn(VOCABULARY, SIZE), "fc.weight": torch.randn(SIZE, 96)}
    kind = load(write(tmp_path / "wide", wide, tensors), boundary, hidden_size=32).kind
    assert torch.equal(kind.embed([4]), tensors["embed_tokens.weight"][4:5])


def test_nothing_of_a_configuration_but_sizes_is_acted_on(boundary: Boundary, tmp_path: Path) -> None:
    acted_on = {
        "torch_dtype": "nonsense",
        "auto_map": {"AutoConfig": "other.py"},
        "id2label": 7,
        "quantization_config": 1,
    }
    assert load(write(tmp_path, SETTINGS | acted_on, eagle1()), boundary).tap_layers == ()


def sparse(path: Path, tensors: dict[str, list[int]]) -> None:
    """A file of tensors in float32 that are all zeros and take no room."""
    end, header = 0, {}
    for name, shape in tensors.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"fc.weight": [2**29]}, r"fc.weight .* has the shape \(536870912,\)"),
        ({"fc.weight": [2**35]}, "larger than 16 GiB"),
        ({f"t{number}": [0] for number in range(5_000)}, "holds 5011 tensors"),
    ],
)
def test_weights_that_are_no_head_are_refused_before_they_are_read(
    tensors: dict[str, list[int]], message: str, boundary: Boundary, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    also = {name: list(tensor.shape) for name, tensor in eagle1().items() if name not in tensors}
    sparse(tmp_path / "model.safetensors", tensors | also)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, boundary)


def test_own_head_takes_no_memory_that_its_file_does_not_have(boundary: Boundary, tmp_path: Path) -> None:
    config = HeadConfig(
        hidden_size=2**20, vocab_size=VOCABULARY, draft_vocab_size=30, num_attention_heads=2**20,
        num_key_value_heads=1, head_dim=2**12, intermediate_size=2**20, feature_layers=(LAYERS,),
    )  # fmt: skip
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"tensor fc\.bias of the draft head is not what its config\.json says"):
        load(tmp_path, boundary)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(name: str, boundary: Boundary, tmp_path: Path) -> None:
    write(tmp_path, SETTINGS, eagle1())
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path, boundary)


def test_links_into_a_cache_are_followed(boundary: Boundary, tmp_path: Path) -> None:
    real, linked = write(tmp_path / "real", SETTINGS, eagle1()), tmp_path / "linked"
    linked.mkdir()
    for path in real.iterdir():
        (linked / path.name).symlink_to(path)
    assert load(linked, boundary).kind.name == "eagle"
