"""The gateway as a user runs it: a node process, a gateway process, and OpenAI's client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from fusion_node.client.connection import SwarmConnection
from fusion_node.store import StoredModel

pytestmark = pytest.mark.live

START_S = 90.0
CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
LONG: list[Any] = [{"role": "user", "content": "Count from 1 to 300, one number per line."}]


@dataclass
class Started:
    """A process of the command line that has told that it is ready."""

    process: asyncio.subprocess.Process
    ready: dict[str, Any]


@contextlib.asynccontextmanager
async def started(home: Path, *arguments: str) -> AsyncIterator[Started]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "fusion_node.cli.main", *arguments, "--no-mdns", "--threads", "1", "--log-format", "json"),
        env={**os.environ, "FUSION_HOME": str(home)},
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    reading: asyncio.Task[None] | None = None
    try:
        lines = []
        async with asyncio.timeout(START_S):
            async for line in process.stderr:
                lines.append(line.decode())
                event = json.loads(line) if line.startswith(b"{") else {}
                if event.get("event") == "ready":
                    break
            else:
                pytest.fail("".join(lines))
        # A pipe that nobody reads would stop the process in the end.
        reading = asyncio.ensure_future(drain(process.stderr))
        yield Started(process, event)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        if reading is not None:
            await reading


async def drain(stream: asyncio.StreamReader) -> None:
    while await stream.read(2**16):
        pass


@contextlib.asynccontextmanager
async def started_both(home: Path, folder: Path) -> AsyncIterator[tuple[Started, Started, openai.AsyncOpenAI]]:
    key = str(folder / "identity.key")
    async with started(home, "join", "smollm2-135m", "--layers", "0:30", "--identity", key) as node:
        address = node.ready["addresses"][0]
        async with started(home, "serve", "smollm2-135m", "--peer", address, "--listen", "127.0.0.1:0") as gateway:
            url = gateway.ready["url"]
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
                yield node, gateway, client


async def open_sessions(node: Started) -> float:
    """Sessions that a node holds, by its own word."""
    async with SwarmConnection([node.ready["addresses"][0]], mdns=False) as connection:
        (measured,) = await connection.measure(await connection.find(None))
        return (await connection.status_of(measured))["open_sessions"]


async def test_gateway_answers_leaves_nothing_behind_and_tells_when_a_node_dies(
    builtin_model: StoredModel, test_home: Path, tmp_path: Path
) -> None:
    # One test, because starting the two processes takes longer than everything that is asked of them.
    async with started_both(test_home, tmp_path) as (node, gateway, client):
        answer = await client.chat.completions.create(model="smollm2-135m", messages=CAPITAL, temperature=0)
        text = answer.choices[0].message.content or ""
        assert "Paris" in text
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.model_extra is not None
        assert answer.usage.model_extra["fusion"]["plan"][0]["layers"] == "0:30"

        stream = await client.chat.completions.create(
            model="smollm2-135m", messages=CAPITAL, temperature=0, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens

        sampled = [
            await client.chat.completions.create(
                model="smollm2-135m", messages=CAPITAL, temperature=1, seed=seed, max_tokens=12
            )
            for seed in (5, 5)
        ]
        assert len({each.choices[0].message.content for each in sampled}) == 1

        with pytest.raises(openai.BadRequestError) as too_long:
            await client.chat.completions.create(
                model="smollm2-135m", messages=[{"role": "user", "content": "word " * 9000}]
            )
        assert too_long.value.code == "context_length_exceeded"

        async with await client.chat.completions.create(model="smollm2-135m", messages=LONG, stream=True) as left:
            await anext(aiter(left))
            assert await open_sessions(node) == 1
        async with asyncio.timeout(10):
            while await open_sessions(node):  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.1)

        dying = await client.chat.completions.create(
            model="smollm2-135m", messages=LONG, temperature=0, max_tokens=400, stream=True
        )
        await anext(aiter(dying))
        node.process.kill()
        began = time.monotonic()
        with pytest.raises(openai.APIError, match="peer") as died:
            async for _ in dying:
                pass
        assert time.monotonic() - began < 30
        assert died.value.code == "no_route"  # nobody else serves its layers

        gateway.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(15):
            assert await gateway.process.wait() == 0


async def test_gateway_told_to_stop_ends_its_streams_within_seconds(
    builtin_model: StoredModel, test_home: Path, tmp_path: Path
) -> None:
    async with started_both(test_home, tmp_path) as (_node, gateway, client):
        stream = await client.chat.completions.create(
            model="smollm2-135m", messages=LONG, temperature=0, max_tokens=2000, stream=True
        )
        await anext(aiter(stream))
        gateway.process.send_signal(signal.SIGINT)
        began = time.monotonic()
        with pytest.raises(openai.APIError, match="shutting down"):
            async for _ in stream:
                pass
        assert time.monotonic() - began < 6
        assert await gateway.process.wait() == 0


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def test_serve_on_a_taken_port_exits_with_5_before_it_loads_anything(taken_port: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fusion_node.cli.main", "serve", "any", "--listen", f"127.0.0.1:{taken_port}"],
        env={**os.environ, "FUSION_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 5
    assert "choose another port with --listen" in done.stderr
