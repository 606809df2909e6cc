"""The command `topotrain store`: serve a store for the rendezvous of jobs."""

import os
import signal
import sys
from typing import Annotated

import typer

from topotrain.tools.monitor.monitored_run import complain

EXAMPLE = """\b
Example:
  topotrain store tcp://127.0.0.1:29400
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("store", epilog=EXAMPLE)(store)


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
