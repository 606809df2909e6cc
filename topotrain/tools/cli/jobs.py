"""The commands `topotrain jobs …` and `topotrain store`.

As in all commands, bad input ends with code 2 and one block on stderr. A store that cannot be used ends with code 1.
Nothing here loads torch.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from topotrain.comm.store.store_url import RENDEZVOUS_VARIABLE
from topotrain.config.plain_text import printable
from topotrain.tools.cli.job_arguments import AsJson, BadInput, refusing
from topotrain.tools.monitor.monitored_run import complain

if TYPE_CHECKING:
    from topotrain.comm.store import Store
    from topotrain.comm.store.discovery.job_registry import JobRecord, Registry

PATIENCE = 5.0
"""Seconds for which the commands try to reach a store."""

jobs = typer.Typer(
    help="The jobs of a store: list them, look at one, stop one.", no_args_is_help=True, rich_markup_mode=None
)

Rendezvous = Annotated[
    str,
    typer.Option(
        "--rendezvous", metavar="URL", help=f"The store, instead of {RENDEZVOUS_VARIABLE}.", show_default=False
    ),
]
Id = Annotated[str, typer.Argument(metavar="ID", help="As `topotrain jobs list` shows it.", show_default=False)]

LIST_EXAMPLE = """\b
Example:
  topotrain jobs list --rendezvous tcp://127.0.0.1:29400
"""
VIEW_EXAMPLE = """\b
Example:
  topotrain jobs view night7 --rendezvous tcp://127.0.0.1:29400
"""
STORE_EXAMPLE = """\b
Example:
  topotrain store tcp://127.0.0.1:29400
"""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(jobs, name="jobs")
    app.command("store", epilog=STORE_EXAMPLE)(store)


@jobs.command("list", epilog=LIST_EXAMPLE)
def list_(rendezvous: Rendezvous = "", as_json: AsJson = False) -> None:
    """List all jobs, the latest first.

    "lost" is a job that is recorded as running, without a heartbeat for half a minute.
    """
    with _registry(rendezvous) as registry:
        records = registry.list()
        if as_json:
            print(json.dumps([record.as_data() for record in records], indent=2))
        elif not records:
            print("no jobs", file=sys.stderr)
        else:
            print(_table([("id", "state", "started", "units", "name"), *map(_row, records)]))


@jobs.command("view", epilog=VIEW_EXAMPLE)
def view(id: Id, rendezvous: Rendezvous = "", as_json: AsJson = False) -> None:
    """Show the record of one job, and its step, loss, samples/s, staleness, incidents.

    The job tells it to the store every 5 seconds.
    """
    print_record(id, rendezvous, as_json)


def print_record(id: str, rendezvous: str, as_json: bool) -> None:
    """Print what a store knows of a job; errors are printed, and end with their code."""
    with _registry(rendezvous) as registry:
        record = registry.view(id)
        if as_json:
            print(json.dumps(record.as_data(), indent=2))
        else:
            seen = f"{max(0.0, time.time() - record.heartbeat):.0f} s ago" if record.heartbeat else "none"
            rows = [("id", record.id), ("name", record.name), ("state", record.state), ("started", _when(record))]
            rows += [("units", str(record.units)), ("hosts", ", ".join(record.hosts)), ("sign of life", seen)]
            print(_table(rows))
            if record.summary is not None:
                from topotrain.tools.summary_text import summary_text

                print(f"\n{summary_text(record.summary)}")


@jobs.command("stop")
def stop(id: Id, rendezvous: Rendezvous = "") -> None:
    """Ask a job to end; its units end by themselves soon after."""
    with _registry(rendezvous) as registry:
        from topotrain.comm.store.discovery.job_registry import ENDED

        state = registry.stop(id).state
        print(f"{id} has ended already: {state}" if state in ENDED else f"{id} is asked to stop")


def store(
    url: Annotated[str, typer.Argument(metavar="URL", help="tcp://ADDRESS:PORT, an address of this machine.")],
) -> None:
    """Serve a store until Ctrl-C, for the rendezvous of jobs.

    Its values are in memory. Its clients need the same secret: TOPOTRAIN_TOKEN, TOPOTRAIN_TOKEN_FILE, or
    ~/.config/topotrain/token.
    """
    from topotrain.comm.security.secret import load_secret
    from topotrain.comm.store import StoreError, serve_store
    from topotrain.comm.store.store_url import parse

    # Blocked before the store's threads are made, which inherit that: both signals come to `sigwait` alone.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        address = parse(url)
        if address.scheme != "tcp" or address.job:
            raise address.fail("must be tcp://ADDRESS:PORT: only such a store can be served")
        served = serve_store(address.host, address.port, load_secret(os.environ))
    except StoreError as error:
        complain(str(error))
        raise typer.Exit(2) from None
    print(f"{served.url} is served until Ctrl-C", file=sys.stderr, flush=True)
    number = signal.sigwait({signal.SIGINT, signal.SIGTERM})
    served.close()
    raise typer.Exit(128 + number)


@contextmanager
def _registry(rendezvous: str) -> "Iterator[Registry]":
    """Open the registry of a store; errors are printed, and end with their code."""
    from topotrain.comm.store import StoreError
    from topotrain.comm.store.discovery.job_registry import Registry, UnknownJob

    with refusing(), closing(_open(rendezvous)) as opened:
        try:
            yield Registry(opened)
        # Before StoreError, of which it is a kind: an unknown ID is the user's mistake, and ends with code 2.
        except UnknownJob as error:
            raise BadInput(str(error)) from None
        except StoreError as error:
            complain(str(error))
            raise typer.Exit(1) from None


def _open(rendezvous: str) -> "Store":
    from topotrain.comm.store import StoreError, open_existing
    from topotrain.launch.multinode.node_info import with_job

    url = rendezvous or os.environ.get(RENDEZVOUS_VARIABLE, "")
    if not url:
        raise BadInput(f"no store: give --rendezvous URL or set {RENDEZVOUS_VARIABLE}")
    try:
        # The list is that of the whole store, also where the URL is that of one job.
        return open_existing(with_job(url, ""), patience=PATIENCE)
    except StoreError as error:
        raise BadInput(str(error)) from None


def _row(record: "JobRecord") -> tuple[str, ...]:
    return record.id, record.state, _when(record), str(record.units), record.name


def _when(record: "JobRecord") -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.started))


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return columns of equal width."""
    # Names and hosts come from other processes, and must not control the terminal.
    clean = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*clean)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in clean)
    return "\n".join(lines)
