"""The command `topotrain pserver`, with Paddle's flags and the usual exit codes."""

import signal
from typing import Annotated

import typer

from topotrain.tools.cli.job_arguments import refusing
from topotrain.tools.monitor.monitored_run import complain

EXAMPLE = """\b
Example:
  topotrain pserver --use_gpu=False --port=7164 --ports_num=1 --num_of_gradient_servers=2
"""
HELP = """Serve parameters for trainers that are started by hand (`tt.init`), as Paddle's pserver.

Ends when all trainers have ended. Trainers give the same flags to `tt.init`:

\b
  --num_of_gradient_servers=1  how many trainers there are
  --port=7164                  the first port
  --ports_num=1                ports of each pserver, which are as many servers
  --pservers=127.0.0.1         hosts of all pservers, separated by commas
  --host=                      which one of them this is, if that is not clear
  --async_sgd=False            trainers do not wait for each other
  --wait_s=600                 seconds to wait for all processes before training starts
  --use_gpu=False              of the trainers; servers compute on the CPU
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    settings = {"ignore_unknown_options": True}
    app.command("pserver", help=HELP, epilog=EXAMPLE, context_settings=settings)(pserver)


def pserver(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="--FLAG=VALUE", help="In the syntax of gflags.", show_default=False)
    ] = None,
) -> None:
    """Serve; typer shows HELP instead of this text."""
    from topotrain.compat.paddle.flags import parse

    with refusing():
        flags = parse(words or [])
        # Both raise for flags that do not fit together, before torch is loaded.
        flags.job()
        flags.servers_here()
    # As an exception, so that the servers close their connections.
    signal.signal(signal.SIGTERM, _terminated)

    from topotrain.comm.store import StoreError
    from topotrain.comm.transport import Refused, TransportError
    from topotrain.compat.paddle.init import run_pserver
    from topotrain.core.client.client import JobError  # loads torch, so only now

    try:
        run_pserver(flags)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (StoreError, TransportError, JobError) as error:
        complain(str(error))
        refused = isinstance(error, StoreError | Refused) or getattr(error, "config", False)
        raise typer.Exit(2 if refused else 1) from None


def _terminated(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
