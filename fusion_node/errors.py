"""Every error the product raises: who is to blame, what to do next, and the exit status of the command line.

The docstring of a class is the sentence an operator reads in the manual. A message says what is wrong and what to do;
it never holds a prompt, a token id, a key or anything else that is secret. Exit statuses are part of the interface and
are listed in ``docs/exit-codes.md``; a test keeps that page and this file equal.
"""

from __future__ import annotations

from typing import ClassVar


class FusionError(Exception):
    """Something went wrong that the program understands. The message says what to do."""

    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False


class ConfigError(FusionError):
    """A flag, an argument or a configuration value is wrong. Correct it and run the command again."""

    exit_code = 2


class UnknownModel(ConfigError):
    """The model is not in the local store and is not one that can be pulled. See `fusion-node models list`."""

    exit_code = 3


class InvalidLayers(ConfigError):
    """The layer range is malformed or lies outside the model. Use START:STOP within the model's layers."""

    exit_code = 4


class AddressInUse(ConfigError):
    """Another program listens on that address. Choose another port with --listen, or port 0 for any free one."""

    exit_code = 5


class NoPeers(FusionError):
    """No peer of the swarm could be reached. Check the --peer addresses and that a node is running."""

    exit_code = 6
    retryable = True


class NoRoute(FusionError):
    """The nodes that were found do not cover every layer of the model. Start nodes for the layers named."""

    exit_code = 7
    retryable = True


class ContextTooLong(FusionError):
    """Prompt and answer together are longer than the model's context. Shorten the prompt or ask for fewer tokens."""

    exit_code = 8


class ResourceExhausted(FusionError):
    """There is not enough memory, disk or KV cache here for what was asked. The message says how much is missing."""

    exit_code = 9
    retryable = True


class StoreCorrupted(FusionError):
    """A file of the model store does not match its manifest. Remove the model and pull it again."""

    exit_code = 10


class DownloadFailed(FusionError):
    """A model could not be fetched from its source. What was fetched is kept; run the command again to resume."""

    exit_code = 11
    retryable = True


class NodeFailed(FusionError):
    """A node process that this command started ended before it was ready. Its last words are in the message."""

    exit_code = 12


class NodeNotRunning(FusionError):
    """No node of this home runs on this machine, or none of that name. Start one with `fusion-node join`."""

    exit_code = 13
    retryable = True


class ProblemsFound(FusionError):
    """`fusion-node doctor` has found at least one problem. Each is listed with what to do about it."""

    exit_code = 14


class AuditFailed(FusionError):
    """`fusion-node audit` has found something that the logs do not prove or that should not be. It is listed above."""

    exit_code = 15


class LocalProtocolError(FusionError):
    """This program broke its own rules: a bug here, never a peer's fault. Please report it."""

    exit_code = 70


class PeerError(FusionError):
    """A named peer did not do its part.

    Attributes:
        peer: the peer id, or the address when the identity is not yet known.
    """

    exit_code = 20

    def __init__(self, peer: str, message: str) -> None:
        super().__init__(message)
        self.peer = peer


class PeerUnreachable(PeerError):
    """A peer cannot be connected to. It may be offline or behind a firewall.

    Attributes:
        is_refused: the machine is there and says that nobody listens at that address.
    """

    exit_code = 21
    retryable = True

    def __init__(self, peer: str, message: str, *, is_refused: bool = False) -> None:
        super().__init__(peer, message)
        self.is_refused = is_refused


class PeerClosed(PeerError):
    """A peer closed the connection in the middle of the work."""

    exit_code = 22
    retryable = True


class PeerTimeout(PeerError):
    """A peer is connected but made no progress within its deadline."""

    exit_code = 23
    retryable = True


class PeerRefused(PeerError):
    """A peer is well but refuses the work: no memory left, draining, or a model it does not hold."""

    exit_code = 24
    retryable = True


class RemoteProtocolError(PeerError):
    """A peer sent something malformed, unsigned, oversized or out of order."""

    exit_code = 25


class ProtocolVersionMismatch(RemoteProtocolError):
    """A peer speaks another version of the protocol. Update the older of the two programs."""

    exit_code = 26


class PeerRevoked(PeerError):
    """You have revoked a peer while it served, and nobody else could take its place."""

    exit_code = 27
    retryable = True
