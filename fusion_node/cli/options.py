"""Options that several commands share, so that each means the same everywhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fusion_node.client.ownership_file import read_ownership
from fusion_node.client.sampling import SamplingParams
from fusion_node.client.user_rules import UserRules, check_masked_sums, check_members, topology_of
from fusion_node.errors import ConfigError
from fusion_node.types import PeerId
from p2p.identity import Identity, peer_id_of, public_key_of
from p2p.link_emulation_core import LineShape
from p2p.swarm_key import SwarmKey
from p2p.upload_core import MIN_UPLOAD_BPS

Peers = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        metavar="ADDR|INVITE",
        # Other users of a machine can read command lines, and an invite may be a secret.
        envvar="FUSION_PEERS",
        help="A node of the swarm to enter by. May be repeated; in the variable, with spaces between.",
    ),
]
SwarmKeyFile = Annotated[
    Path | None,
    typer.Option("--swarm-key", metavar="FILE", help="Key of a private swarm; not needed with an invite that has it."),
]
UserIdentity = Annotated[
    Path | None,
    typer.Option(
        "--identity", metavar="FILE", help="Who you are to nodes with an allow-list; made if absent. Else always new."
    ),
]
Mdns = Annotated[bool, typer.Option("--mdns/--no-mdns", help="Look for nodes on the local network and this machine.")]
PrefixCache = Annotated[
    bool,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        help="Let the nodes keep what they computed of a conversation for some minutes, for its next question.",
    ),
]
SharedPrefixCache = Annotated[
    bool | None,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        help="The same as in a chat, for all callers together. If neither is given: on loopback, and not elsewhere.",
    ),
]
Home = Annotated[
    Path | None, typer.Option("--home", envvar="FUSION_HOME", help="Folder of the model store and the identity.")
]
Numerics = Annotated[
    str, typer.Option(help="Numerics class: fp32, f16r32, bf16 or fp16; with +kv8 KV is kept in int8.")
]
Wire = Annotated[
    str | None,
    typer.Option(
        "--wire",
        metavar="int8",
        help="int8: a quarter to a half of the bytes between machines. Lossy: some answers differ from the exact ones.",
    ),
]
PuzzleBits = Annotated[
    int | None,
    typer.Option(
        "--puzzle-bits",
        envvar="FUSION_PUZZLE_BITS",
        metavar="N",
        help="What an identity must have paid to be heeded, in a swarm of strangers: each bit more doubles it. 11 are "
        "2 seconds, once; 0 is nothing.",
    ),
]
ObjectiveName = Annotated[
    str,
    typer.Option(
        "--objective",
        metavar="latency|throughput|first-token",
        help="What a route is chosen for: seconds per token, many sessions at a time, or the first token.",
    ),
]
Speculate = Annotated[
    str,
    typer.Option(
        "--speculate",
        metavar="auto|tree|chain|off",
        help="Guess the next tokens while the nodes compute: the same answer, sooner where that pays.",
    ),
]
DraftModelName = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        metavar="MODEL|DIR|none",
        help="A small model in the store with the same tokenizer, or the folder of a draft head of the model, that "
        "guesses on this machine. If not given: the head that comes with the program, if it has one for the model; "
        "with none, not that one either.",
    ),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="PEER|operator:NAME|region:NAME",
        help="Be served by these alone; of each kind one must fit. May be repeated.",
    ),
]
Deny = Annotated[
    list[str] | None,
    typer.Option("--deny", metavar="PEER|operator:NAME|region:NAME", help="Never be served by these. May be repeated."),
]
DistinctOperators = Annotated[
    bool, typer.Option("--distinct-operators", help="No two stages of one operator, by the nodes' own word.")
]
MaxPrice = Annotated[
    float | None, typer.Option("--max-price", metavar="PRICE", help="That a node may ask, in the swarm's unit.")
]
MaxStages = Annotated[int | None, typer.Option("--max-stages", metavar="N", help="Over so many nodes at most.")]
OwnershipFileName = Annotated[
    Path | None,
    typer.Option(
        "--ownership",
        metavar="FILE",
        help="Who may hold which slices of which layers, and who may not stand beside whom (docs/fusion.md). Read "
        "again when it changes: who is no longer allowed is revoked.",
    ),
]
TopologyName = Annotated[
    str,
    typer.Option(
        "--topology",
        metavar="pipeline|fusion|hybrid",
        help="What serves a part of the model: one node each, groups whose members each have a slice of every hidden "
        "state and none has it whole, or what is faster.",
    ),
]
Members = Annotated[
    int | None, typer.Option("--members", metavar="N", help="So many members of each group. Else any number.")
]
MaskedSums = Annotated[
    bool,
    typer.Option(
        "--masked-sums",
        help="No member of a group learns what another one contributes, but what all others contribute together: in "
        "groups of 3 or more, with --topology fusion.",
    ),
]
EmulateRtt = Annotated[
    float | None,
    typer.Option(
        "--emulate-rtt",
        metavar="MS",
        help="For measurements: delay what is sent to peers by half of this. The other half is theirs, if they are "
        "told so too.",
    ),
]
EmulateJitter = Annotated[
    float | None,
    typer.Option("--emulate-jitter", metavar="MS", help="For measurements: by up to so much more or less each way."),
]
EmulateRate = Annotated[
    float | None,
    typer.Option(
        "--emulate-rate", metavar="MBIT", help="For measurements: send no more than so many Mbit/s to all together."
    ),
]
AuditFile = Annotated[
    Path | None,
    typer.Option(
        "--audit",
        metavar="FILE",
        help="Record there what is sent to nodes and comes from them, without the values, for `fusion-node audit`.",
    ),
]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads to compute with; torch's own choice if not given.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Name or id of a model in the store.")]
MaxTokens = Annotated[int, typer.Option(help="Longest answer, in tokens.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling.")]
TopK = Annotated[int | None, typer.Option(help="Keep this many tokens.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this fraction of the best one's probability.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1 avoids repetition.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling reproducible.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer. May be repeated.")]


def read_swarm_key(path: Path | None) -> SwarmKey | None:
    """The key in a file that was named; ConfigError when it cannot be used."""
    return None if path is None else SwarmKey.load(path)


def read_identity(path: Path | None) -> Identity | None:
    """The identity in a file that was named, made if there is none; ConfigError when it cannot be used."""
    return None if path is None else Identity.load_or_create(path)


_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?(?:([kmgt])(i?b)?)?", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def parse_peer(text: str) -> PeerId:
    """A peer id.

    Raises:
        ConfigError: it is none.
    """
    try:
        return peer_id_of(public_key_of(text.strip()))
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a peer id: `fusion-node id` prints one") from error


def parse_size(text: str) -> int:
    """Reads ``6GiB``, ``500M``, ``1.5 TB`` (powers of 1000 when written with B alone) or a number of MiB; in bytes.

    Raises:
        ConfigError: it is no size, or none that is above zero.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is not None:
        number, unit, suffix = found.groups()
        base = 1000 if (suffix or "").lower() == "b" else 1024
        size = int(float(number) * base ** _POWERS[(unit or "m").lower()])
        if size > 0:
            return size
    raise ConfigError(f"{text!r} is not a size: write a number of MiB, or for example 500MiB or 6GiB")


def parse_size_or_none(text: str) -> int:
    """The same, or ``0`` for nothing at all."""
    return 0 if text.strip() == "0" else parse_size(text)


MAX_PRICE = 1e9
"""What a record can hold."""

_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,6})?) ?([kmgt]?)(i?)(bit|b|B)(?:/s|ps)?", re.IGNORECASE)


def parse_rate(text: str) -> float:
    """Reads ``10Mbit``, ``2MB``, ``500 kbit/s`` or ``1.5MiB``, per second; in bytes per second.

    Raises:
        ConfigError: it is no rate, or less than MIN_UPLOAD_BPS.
    """
    found = _RATE.fullmatch(text.strip())
    if found is not None:
        number, prefix, binary, unit = found.groups()
        base = 1024 if binary else 1000
        power = _POWERS[prefix.lower()] if prefix else 0
        rate_Bps = float(number) * float(base**power) / (8 if unit.lower() == "bit" else 1)
        if rate_Bps >= MIN_UPLOAD_BPS:
            return rate_Bps
    raise ConfigError(f"{text!r} is not a rate of at least 8kbit: write for example 10Mbit or 2MB, per second")


def parse_price(text: str) -> float:
    """Reads a price tag.

    Raises:
        ConfigError: it is not a number from 0 to 1e9.
    """
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0.0 <= price <= MAX_PRICE:
        raise ConfigError(f"{text!r} is not a price: write a number from 0 to 1e9, for example 0.5")
    return price


def user_rules(
    allow: Sequence[str] | None,
    deny: Sequence[str] | None,
    distinct_operators: bool,
    max_price: float | None,
    max_stages: int | None,
) -> UserRules:
    """The options as UserRules; ConfigError for what makes no sense."""
    return UserRules(
        allow=tuple(allow or ()),
        deny=tuple(deny or ()),
        distinct_operators=distinct_operators,
        max_price=max_price,
        max_stages=max_stages,
    )


def check_ownership(path: Path | None) -> None:
    """Raises ConfigError for an ownership file that is wrong, before anything heavy is loaded."""
    if path is not None:
        read_ownership(path)


def check_topology(topology: str, members: int | None, masked_sums: bool) -> None:
    """Raises ConfigError for an unknown topology, and for groups that cannot be or do not do what is asked of them."""
    check_members(members, topology_of(topology))
    check_masked_sums(masked_sums, topology_of(topology), members)


def emulated_line(rtt_ms: float | None, jitter_ms: float | None, rate_Mbps: float | None) -> LineShape | None:
    """The options as a LineShape, None when none of them is given; ConfigError for values out of range."""
    if rtt_ms is None and jitter_ms is None and rate_Mbps is None:
        return None
    return LineShape(rtt_ms or 0.0, jitter_ms or 0.0, rate_Mbps)


def sampling(
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int | None,
    min_p: float,
    repetition_penalty: float,
    seed: int | None,
    stop: list[str] | None,
) -> SamplingParams:
    """The options as SamplingParams; ConfigError for values out of range."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
    )
