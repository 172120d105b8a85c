"""What an audit says: findings with the records that show them, checks, and what each node was sent.

Plain values, which become JSON as they are.
"""

from __future__ import annotations

import enum

import msgspec


class Kind(enum.StrEnum):
    """What can be wrong. The docstrings are for the page."""

    NO_LOG = "no-log"
    """A peer that had part in a session has handed in no log."""
    LOG_GAP = "log-gap"
    """A log lacks records in its midst, or became full."""
    NO_PLAN = "no-plan"
    """Tensors of a session that nobody opened, or under a plan that nobody sent."""
    PLAN_DIFFERS = "plan-differs"
    """Parties were given different plans for one epoch, or one that cannot be read or comes from somebody else."""
    STRANGER = "stranger"
    """A tensor to or from a peer that is in no plan of the session."""
    PATH = "path"
    """A tensor between two peers of a plan that have nothing of the kind to send one another."""
    OVERSENT = "oversent"
    """A tensor wider than what is the receiver's: columns, or contributions, that are not its own."""
    SHAPE = "shape"
    """A tensor with fewer values than it should have, or with rows that do not fit its step."""
    NOT_OWN = "not-own"
    """A node was sent more columns of a state than its slice."""
    WHOLE = "whole"
    """A node was sent a whole state."""
    DIGEST = "digest"
    """Sender and receiver have different digests of the same rows, or rows that could not be read."""
    DUPLICATE = "duplicate"
    """The same rows twice."""
    NEVER_SENT = "never-sent"
    """Received by one peer, and not in the log of the peer that it came from."""
    NEVER_RECEIVED = "never-received"
    """Sent, and not in the log of the peer that it went to, although it must have come."""
    MISSING = "missing"
    """A step without a frame that it must have had."""
    EXTRA = "extra"
    """A result or a contribution that belongs to no step."""
    SKIPPED = "skipped"
    """Entries of a session's log that nobody has a record of."""
    NOT_GRANTED = "not-granted"
    """A member of a group was sent parts of states without its user's grant for them, or after its end."""
    BAD_RELEASE = "bad-release"
    """A release that its sender has not signed, or that is not of what was granted to it."""
    PROBE = "probe"
    """A measurement of bandwidth that carried something."""


class CheckName(enum.StrEnum):
    """What a report says of all findings together."""

    LOGS = "all parties' logs are there and whole"
    CLOSED = "every step that the logs show is closed: nothing is missing, and nothing extra"
    DIGESTS = "what was sent is what was received"
    PATHS = "tensors go only to whom the plan says"
    OWN = "no node was sent columns, or contributions, that are not its own"
    WHOLE = "no node was sent a whole state"
    GRANTS = "who was sent a part of a state in a group had its user's grant for it"


CHECK_OF = {
    Kind.NO_LOG: CheckName.LOGS,
    Kind.LOG_GAP: CheckName.LOGS,
    Kind.NO_PLAN: CheckName.PATHS,
    Kind.PLAN_DIFFERS: CheckName.PATHS,
    Kind.STRANGER: CheckName.PATHS,
    Kind.PATH: CheckName.PATHS,
    Kind.PROBE: CheckName.PATHS,
    Kind.OVERSENT: CheckName.OWN,
    Kind.NOT_OWN: CheckName.OWN,
    Kind.WHOLE: CheckName.WHOLE,
    Kind.NOT_GRANTED: CheckName.GRANTS,
    Kind.BAD_RELEASE: CheckName.GRANTS,
    Kind.SHAPE: CheckName.CLOSED,
    Kind.DIGEST: CheckName.DIGESTS,
    Kind.NEVER_SENT: CheckName.DIGESTS,
    Kind.NEVER_RECEIVED: CheckName.CLOSED,
    Kind.DUPLICATE: CheckName.CLOSED,
    Kind.MISSING: CheckName.CLOSED,
    Kind.EXTRA: CheckName.CLOSED,
    Kind.SKIPPED: CheckName.CLOSED,
}
"""Which check a finding fails."""


class Status(enum.StrEnum):
    """Of an entry, see the head of this file."""

    CLOSED = "closed"
    OPEN = "open"
    GIVEN_UP = "given-up"
    ABANDONED = "abandoned"


class Finding(msgspec.Struct, frozen=True):
    """Something that is wrong, and the records that show it, as ``FILE:NUMBER``."""

    kind: Kind
    session: str
    what: str
    records: tuple[str, ...]


class Check(msgspec.Struct, frozen=True):
    """Whether there is no finding of its kinds."""

    name: CheckName
    passed: bool
    num_findings: int


class Place(msgspec.Struct, frozen=True):
    """What a node holds by a plan: columns [first_column, stop_column) of the states of the layers [start, stop)."""

    epoch: int
    start: int
    stop: int
    member: int
    num_members: int
    first_column: int
    stop_column: int


class NodeShare(msgspec.Struct, frozen=True):
    """What a node was sent.

    Attributes:
        own_fraction: the largest part of a state that its plans make its own.
        largest_fraction: of any one state that it was sent; its own slice counts where it was sent one that is not.
        after_layer: the state of which that was, by the layers that the rows had passed; None: nothing was sent.
        num_states, state_bytes: tensors that are columns of a state, and their bytes.
        num_partials, partials_bytes: contributions of other members to its own part of a linear's output.
        invertible_fraction: the largest part of the input of one linear that follows from contributions that it was
            sent, by solving linear equations, together with its own. They count as no state, and hide none.
        has_log: else all of this is what the others' logs say.
        is_member: of a group, so that it needs grants.
        released: why it has, by its own signature, deleted what it held under its last grant; empty: it has not said
            that.
    """

    peer: str
    places: tuple[Place, ...]
    own_fraction: float
    largest_fraction: float
    after_layer: int | None
    num_states: int
    state_bytes: int
    num_partials: int
    partials_bytes: int
    invertible_fraction: float
    has_log: bool = True
    is_member: bool = False
    released: str = ""


class How(enum.StrEnum):
    """Why a peer has columns of a state."""

    SENT = "sent"
    """By those who had them, as the plan says."""
    MADE = "made"
    """It has computed them, of contributions where it is a member of a group."""
    FOREIGN = "foreign"
    """It was sent them, and they are not its own."""


class Band(msgspec.Struct, frozen=True):
    """For the picture: ``peer`` has columns [start, stop) of the hidden states after ``layer`` layers, in an epoch."""

    epoch: int
    peer: str
    layer: int
    start: int
    stop: int
    how: How


class StepView(msgspec.Struct, frozen=True):
    """One entry of the log.

    Attributes:
        is_replay: it brought a stage up to date, and ended there.
        fractions: the largest part of one of its states that each node was sent.
    """

    epoch: int
    sequence: int
    num_rows: int
    status: Status
    is_replay: bool
    fractions: dict[str, float]


class SessionView(msgspec.Struct, frozen=True):
    """One session."""

    session: str
    user: str
    model_id: str
    numerics: str
    hidden: int
    num_layers: int
    epochs: tuple[int, ...]
    nodes: tuple[NodeShare, ...]
    num_closed: int
    num_steps: int
    """Closed and open ones; neither given up nor abandoned nor a replay."""
    num_given_up: int
    num_abandoned: int
    num_replays: int
    bands: tuple[Band, ...]
    steps: tuple[StepView, ...]


class Report(msgspec.Struct, frozen=True):
    """What the records show.

    Attributes:
        skipped: sessions of users who have handed in no log, which are not judged.
        unended: logs without an end: the process was killed, or still runs.
        num_records: events in all logs.
        counts: findings by kind, also those that are not told one by one.
    """

    passed: bool
    checks: tuple[Check, ...]
    sessions: tuple[SessionView, ...]
    findings: tuple[Finding, ...]
    counts: dict[str, int]
    skipped: tuple[str, ...]
    unended: tuple[str, ...]
    num_records: int
