"""The commands `topotrain store` and `topotrain pserver`."""

import os
import signal
import sys
from typing import Annotated

from typer import Argument, Exit

from topotrain.tools.monitor.monitored_run import complain

SETTINGS = {"ignore_unknown_options": True}
"""The flags are read below."""


def store(url: Annotated[str, Argument(metavar="URL", help="tcp://ADDRESS:PORT, an address of this machine.")]) -> None:
    """Serve a store until Ctrl-C, for the rendezvous of jobs.

    Its values are in memory. Its clients need the same secret: TOPOTRAIN_TOKEN, TOPOTRAIN_TOKEN_FILE, or
    ~/.config/topotrain/token.

    Example:
      topotrain store tcp://127.0.0.1:29400
    """
    from topotrain.comm.security.secret import load_secret
    from topotrain.comm.store import serve_store
    from topotrain.comm.store.store_url import parse

    # Blocked before the store's threads are made, which inherit that: both signals come to `sigwait` alone.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    address = parse(url)
    if address.scheme != "tcp" or address.job:
        raise address.fail("must be tcp://ADDRESS:PORT: only such a store can be served")
    served = serve_store(address.host, address.port, load_secret(os.environ))
    print(f"{served.url} is served until Ctrl-C", file=sys.stderr, flush=True)
    number = signal.sigwait({signal.SIGINT, signal.SIGTERM})
    served.close()
    raise Exit(128 + number)


def pserver(
    words: Annotated[
        list[str] | None, Argument(metavar="--FLAG=VALUE", help="In the syntax of gflags.", show_default=False)
    ] = None,
) -> None:
    """Serve parameters as Paddle's pserver, for trainers started by hand.

    It ends when all trainers have ended. They give the same flags to `tt.init`:

    \b
      --num_of_gradient_servers=1  how many trainers there are
      --port=7164                  the first port
      --ports_num=1                ports of each pserver, which are as many servers
      --pservers=127.0.0.1         hosts of all pservers, separated by commas
      --host=                      which one of them this is, if that is not clear
      --async_sgd=False            trainers do not wait for each other
      --wait_s=600                 seconds to wait for all processes before training starts
      --use_gpu=False              of the trainers; servers compute on the CPU

    Example:
      topotrain pserver --use_gpu=False --port=7164 --ports_num=1 --num_of_gradient_servers=2
    """
    from topotrain.compat.paddle.flags import parse

    flags = parse(words or [])
    # Both raise for flags that do not fit together, before torch is loaded.
    flags.job()
    flags.servers_here()
    # As an exception, so that the servers close their connections.
    signal.signal(signal.SIGTERM, _terminated)

    from topotrain.comm.transport import Refused, TransportError
    from topotrain.compat.paddle.init import run_pserver
    from topotrain.core.client.client import JobError  # loads torch, so only now

    try:
        run_pserver(flags)
    except (TransportError, JobError) as error:
        complain(str(error))
        refused = isinstance(error, Refused) or getattr(error, "config", False)
        raise Exit(2 if refused else 1) from None


def _terminated(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
