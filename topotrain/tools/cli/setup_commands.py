"""The commands `topotrain init` and `topotrain doctor`."""

import json
import os
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from topotrain.tools.cli.job_arguments import AsJson, BadInput, Sets, job_file, load_job
from topotrain.tools.starter_job import CLUSTERS, DEFAULT, write_starter


def init(
    folder: Annotated[
        Path, Argument(metavar="FOLDER", help="Where to write; made if it is missing.", show_default=False)
    ] = Path(),
    framework: Annotated[str, Option(metavar="NAME", help=f"Of the cluster block: {', '.join(CLUSTERS)}.")] = DEFAULT,
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
    rendezvous: Annotated[str, Option(metavar="URL", help="Where the units meet, instead of the file's field.")] = "",
    hosts: Annotated[str, Option(metavar="A,B", help="Names of the machines of the job.")] = "",
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
    from topotrain.tools.diagnostics.job_checks import as_text, exit_code, findings

    job = load_job(conf, sets, None, None, needs_program=False)
    topology = layout(job.cluster)
    names = [host.strip() for host in hosts.split(",") if host.strip()]
    found = list(findings(job, topology, rendezvous or job.rendezvous, names, os.environ))
    checks = {"checks": [one.as_data() for one in found]}
    print(json.dumps(checks, indent=2) if as_json else as_text(found))
    raise Exit(exit_code(found))
