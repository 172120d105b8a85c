"""The nodes that run on this machine for this user: one small file each, so that they are found without an address.

mDNS does not reach loopback, where a node listens unless it is told otherwise. The folder is the user's own; whoever
can write there could as well change the program's settings, so what stands in a file is believed as a ``--peer`` is: it
is where to dial and whom to expect, and the peer has to prove itself. With ``--no-mdns``, none is written or read.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from p2p.swarm_key import PUBLIC_TAG

MAX_FILE_BYTES = 16 * 1024
MAX_NODES = 32


@contextlib.contextmanager
def registered(
    folder: Path, peer: str, addresses: Callable[[], Sequence[str]], swarm: str = PUBLIC_TAG
) -> Iterator[Callable[[], None]]:
    """Tells of a node for as long as the context lasts. Failing to write is no reason not to serve.

    Args:
        addresses: gives those that the node has now.
        swarm: p2p.swarm_key.swarm_tag of the swarm that it is in.

    Yields:
        What is to be called when the addresses may have changed: it writes the file anew if they have.
    """
    path = folder / f"{peer}.json"
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    written: list[str] | None = None

    def write() -> None:
        nonlocal written
        now = list(addresses())
        if now == written:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary.write_text(json.dumps({"pid": os.getpid(), "addresses": now, "swarm": swarm}))
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        else:
            written = now

    write()
    try:
        yield write
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def running(folder: Path, swarm: str = PUBLIC_TAG) -> tuple[str, ...]:
    """Addresses of the nodes of a swarm that run now; files of processes that are gone are removed."""
    found: list[str] = []
    for path in sorted(folder.glob("*.json"))[:MAX_NODES]:
        try:
            content = json.loads(path.read_bytes()[:MAX_FILE_BYTES])
            pid, addresses = int(content["pid"]), [str(address) for address in content["addresses"]]
            is_ours = str(content.get("swarm", PUBLIC_TAG)) == swarm
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if psutil.pid_exists(pid):
            found += addresses if is_ours else []
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    return tuple(found)
