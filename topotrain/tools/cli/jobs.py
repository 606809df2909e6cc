"""The commands `topotrain jobs …`, which look at jobs that run, and change them.

A job is named by its workspace, or by its store and its name there. As in all commands, bad input ends with code 2 and
one block on stderr. A store that cannot be used ends with code 1. Nothing here loads torch.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option, Typer

from topotrain.comm.store.store_url import RENDEZVOUS_VARIABLE
from topotrain.config.job import ConfigError
from topotrain.tools.amounts import seconds
from topotrain.tools.cli.command_line import PanelGroup, add
from topotrain.tools.cli.job_arguments import AsJson, BadInput, CommandFailed
from topotrain.tools.summary_text import summary_text, text_table

if TYPE_CHECKING:
    from topotrain.comm.store.discovery.job_registry import JobRecord, Registry
    from topotrain.launch.job_requests import JobRequest

PATIENCE = 5.0
"""Seconds for which the commands try to reach a store."""
NOTICE_S = 5.0
"""Seconds after which a command says that it waits for the job."""

jobs = Typer(
    cls=PanelGroup,
    help="List jobs, or view, stop, save, shrink or grow one that runs.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def _removed_option(context: Context, url: str) -> None:
    """End with the present form of `--rendezvous`, an option of earlier versions."""
    if url:
        verb = context.info_name
        raise BadInput(f"--rendezvous was removed: topotrain jobs {verb} {url}{'' if verb == 'list' else ' --job ID'}")


Where = Annotated[
    str,
    Argument(
        metavar="WORKSPACE|URL",
        help="The folder of a job with a part on this machine, or that `topotrain launch` has started. From any "
        f"machine: the store in which its units met, with --job; {RENDEZVOUS_VARIABLE} may name it.",
        show_default=False,
    ),
]
Url = Annotated[str, Argument(metavar="URL", help=f"The store; {RENDEZVOUS_VARIABLE} may name it.", show_default=False)]
JobName = Annotated[
    str,
    Option(
        "--job", metavar="ID", help="With the URL of a store: the job's name there. The URL may name it, too (?job=ID)."
    ),
]
Former = Annotated[str, Option("--rendezvous", hidden=True, callback=_removed_option)]

LEAVE = """Let a worker group, or workers, leave a running job.

A group: the others train on and get the data that it has not read; returns when its processes have ended. A worker: the
job takes a snapshot and continues from it with one worker less. The command returns when it trains again.
"""
JOIN = """Let a worker group, or workers, join a running job.

A group: returns when it starts. A worker: the job takes a snapshot and continues from it with one worker more. The
command returns when it trains again.
"""
CHANGE_EXAMPLES = """
Example:
  topotrain jobs {verb} workspace/digits --group 2
  topotrain jobs {verb} workspace/digits --workers 1
  topotrain jobs {verb} redis://store/0 --job night7 --group 2
"""


def list_(url: Url = "", as_json: AsJson = False, former: Former = "") -> None:
    """List all jobs of a store, the latest first.

    "lost" is a job that is recorded as running, without a heartbeat for half a minute.

    Example:
      topotrain jobs list tcp://127.0.0.1:29400
    """
    with _registry(_store_url(url)) as registry:
        records = registry.list()
        if as_json:
            print(json.dumps([record.as_data() for record in records], indent=2))
        elif not records:
            print("no jobs", file=sys.stderr)
        else:
            rows = [(each.id, each.state, _when(each), str(each.units), each.name) for each in records]
            print(text_table([("id", "state", "started", "units", "name"), *rows], words=5))


def view(where: Where = "", job: JobName = "", as_json: AsJson = False, former: Former = "") -> None:
    """Show one job: its step, loss, samples/s, staleness, incidents.

    The job tells it to its store every 5 seconds.

    Example:
      topotrain jobs view workspace/digits
      topotrain jobs view tcp://127.0.0.1:29400 --job night7
    """
    if is_folder(where, job):
        print_once(Path(where), as_json)
    else:
        print_record(where, job, as_json)


def stop(where: Where = "", job: JobName = "", as_json: AsJson = False, former: Former = "") -> None:
    """Let a running job end, with a last snapshot if it takes snapshots.

    It ends as after SIGTERM. Returns when the job has been asked, which is before its end.

    Example:
      topotrain jobs stop workspace/digits
      topotrain jobs stop tcp://127.0.0.1:29400 --job night7
    """
    from topotrain.comm.store.discovery.job_registry import ENDED
    from topotrain.launch.recovery.recovery_actions import StopJob

    if is_folder(where, job):
        _request(where, job, StopJob(), as_json)
        return
    url, id = _job_of_store(where, job)
    # No answer is needed, so this ends also a job that has no unit left to answer.
    with _registry(url) as registry:
        state = registry.stop(id).state
    _print({"text": f"{id} has ended already: {state}" if state in ENDED else f"{id} is asked to stop"}, as_json)


def snapshot(
    where: Where = "",
    job: JobName = "",
    within: Annotated[
        str,
        Option(
            metavar="TIME",
            help="How long the snapshot may take, such as 30s; after that nothing changes, and a later one is kept.",
        ),
    ] = "10s",
    as_json: AsJson = False,
) -> None:
    """Let a running job take a snapshot after its next step, and go on.

    Returns when the snapshot is on disk.

    Example:
      topotrain jobs snapshot workspace/digits
    """
    from topotrain.launch.recovery.recovery_actions import TakeSnapshot

    _request(where, job, TakeSnapshot(seconds("--within", within)), as_json)


def _change(
    context: Context,
    where: Where = "",
    job: JobName = "",
    group: Annotated[
        int | None, Option(metavar="N", help="Asynchronous jobs: the number of the worker group, from 0.")
    ] = None,
    workers: Annotated[
        int | None, Option(metavar="N", help="Jobs of one worker group: how many workers. Without this and --group, 1.")
    ] = None,
    within: Annotated[
        str,
        Option(
            metavar="TIME",
            help="How long the snapshot of a job of one group may take; after that nothing changes. With "
            "leave --group: how long the group may take to finish its step; after that it is ended.",
        ),
    ] = "10s",
    as_json: AsJson = False,
) -> None:
    from topotrain.launch.recovery.recovery_actions import GroupRequest, ResizeRequest

    verb, within_s = context.info_name or "", seconds("--within", within)
    if group is not None and workers is not None:
        raise ConfigError("--workers", workers, "must not be given with --group, which means a whole worker group")
    resize = ResizeRequest(verb, 1 if workers is None else workers, within_s)
    _request(where, job, resize if group is None else GroupRequest(verb, group, within_s), as_json)


add(jobs, list_, "list")
add(jobs, view)
add(jobs, stop)
add(jobs, snapshot)
for _name, _text in {"leave": LEAVE, "join": JOIN}.items():
    add(jobs, _change, _name, _text + CHANGE_EXAMPLES.format(verb=_name))


def print_once(workspace: Path, as_json: bool) -> None:
    """Print the state of a workspace's job. Raises ConfigError or BadInput."""
    from topotrain.tools.recording.recording_file import RecordedWorkspace

    with closing(RecordedWorkspace(workspace)) as recorded:
        found = recorded.history.summary()
    print(json.dumps(found, indent=2) if as_json else summary_text(found))


def print_record(where: str, job: str, as_json: bool) -> None:
    """Print what a store knows of a job. Raises ConfigError or BadInput."""
    url, id = _job_of_store(where, job)
    with _registry(url) as registry:
        record = registry.view(id)
    if as_json:
        print(json.dumps(record.as_data(), indent=2))
        return
    seen = f"{max(0.0, time.time() - record.heartbeat):.0f} s ago" if record.heartbeat else "none"
    rows = [("id", record.id), ("name", record.name), ("state", record.state), ("started", _when(record))]
    rows += [("units", str(record.units)), ("hosts", ", ".join(record.hosts)), ("sign of life", seen)]
    print(text_table(rows, words=2))
    if record.summary is not None:
        print(f"\n{summary_text(record.summary)}")


def is_folder(where: str, job: str) -> bool:
    """Whether a job is named by its workspace, not by its store. Raises BadInput."""
    if not where or "://" in where:
        return False
    if job:
        raise BadInput(f"--job {job}: needs the URL of a store, and {where} is none")
    if "/" not in where and os.environ.get(RENDEZVOUS_VARIABLE) and not Path(where).exists():
        raise BadInput(f"{where}: there is no such folder; a job of the store is --job {where}")
    return True


def _store_url(where: str) -> str:
    """Return a store's URL, as given or from the environment. Raises BadInput."""
    url = where or os.environ.get(RENDEZVOUS_VARIABLE, "")
    if not url:
        raise BadInput(f"no store: give its URL, or set {RENDEZVOUS_VARIABLE}")
    if "://" not in url:
        raise BadInput(f"{url}: is no URL of a store; `topotrain jobs view {url}` shows the job of a folder")
    return url


def _job_of_store(where: str, job: str) -> tuple[str, str]:
    """Return a store's URL and a job there. Raises ConfigError or BadInput."""
    from topotrain.comm.store.store_url import parse

    if not where and not job:
        raise BadInput("no job: give its WORKSPACE, or the URL of its store with --job ID")
    url = _store_url(where)
    named = parse(url).job
    if where and job and named and named != job:
        raise ConfigError("--job", job, f"is not the job of the URL, which is {named!r}")
    if not job and not named:
        raise BadInput(
            "give the job, too: --job ID, as `topotrain jobs list` shows it, or ?job=ID at the end of the URL"
        )
    return url, job or named


def _request(where: str, job: str, wish: "JobRequest", as_json: bool) -> None:
    """Send a request to a job, and print its answer. Raises ConfigError or BadInput."""
    from topotrain.launch.store_requests import ask_anywhere, ask_over_store

    place = None if is_folder(where, job) else _job_of_store(where, job)
    with _notice(), _store_errors():
        if place is None:
            answer = ask_anywhere(Path(where), wish, os.environ)
        else:
            answer = ask_over_store(*place, wish, os.environ)
    _print(answer, as_json)


@contextmanager
def _notice() -> Iterator[None]:
    text = "topotrain: the job has not answered yet (Ctrl-C ends this command, and not the change)"
    timer = threading.Timer(NOTICE_S, print, (text,), {"file": sys.stderr, "flush": True})
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _store_errors() -> Iterator[None]:
    """End with code 1 where an open store cannot be used."""
    from topotrain.comm.store import StoreError
    from topotrain.comm.store.discovery.job_registry import UnknownJob

    try:
        yield
    except UnknownJob:
        raise  # a kind of StoreError, and the user's mistake
    # After a request was sent, it is not known whether the job has changed.
    except StoreError as error:
        raise CommandFailed(str(error)) from None


@contextmanager
def _registry(url: str) -> "Iterator[Registry]":
    """Open the registry of a store; its errors are printed, and end with their code."""
    from topotrain.comm.store import open_existing
    from topotrain.comm.store.discovery.job_registry import Registry
    from topotrain.launch.multinode.node_info import with_job

    # The list is that of the whole store, also where the URL is that of one job.
    with closing(open_existing(with_job(url, ""), patience=PATIENCE)) as opened, _store_errors():
        yield Registry(opened)


def _print(answer: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(answer, indent=2) if as_json else f"topotrain: {answer['text']}")


def _when(record: "JobRecord") -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.started))
