"""``fusion-node id``: the peer id that others put on their allow-list."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fusion_node.cli.options import Home
from fusion_node.store import ModelStore
from p2p.identity import Identity


def show_id(
    identity: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Key file, made if absent; that of this home's node if not given."),
    ] = None,
    home: Home = None,
) -> None:
    """Print the peer id of a key file: of this home's node, or what `--identity FILE` is known by as a user."""
    print(Identity.load_or_create(identity or ModelStore(home).home / "identity.key").peer_id)
