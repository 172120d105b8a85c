"""The real model, served by real nodes behind two routers to a user behind a third one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from fusion_node.client.tokenizer import Tokenizer
from fusion_node.engine.reference import ReferenceModel
from fusion_node.store import StoredModel
from tests.live.swarm_process import MODEL, NodeProcess, run_cli
from tests.nat.internet import Internet, Ports
from tests.nat.light_nodes import Nursery

pytestmark = pytest.mark.live

PROMPT = "The capital of France is"
NUM_TOKENS = 12

# Light nodes have not paid for their identities.
FREE = ("--puzzle-bits", "0")


@pytest.fixture
def own_home(test_home: Path, builtin_model: StoredModel, tmp_path: Path) -> Path:
    """With the models of the common one and a peer book of its own: who is met here is nowhere else."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "models").symlink_to(test_home / "models")
    return home


@pytest.fixture
def swarm(internet: Internet, nodes: Nursery, own_home: Path, tmp_path: Path) -> Iterator[str]:
    """Two nodes with half of the model each, behind routers of both kinds; the address of the only public peer."""
    relay = nodes.start("relay", host=internet.host("relay"), relay=True).addresses[0]
    with ExitStack() as stack:
        started = []
        for layers, ports in (("0:15", Ports.PRESERVED), ("15:30", Ports.RANDOM)):
            host = internet.router(f"r{layers[0]}", ports=ports).host("node")
            node = NodeProcess.start(
                layers,
                folder=tmp_path / layers.replace(":", "-"),
                home=own_home,
                peers=[relay],
                options=("--listen", "0.0.0.0:4600", *FREE),
                namespace=host.namespace,
            )
            stack.callback(node.end)
            started.append(node)
        for node in started:
            node.wait_ready()
        yield relay


def test_nodes_behind_routers_serve_a_user_behind_another_one_with_the_right_tokens(
    internet: Internet, swarm: str, own_home: Path, builtin_model: StoredModel
) -> None:
    user = internet.router("ru").host("user")
    done = run_cli(
        "generate", MODEL, PROMPT, "--raw", "--temperature", "0", "--max-tokens", str(NUM_TOKENS), "--json",
        "--no-mdns", "--threads", "1", "--peer", swarm, *FREE,
        home=own_home,
        namespace=user.namespace,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    print(f"\n{answer}")
    ids = Tokenizer(builtin_model.path).encode(PROMPT)
    torch.set_num_threads(1)
    assert answer["token_ids"] == ReferenceModel(builtin_model.path).greedy(ids, NUM_TOKENS)
