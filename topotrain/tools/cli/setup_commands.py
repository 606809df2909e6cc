"""The commands `init`, `doctor`, `store` and `pserver`."""

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from topotrain.tools.cli.job_arguments import AsJson, BadInput, CommandFailed, Sets, job_file, load_job
from topotrain.tools.starter_job import CLUSTERS, DEFAULT, write_starter


def init(
    folder: Annotated[
        Path, Argument(metavar="FOLDER", help="Where to write; made if it is missing.", show_default=False)
    ] = Path(),
    framework: Annotated[str, Option(metavar="NAME", help=f"The cluster block: {', '.join(CLUSTERS)}.")] = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Write a job file and a small training script to begin with.

    The script makes its data itself. An existing file is never overwritten.

    Example:
      topotrain init spirals --framework downpour
    """
    made = write_starter(folder, framework)
    if as_json:
        print(json.dumps({"files": [str(path) for path in made.files], "commands": made.commands}, indent=2))
        return
    print(f"written: {', '.join(map(str, made.files))}\n\nnext:")
    print("\n".join(f"  {command}" for command in made.commands))


def doctor(
    conf: Annotated[
        Path | None, job_file("Check whether this job can run here; without it the machine is described.")
    ] = None,
    sets: Sets = None,
    rendezvous: Annotated[
        str, Option(metavar="URL", help="The store in which the units meet, instead of the file's `rendezvous`.")
    ] = "",
    hosts: Annotated[
        str,
        Option(
            metavar="A,B",
            help="Names of the machines of the job; ports and memory are then those of one machine's part.",
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Describe this machine, or check whether a job can run on it.

    The description is for a bug report, and shows secrets as set or not set: TOPOTRAIN_TOKEN and the user in a URL.
    With JOB.conf each check is one line: ok, warning or failed, with what to do. The exit code is 1 if a check failed.

    Example:
      topotrain doctor
      topotrain doctor examples/conf/downpour.conf --rendezvous tcp://127.0.0.1:29400
    """
    if conf is None:
        if sets or rendezvous or hosts:
            raise BadInput("--set, --rendezvous and --hosts are about a job: give its JOB.conf")
        from topotrain.tools.diagnostics.environment_report import environment_report, report_text

        report = environment_report(os.environ)
        print(json.dumps(report, indent=2) if as_json else report_text(report))
        return
    from topotrain.config.topology import layout
    from topotrain.tools.diagnostics.finding import as_text
    from topotrain.tools.diagnostics.job_checks import findings

    job = load_job(conf, sets, None, None, needs_program=False)
    topology = layout(job.cluster)
    names = [host.strip() for host in hosts.split(",") if host.strip()]
    found = list(findings(job, topology, rendezvous or job.rendezvous, names, os.environ))
    checks = {"checks": [asdict(one) for one in found]}
    print(json.dumps(checks, indent=2) if as_json else as_text(found))
    raise Exit(int(any(one.state == "failed" for one in found)))


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
        refused = isinstance(error, Refused) or getattr(error, "config", False)
        raise (BadInput if refused else CommandFailed)(str(error)) from None


def _terminated(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
