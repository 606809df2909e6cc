"""The file of a recording, and the recording of a job that this process starts.

The file is a ZIP archive with a description, and one part for each process.

`record.json` has the format's version, the job's text, whether the job came to its end, and the versions of topotrain
and torch. The parts are as `order_entries` describes them.
"""

import json
import re
import time
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from types import UnionType
from typing import Any

from topotrain.config import job_file
from topotrain.config.intervals import wants_snapshots
from topotrain.config.job import ConfigError, Job
from topotrain.config.private_files import make_folder
from topotrain.config.topology import Address, Topology, layout
from topotrain.extensions.decision_record.exchange_record import decode_choices
from topotrain.extensions.decision_record.order_entries import Entry, StepMade, decode_entries
from topotrain.extensions.decision_record.process_order import part_of
from topotrain.launch.agent.workspace import RECORDED, RunFolder

OPTION = "--record"
FORMAT = "topotrain decisions"
VERSION = 1
_DESCRIPTION = "record.json"
_PART = re.compile(r"(server|worker)-\d{1,6}-\d{1,6}(-\d{1,6})?")
_MOST_BYTES = 1 << 32
_SMALL_BYTES, _MOST_RATIO = 1 << 26, 100
"""Above this size, the parts have at most so many times the bytes of the file."""
_FIELDS: Mapping[str, tuple[type[Any] | UnionType, str]] = {
    "job": (str, "must be the text of a job file"),
    "whole": (bool, "must be true or false"),
    "made_at": (int | float, "must be a number of seconds"),
    "versions": (dict, "must be a block of texts by name"),
}
"""Of the description, besides its format and version: the type of each field, and the words for it."""


@dataclass(frozen=True, slots=True)
class DecisionFile:
    """A recording.

    Attributes:
        job: the recorded job.
        whole: it came to its end.
        parts: the bytes of each process, by name (`part_of`).
        made_at: seconds since 1970.
        versions: of topotrain and of torch.
    """

    job: Job
    whole: bool
    parts: Mapping[str, bytes]
    made_at: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def servers(self) -> Sequence[Address]:
        """The servers of the job, group by group."""
        topology = layout(self.job.cluster)
        return [me for group in range(topology.server_groups) for me in topology.servers(group)]

    def entries(self, server: Address) -> list[Entry]:
        return list(decode_entries(self.parts.get(part_of(server), b"")))

    def last_version(self, group: int) -> int:
        """Return the version that all servers of a group have come to."""
        found = []
        for server in self.servers:
            if server.group == group:
                made = [entry.version for entry in self.entries(server) if isinstance(entry, StepMade)]
                found.append(made[-1] if made else 0)
        return min(found, default=0)

    def save(self, path: Path) -> None:
        """Write the file. Raises OSError."""
        about = {
            "format": FORMAT,
            "version": VERSION,
            # Without the URL of the store, which a replay does not need: it may have a password.
            "job": job_file.dumps(replace(self.job, rendezvous="")),
            "whole": self.whole,
            "made_at": self.made_at,
            "versions": dict(self.versions),
        }
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(_DESCRIPTION, json.dumps(about, indent=1))
            for name, data in sorted(self.parts.items()):
                archive.writestr(name, data)


def load_decisions(path: Path) -> DecisionFile:
    """Read a recording.

    Raises:
        ConfigError: there is none, or only a part of one, or it is one of another version.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            most = min(_MOST_BYTES, max(_SMALL_BYTES, _MOST_RATIO * path.stat().st_size))
            if sum(info.file_size for info in infos) > most:
                raise _refused(path, f"would take more than {most >> 20:,} MB of memory")
            about = _description(path, archive)
            parts = {info.filename: archive.read(info) for info in infos if _PART.fullmatch(info.filename)}
    except OSError as error:
        raise _refused(path, f"cannot be read ({error.strerror or error})") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError, RuntimeError):
        raise _refused(path, "is no recording of `topotrain run --record`, or is cut off") from None
    job = job_file.loads(about["job"], str(path))
    found = DecisionFile(job, about["whole"], parts, about["made_at"], about["versions"])
    _check_parts(path, found)
    return found


def _description(path: Path, archive: zipfile.ZipFile) -> dict[str, Any]:
    try:
        about = json.loads(archive.read(_DESCRIPTION))
        form, number = about["format"], about["version"]
    except (ValueError, RecursionError, TypeError, KeyError):
        raise _refused(path, "is no recording of `topotrain run --record`") from None
    if form != FORMAT:
        raise _refused(path, "is no recording of `topotrain run --record`")
    if number != VERSION:
        raise _refused(path, f"is a recording of version {number!r}, must be {VERSION}")
    for name, (kind, accepted) in _FIELDS.items():
        if name not in about:
            raise ConfigError(f"{_DESCRIPTION}: {name}", None, "is missing", str(path))
        if not isinstance(about[name], kind) or (kind is not bool and isinstance(about[name], bool)):
            raise ConfigError(f"{_DESCRIPTION}: {name}", about[name], accepted, str(path))
    if not all(isinstance(each, str) for each in about["versions"].values()):
        raise ConfigError(f"{_DESCRIPTION}: versions", about["versions"], _FIELDS["versions"][1], str(path))
    return dict(about)


def _check_parts(path: Path, found: DecisionFile) -> None:
    """Raise ConfigError for a recording with missing or damaged parts."""
    for server in found.servers:
        name = part_of(server)
        if name not in found.parts:
            raise _refused(path, f"lacks the part of {server}: its disk was full, or it was not there yet")
    for name, data in found.parts.items():
        try:
            for _ in decode_entries(data) if name.startswith("server") else decode_choices(data):
                pass
        except ValueError as error:
            raise _refused(path, f"has a damaged part {name}: {error}") from None


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError("", None, why, str(path))


class JobRecord(RunFolder):
    """Lets the processes of a job record, and collects what they have written.

    Args:
        job, topology: of the job that is asked for.
    """

    def __init__(self, job: Job, topology: Topology) -> None:
        self.drops_snapshots = topology.synced and wants_snapshots(job)
        """Whether the job writes no snapshots: one comes by the clock, and exchanges of server groups wait for it."""
        self.job = replace(job, snapshot_s=0.0, checkpoint_freq=0) if self.drops_snapshots else job
        """The job to run."""
        self._folder = Path()
        self._starts = 0

    def fill(self, run_dir: Path) -> None:
        self._folder = run_dir / RECORDED
        self._starts += 1
        make_folder(self._folder)

    def collect(self, whole: bool) -> DecisionFile:
        """Return the recording of the job that has ended.

        whole: it came to its end.

        Raises:
            ConfigError: all processes were started again meanwhile.
            OSError: the parts cannot be read.
        """
        if self._starts > 1:
            accepted = "is not written: the whole job was started again, and a recording is of one start"
            raise ConfigError(OPTION, None, accepted)
        found = sorted(path for path in self._folder.iterdir() if _PART.fullmatch(path.name))
        versions = {name: version(name) for name in ("topotrain", "torch")}
        return DecisionFile(self.job, whole, {path.name: path.read_bytes() for path in found}, time.time(), versions)


def check_recordable(job: Job, topology: Topology, resumed: bool) -> None:
    """Raise ConfigError for a job that cannot be recorded.

    The order of decisions is not enough to make the decisions of such a job again.
    """
    cluster = job.cluster
    if resumed:
        raise ConfigError(OPTION, None, "cannot be used for a job that goes on from a snapshot")
    if cluster.replicas > 1:
        raise ConfigError("cluster.replicas", cluster.replicas, f"must be 1 with {OPTION}")
    if cluster.backup:
        why = "a worker learns at any moment that a step was made without it"
        raise ConfigError("cluster.backup", cluster.backup, f"must be 0 with {OPTION}: {why}")
    if topology.torch_collective:
        raise ConfigError("cluster.engine", cluster.engine, f"must be kOwn with {OPTION}")
