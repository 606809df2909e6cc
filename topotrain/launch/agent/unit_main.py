"""Main program of a unit: it reads its settings and its job, and supervises.

The supervision is in `supervisor.py`.
"""

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from topotrain.config import job_file
from topotrain.config.job import ConfigError
from topotrain.config.topology import layout
from topotrain.core.events import Failed, to_json
from topotrain.launch import UnitPlace, add_arguments
from topotrain.launch.agent import forkserver
from topotrain.launch.agent.children import AttemptInfo, EntryPoints, UnitConfig
from topotrain.launch.agent.supervisor import Supervisor
from topotrain.launch.agent.worker_threads import allowed_cores, worker_threads
from topotrain.launch.agent.workspace import JOB_FILE, TOKEN_FILE

_STDOUT = 1


def main(arguments: Sequence[str]) -> int:
    """Run a unit; the options are those of `launch.UnitPlace`. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="topotrain unit", allow_abbrev=False)
    add_arguments(parser, os.environ)
    defaults = EntryPoints()
    parser.add_argument("--worker-call", default=defaults.worker)
    parser.add_argument("--server-call", default=defaults.server)
    parser.add_argument("--preload", nargs="*", default=defaults.preload)
    parser.add_argument("--life", type=int, default=0)
    parser.add_argument("--resume", default="")
    parser.add_argument("--absent", default="")
    parser.add_argument("--why", default="")
    parser.add_argument("--stdin", type=int, default=-1)
    given = parser.parse_args(arguments)
    place = UnitPlace(**{f.name: getattr(given, f.name) for f in fields(UnitPlace)})
    try:
        calls = EntryPoints(given.worker_call, given.server_call, tuple(given.preload))
        absent = frozenset(int(group) for group in given.absent.split(",") if group)
        return supervise(place, calls, AttemptInfo(given.life, given.resume, absent, given.why), given.stdin)
    except (ConfigError, OSError) as error:
        wrong = isinstance(error, ConfigError)
        failed = Failed(f"unit {place.rank}", "config" if wrong else "internal", str(error), traceback.format_exc())
        # `Supervisor.run` may have made it non-blocking before the error.
        os.set_blocking(_STDOUT, True)
        print(to_json(failed), flush=True)
        return 2 if wrong else 1


def supervise(place: UnitPlace, calls: EntryPoints, attempt: AttemptInfo, stdin: int = -1) -> int:
    """Read the job, then start and watch the unit at `place`; return its exit code.

    stdin: for the main worker. Raises ConfigError or OSError.
    """
    run_dir = Path(place.run_dir)
    job = job_file.load(run_dir / JOB_FILE)
    topology = layout(job.cluster, place.host_numbers, place.link_mbit)
    units = len(topology.units)
    if place.nprocs != units:
        raise ConfigError("nprocs", place.nprocs, f"must be {units}, the number of units of this job")
    if not 0 <= place.rank < units:
        raise ConfigError("rank", place.rank, f"must be 0 to {units - 1}")
    with contextlib.ExitStack() as stack:
        # Under `topotrain run` all units of the host share one, which has loaded torch once.
        path = place.forkserver
        if not path:
            own = forkserver.start(run_dir / f"forkserver-unit-{place.rank}.log", calls.preload)
            stack.callback(own.close)
            path = own.path
        # The forkserver's folder is private, and short enough for the path of a Unix socket.
        sockets = place.sockets or os.path.dirname(path)
        threads = worker_threads(job, topology, place.rank, os.environ, allowed_cores())
        unit = UnitConfig(
            job=job,
            unit=place.rank,
            rendezvous=place.rendezvous,
            run_dir=run_dir,
            sockets=sockets,
            hosts=topology.hosts,
            host=place.host,
            attempt=attempt,
            threads=threads,
            link_mbit=place.link_mbit,
            token=(run_dir / TOKEN_FILE).read_bytes().hex(),
            stdin=stdin,
        )
        client = forkserver.ForkserverClient(path)
        stack.callback(client.close)
        # Closed in reverse order: without its connection the forkserver kills what is left before it ends.
        return Supervisor(unit, topology, calls, client, owns_forkserver=not place.forkserver).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
