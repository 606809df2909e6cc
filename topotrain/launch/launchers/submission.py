"""What a job becomes before somebody else's tool starts its units: a folder that every one of them can read.

workspace/launch/ID/job.conf   the job as it was when it was submitted: program, arguments and overrides included
workspace/launch/ID/token      its secret, which the environment names and no command line shows
workspace/launch/ID/store/     where the units meet, unless another URL is given

Rule: the folder is for this user alone, and nothing is written for a dry run. A queue may hold a job for days, so
what was submitted is what runs, whatever becomes of the file that the user wrote.
"""

import os
import re
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qs, urlsplit, urlunsplit

from topotrain.config import job_file
from topotrain.config.job import ConfigError, Job
from topotrain.config.private_files import make_folder, open_file, read_text
from topotrain.config.topology import Topology
from topotrain.launch.agent.workspace import JOB_FILE, STORE, TOKEN_FILE

LAUNCH = "launch"
RENDEZVOUS_VARIABLE, TOKEN_VARIABLE = "TOPOTRAIN_RENDEZVOUS", "TOPOTRAIN_TOKEN_FILE"


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """What the user says to a launcher beside the job.

    rendezvous: the store's URL; "": a folder of the workspace. nodes: on how many machines; 0 leaves it to the tool.
    hosts: their names, for tools that do not choose them. extra: words for the tool itself, as they are.
    wait: stay until a queued job has ended. id: the job's name in the store; "": a new one. json: stdout is for our
    JSON, so that what the units print goes to stderr.

    Only some launchers take the rest. max_restarts: how often all may start again after a failure. image: of the
    container. namespace, format, output, with_secret: where manifests belong, of which kind, to which file ("" for
    stdout), and whether the secret stands in them.
    """

    rendezvous: str = ""
    nodes: int = 0
    hosts: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    wait: bool = False
    id: str = ""
    json: bool = False
    max_restarts: int = 0
    image: str = ""
    namespace: str = ""
    format: str = ""
    output: str = ""
    with_secret: bool = False


@dataclass(frozen=True, slots=True)
class Submission:
    """A job on its way to a launcher; `submission` makes one."""

    job: Job
    topology: Topology
    options: LaunchOptions
    id: str
    folder: Path
    rendezvous: str
    environ: Mapping[str, str] = field(repr=False)
    """The variables of ours that each unit needs, beside what it inherits."""

    @property
    def units(self) -> int:
        return len(self.topology.units)

    @property
    def processes(self) -> int:
        """Of the largest unit: its workers, and its servers together."""
        return max(len(unit.workers) + bool(unit.servers) for unit in self.topology.units)

    @property
    def command(self) -> list[str]:
        """The words that start one unit; which one it is, the tool's own variables say (see table_spec.py)."""
        return [sys.executable, "-m", "topotrain", "unit", str(self.folder / JOB_FILE)]

    def per_node(self, nodes: int) -> int:
        """Units on each of so many nodes, for tools that want the same number everywhere. Raises ConfigError."""
        if self.units % nodes:
            fits = ", ".join(str(n) for n in range(1, self.units + 1) if self.units % n == 0)
            raise ConfigError("--nodes", nodes, f"must divide the {self.units} units evenly: {fits}")
        return self.units // nodes

    def write(self) -> None:
        """Lay the folder down; a second time, as on each node of one torchrun, changes nothing. Raises ConfigError."""
        from topotrain.comm.security.secret import load_secret

        try:
            make_folder(self.folder)
            _write_once(self.folder / JOB_FILE, job_file.dumps(self.job))
            if self.environ[TOKEN_VARIABLE] == str(self.folder / TOKEN_FILE):
                _write_once(self.folder / TOKEN_FILE, load_secret(os.environ).hex())
        except OSError as error:
            accepted = f"must be a folder that can be written ({error.filename}: {error.strerror})"
            raise ConfigError("cluster.workspace", self.job.workspace, accepted) from None

    def show(self, text: str) -> str:
        """For a dry run: `text`, and above it the variables that it inherits, without passwords."""
        lines = [f"# with {name}={without_password(value)}" for name, value in self.environ.items()]
        return "\n".join([*lines, text.rstrip("\n"), ""])


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """What became of a start: the exit code, and what the tool called the job (empty for one that ran in front).

    text: for stdout, instead of the job's number.
    """

    code: int
    said: Mapping[str, str] = field(default_factory=dict)
    text: str = ""


class LauncherTool(Protocol):
    """A module of this folder that hands a job to one launcher."""

    def command(self, submission: Submission) -> str:
        """Exactly what would be submitted. Raises ConfigError for options that the tool cannot take."""
        ...

    def start(self, submission: Submission) -> LaunchResult:
        """Submit it; returns when it is queued or, for tools that run in front, has ended. Raises ConfigError."""
        ...


def submission(job: Job, topology: Topology, options: LaunchOptions, environ: Mapping[str, str]) -> Submission:
    """Name a job and find its folder; nothing is written. Raises ConfigError."""
    wanted = options.rendezvous or job.rendezvous
    given = parse_qs(urlsplit(wanted).query).get("job", [""])[0]
    if given and options.id and given != options.id:
        raise ConfigError("--id", options.id, f"is not the job of the rendezvous, which is {given!r}")
    name = options.id or given or job_id(job)
    if not re.fullmatch(r"[a-z0-9_-][a-z0-9_.-]{0,99}", name):
        raise ConfigError("--id", name, "must be at most 100 of a-z, 0-9, _, . and -, not beginning with a dot")
    folder = Path(job.workspace).absolute() / LAUNCH / name
    url = wanted or (folder / STORE).as_uri()
    if not given:
        url += ("&" if urlsplit(url).query else "?") + f"job={name}"
    token = environ.get(TOKEN_VARIABLE) or str(folder / TOKEN_FILE)
    return Submission(
        job, topology, options, name, folder, url, {RENDEZVOUS_VARIABLE: url, TOKEN_VARIABLE: os.path.abspath(token)}
    )


def job_id(job: Job) -> str:
    """A new name for a start of this job, which may be a part of a key."""
    return f"{_word(job.name)}-{secrets.token_hex(4)}"


def without_password(url: str) -> str:
    """`url` with *** for its password, if it has one."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    user, _, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user.partition(':')[0]}:***@{host}"))


def _word(name: str) -> str:
    return re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-")[:40] or "job"


def _write_once(path: Path, text: str) -> None:
    """Write a file for this user alone; one that is there already must say the same. Raises ConfigError, OSError."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as file:
        file.write(text)
    try:
        os.link(temporary, path)
    except FileExistsError:
        if read_text(path) != text:
            raise ConfigError("--id", path.parent.name, f"is taken by another job: {path} differs") from None
    finally:
        temporary.unlink()
