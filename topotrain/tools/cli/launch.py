"""The command `topotrain launch`."""

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from topotrain.config.job import Job
from topotrain.tools.cli.export_arguments import Logs, Metrics, announce, exports_of, words_for_unit
from topotrain.tools.cli.job_arguments import (
    Args,
    AsJson,
    BadInput,
    Conf,
    Emulate,
    Program,
    Sets,
    load_job,
    refusing,
    with_link,
)
from topotrain.tools.cli.performance.automatic_job import chosen
from topotrain.tools.monitor.monitored_run import RunOptions, show, train

if TYPE_CHECKING:
    from topotrain.config.topology import Topology

EXAMPLE = """\b
Example:
  topotrain launch slurm --nodes 2 --pass=--partition=cpu --dry-run examples/conf/downpour.conf train.py
"""


def launch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of a launcher; a wrong one lists the known ones.")],
    conf: Conf,
    program: Program = None,
    args: Args = None,
    sets: Sets = None,
    emulate: Emulate = "",
    rendezvous: Annotated[
        str, typer.Option("--rendezvous", metavar="URL", help="Where the units meet, instead of the workspace.")
    ] = "",
    nodes: Annotated[int, typer.Option("--nodes", min=0, help="On how many machines; 0: the launcher decides.")] = 0,
    hosts: Annotated[str, typer.Option("--hosts", metavar="A,B", help="Names of the machines.")] = "",
    passed: Annotated[
        list[str] | None,
        typer.Option("--pass", metavar="WORD", help="For the launcher's own tool, unchanged; may be given repeatedly."),
    ] = None,
    job_id: Annotated[str, typer.Option("--id", help="The job's name where units meet, instead of a new one.")] = "",
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow a queued job to its end, and end with its code.")
    ] = False,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", metavar="N", min=0, help="ray, kubernetes: all may restart N times.")
    ] = 0,
    image: Annotated[str, typer.Option("--image", help="kubernetes: of the container, with the script in it.")] = "",
    namespace: Annotated[str, typer.Option("--namespace", help="kubernetes: instead of `default`.")] = "",
    form: Annotated[str, typer.Option("--format", metavar="KIND", help="kubernetes: trainjob or jobset.")] = "",
    output: Annotated[str, typer.Option("--output", metavar="FILE", help="kubernetes: instead of stdout.")] = "",
    with_secret: Annotated[bool, typer.Option("--with-secret", help="kubernetes: include the job's secret.")] = False,
    requeue: Annotated[
        bool,
        typer.Option("--requeue", help="slurm, submitit: before the time limit save, queue the job again, and go on."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted; write nothing.")] = False,
    logs: Logs = None,
    metrics: Metrics = "",
    as_json: AsJson = False,
) -> None:
    """Train a job under another tool that starts processes.

    A batch job is queued, and its number printed; all others run in front.
    """
    with refusing():
        from topotrain.comm.store import StoreError
        from topotrain.config.topology import layout
        from topotrain.launch import launchers
        from topotrain.launch.launchers.submission import LaunchOptions
        from topotrain.tools.cli.resume import asked_for

        launchers.check_name(name)
        job = with_link(load_job(conf, sets, program, args, elsewhere=name == launchers.KUBERNETES), emulate)
        if name == launchers.LOCAL and not dry_run:
            job = chosen(job, asked_for(job))
        topology = layout(job.cluster)
        options = LaunchOptions(
            rendezvous=rendezvous,
            nodes=nodes,
            hosts=tuple(host for host in hosts.split(",") if host),
            extra=tuple(passed or ()),
            wait=wait,
            id=job_id,
            json=as_json,
            max_restarts=max_restarts,
            image=image,
            namespace=namespace,
            format=form,
            output=output,
            with_secret=with_secret,
            requeue=requeue,
            unit_words=words_for_unit(logs or (), metrics),
        )
        try:
            if name == launchers.LOCAL and not dry_run:
                # Options of other launchers must not be ignored in silence.
                launchers.check_special(name, options)
                launchers.check_local(options)
                with exports_of(job, logs or (), metrics) as exports:
                    announce(exports)
                    raise typer.Exit(_launch_here(job, topology, RunOptions(as_json=as_json, exports=exports)))
            started = launchers.launch(name, job, topology, options, os.environ, dry_run)
        except StoreError as error:
            raise BadInput(str(error)) from None
        print(json.dumps(started.as_data(), indent=2) if as_json else started.text, end="\n" if as_json else "")
        raise typer.Exit(started.code)


def _launch_here(job: Job, topology: "Topology", options: RunOptions) -> int:
    from topotrain.tools.cli.resume import asked_for
    from topotrain.tools.monitor.result_tables import console

    terminal = console(stderr=True)
    result = train(job, topology, terminal, replace(options, resume=asked_for(job)))
    show(result, terminal, False, options.as_json, None)
    return result.outcome.code
