"""Submission of a job to another tool: a folder that all units can read.

    workspace/launch/ID/job.conf   the job as it was submitted, including program, arguments and overrides
    workspace/launch/ID/token      its secret, which the environment refers to and no command line shows
    workspace/launch/ID/store/     the units' store, unless another URL is given

The folder is for this user alone, and a dry run writes nothing.
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
    """The user's options for a launcher.

    rendezvous: the store's URL. "": a folder of the workspace.
    nodes: the number of nodes. 0: the tool decides.
    hosts: the names of hosts, for tools that do not choose them.
    extra: words for the tool itself, unchanged.
    wait: wait until a queued job has ended.
    id: the job's name in the store; "": a new one.
    json: stdout is for JSON output, so the units' output goes to stderr.

    Only some launchers accept the rest: max_restarts: the number of restarts of all units after a failure. image: the
    container image. namespace, format, output: the namespace of manifests, their format, and their file ("" for
    stdout). with_secret: whether the manifests contain the secret. requeue: before the time limit the job takes a
    snapshot, is queued again, and goes on.

    unit_words: options for `topotrain unit`, for each unit alike.
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
    requeue: bool = False
    unit_words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Submission:
    """A job to submit to a launcher; `submission` makes one."""

    job: Job
    topology: Topology
    options: LaunchOptions
    id: str
    folder: Path
    rendezvous: str
    environ: Mapping[str, str] = field(repr=False)
    """The variables that each unit needs besides those that it inherits."""

    @property
    def units(self) -> int:
        return len(self.topology.units)

    @property
    def processes(self) -> int:
        """The processes of the largest unit: its workers, and one for its servers."""
        return max(len(unit.workers) + bool(unit.servers) for unit in self.topology.units)

    @property
    def command(self) -> list[str]:
        """The command that starts a unit."""
        # Without a rank: the tool's own variables give it (see env_tables.py).
        return [sys.executable, "-m", "topotrain", "unit", *self.options.unit_words, str(self.folder / JOB_FILE)]

    def per_node(self, nodes: int) -> int:
        """Return the equal number of units on each of `nodes` nodes. Raises ConfigError."""
        if self.units % nodes:
            fits = ", ".join(str(n) for n in range(1, self.units + 1) if self.units % n == 0)
            raise ConfigError("--nodes", nodes, f"must divide the {self.units} units evenly: {fits}")
        return self.units // nodes

    def write(self) -> None:
        """Write the folder; a second call changes nothing. Raises ConfigError."""
        from topotrain.comm.security.secret import load_secret

        try:
            make_folder(self.folder)
            # A queue may hold a job for days: it runs as submitted, whatever the job file says by then.
            _write_once(self.folder / JOB_FILE, job_file.dumps(self.job))
            # A user's own token file stays where it is.
            if self.environ[TOKEN_VARIABLE] == str(self.folder / TOKEN_FILE):
                _write_once(self.folder / TOKEN_FILE, load_secret(os.environ).hex())
        except OSError as error:
            accepted = f"must be a folder that can be written ({error.filename}: {error.strerror})"
            raise ConfigError("cluster.workspace", self.job.workspace, accepted) from None

    def show(self, text: str) -> str:
        """Return `text` for a dry run, after its inherited variables without passwords."""
        lines = [f"# with {name}={without_password(value)}" for name, value in self.environ.items()]
        return "\n".join([*lines, text.rstrip("\n"), ""])


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """The result of a start.

    code: the exit code. said: the tool's data about the job; empty for one that ran in the foreground.
    text: a text for stdout instead of the job's number.
    """

    code: int
    said: Mapping[str, str] = field(default_factory=dict)
    text: str = ""


class LauncherTool(Protocol):
    """A module of this folder that submits a job to one launcher."""

    def command(self, submission: Submission) -> str:
        """Return what would be submitted. Raises ConfigError for an unknown option."""
        ...

    def start(self, submission: Submission) -> LaunchResult:
        """Submit the job. Raises ConfigError.

        Returns when it is queued or, for foreground tools, when it has ended.
        """
        ...


def submission(job: Job, topology: Topology, options: LaunchOptions, environ: Mapping[str, str]) -> Submission:
    """Name a job, and find its folder, without writing anything. Raises ConfigError."""
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
    # Only the path travels: a batch system may show the environment to other users.
    token = environ.get(TOKEN_VARIABLE) or str(folder / TOKEN_FILE)
    return Submission(
        job, topology, options, name, folder, url, {RENDEZVOUS_VARIABLE: url, TOKEN_VARIABLE: os.path.abspath(token)}
    )


def job_id(job: Job) -> str:
    """Return a new name for a start of this job, which can be part of a key."""
    return f"{_word(job.name)}-{secrets.token_hex(4)}"


def without_password(url: str) -> str:
    """Return `url` with *** in place of its password, if it has one."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    user, _, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user.partition(':')[0]}:***@{host}"))


def _word(name: str) -> str:
    return re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-")[:40] or "job"


def _write_once(path: Path, text: str) -> None:
    """Write a file for this user alone, or raise ConfigError where it differs."""
    # Each node of one torchrun writes it, and a unit must not read half of it.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as file:
        file.write(text)
    try:
        # A link and not a rename: it fails where another process has written the file first.
        os.link(temporary, path)
    except FileExistsError:
        if read_text(path) != text:
            raise ConfigError("--id", path.parent.name, f"is taken by another job: {path} differs") from None
    finally:
        temporary.unlink()
