"""The command `topotrain predict`: how fast a job would be, before it runs."""

from pathlib import Path
from typing import Annotated

from typer import Option

from topotrain.config.job import ConfigError
from topotrain.tools.cli import job_arguments as arguments
from topotrain.tools.cli.job_arguments import check_writable, load_job, with_link, writing
from topotrain.tools.monitor.terminal import progress_line, say

_MOST_SEED = 2**32 - 1
_LATE_S = 3.0
"""Seconds after which a rehearsal is shown."""

LinkOption = Annotated[
    str, Option("--link", metavar="LINK", help="The link of each host, such as 100mbit,20ms; its processes share it.")
]
Memory = Annotated[
    str, Option("--memory", metavar="SIZE", help="Memory of each host, such as 16GB; what needs more is refused.")
]
Mtbf = Annotated[str, Option("--mtbf", metavar="TIME", help="Mean time between two failures of a host, such as 30d.")]
Cores = Annotated[str, Option("--cores", metavar="N", help="Cores of each host; else those of the probed machine.")]


def predict(
    conf: arguments.Conf,
    program: arguments.Program = None,
    args: arguments.Args = None,
    probe: Annotated[
        Path | None,
        Option(metavar="FILE", help="What `topotrain probe` has written; without it and without PROGRAM, probe.json."),
    ] = None,
    hosts: Annotated[
        str, Option(metavar="N", help="Hosts of the job; else one, or with --link one for each unit.")
    ] = "",
    link: LinkOption = "",
    cores: Cores = "",
    straggler: Annotated[str, Option(metavar="NxF", help="Worker N computes F times as long, such as 1x4.")] = "",
    memory: Memory = "",
    mtbf: Mtbf = "",
    emulate: arguments.Emulate = "",
    sets: arguments.Sets = None,
    seed: Annotated[int, Option(metavar="N", min=0, max=_MOST_SEED, help="The seed of the random draws.")] = 0,
    trace: Annotated[
        Path | None, Option(metavar="FILE", help="Write a step for Perfetto, as `run --profile` does.")
    ] = None,
    as_json: arguments.AsJson = False,
    forkserver: arguments.Forkserver = "",
) -> None:
    """Predict how fast a job would be on some hosts, and why.

    PROGRAM is measured here for some of its steps; with a probe it does not run. With --emulate it is the job that `run
    --emulate` would run on this one machine.

    Example:
      topotrain predict --link 1gbit,1ms examples/conf/downpour.conf examples/digits.py
      topotrain predict --probe probe.json --link 1gbit,1ms examples/conf/downpour.conf
    """
    if link and emulate:
        raise ConfigError("--emulate", emulate, "must not be given with --link: units are on one machine, or on hosts")
    from topotrain.tools.cli.performance.probe_command import probe_of
    from topotrain.tools.prediction import predict as predictions
    from topotrain.tools.prediction.machines import parse_machines
    from topotrain.tools.probe.probe_file import load_probe

    machines = parse_machines(hosts, link, straggler, memory, mtbf, cores)
    job = with_link(load_job(conf, sets, program, args, needs_program=False), emulate)
    if trace is not None:
        check_writable("--trace", trace)
    if program is not None and probe is None:
        found = probe_of(job.program, job.args, forkserver=forkserver)
    else:
        file = probe or Path("probe.json")
        found = load_probe(file)
        # A probe has no folder of its program.
        if job.program and Path(job.program).name != found.program:
            say(f"warning: {file} was made with {found.program}, and the job has the program {job.program}")
    with writing("", trace), progress_line(late_s=_LATE_S) as line:

        def stepped(made: int, most: int) -> None:
            line.show(f"rehearsing: {made:,} steps of all workers, of at most {most:,}")

        predicted = predictions.predict(job, found, machines, seed, trace, stepped)
    print(predicted.to_json() if as_json else predicted.explain())
