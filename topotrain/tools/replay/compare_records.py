"""The first decision in which two recordings differ."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

from topotrain.config.job import ConfigError
from topotrain.config.job_file import dumps_cluster
from topotrain.config.topology import Address
from topotrain.core.protocol import Commit
from topotrain.extensions.decision_record.order_entries import (
    LOST,
    Arrival,
    Entry,
    ModelKnown,
    Note,
    StepMade,
    VersionShown,
)
from topotrain.extensions.decision_record.replay_order import words_of_note
from topotrain.tools.replay.decision_file import DecisionFile

_END = "the recording ends"


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two recordings differ.

    version: of the server's values before. first, second: what each recording has.
    """

    server: str
    version: int
    first: str
    second: str


def first_difference(first: DecisionFile, second: DecisionFile) -> Difference | None:
    """Return where two recordings of one block differ first; None: they do not.

    Raises:
        ConfigError: they are of different blocks, or of different models.
    """
    if _block(first) != _block(second):
        raise ConfigError("--compare", None, "must be a recording of the same cluster block")
    found = []
    for server in first.servers:
        mine, theirs = first.entries(server), second.entries(server)
        if _model(mine) != _model(theirs):
            raise ConfigError("--compare", None, "must be a recording of the same model and optimizer")
        found += [_compare(server, list(_decisions(mine)), list(_decisions(theirs)))]
    # There is no common time: the lowest version is the best known to a user.
    there = sorted((each for each in found if each is not None), key=lambda each: each.version)
    if there:
        return there[0]
    steps = (_compare_steps(server, first.entries(server), second.entries(server)) for server in first.servers)
    return next((each for each in steps if each is not None), None)


def _block(record: DecisionFile) -> str:
    """Return the cluster block, without the folder of the job."""
    return dumps_cluster(replace(record.job.cluster, workspace=""))


def _model(entries: list[Entry]) -> bytes:
    return next((entry.digest for entry in entries if isinstance(entry, ModelKnown)), b"")


def _decisions(entries: list[Entry]) -> Iterator[Note | Arrival]:
    for entry in entries:
        if isinstance(entry, StepMade | VersionShown) or (isinstance(entry, Arrival) and entry.kind == LOST):
            yield entry


def _compare(server: Address, mine: list[Note | Arrival], theirs: list[Note | Arrival]) -> Difference | None:
    version = 0
    for one, other in zip_longest(mine, theirs):
        if one != other:
            return Difference(str(server), version, _words(one), _words(other))
        if isinstance(one, StepMade):
            version = one.version
    return None


def _words(decision: Note | Arrival | None) -> str:
    if decision is None:
        return _END
    if isinstance(decision, Arrival):
        return f"{decision.sender} dies or leaves"
    return words_of_note(decision)


def _compare_steps(server: Address, mine: list[Entry], theirs: list[Entry]) -> Difference | None:
    """Compare the checks of steps, where the decisions are the same."""
    for one, other in zip(_commits(mine), _commits(theirs), strict=False):
        (sender, step, version, checks), (_, _, _, others) = one, other
        if checks != others:
            where = f"step {step} of {sender} has checks"
            return Difference(str(server), version, f"{where} {checks.hex()}", f"{where} {others.hex()}")
    return None


def _commits(entries: list[Entry]) -> Iterator[tuple[Address, int, int, bytes]]:
    """Yield sender, number, version before, and checks of each step, worker by worker."""
    counts: dict[Address, int] = {}
    found, version = [], 0
    for entry in entries:
        if isinstance(entry, StepMade):
            version = entry.version
        elif isinstance(entry, Arrival) and entry.kind == Commit.KIND:
            counts[entry.sender] = counts.get(entry.sender, 0) + 1
            found.append((entry.sender, counts[entry.sender], version, entry.checks))
    # By number first, so that the earliest step is reported. Messages may have come in another order.
    return iter(sorted(found, key=lambda each: (each[1], each[0])))
