"""The command `topotrain predict`: how fast a job would be, before it runs."""

from pathlib import Path
from typing import Annotated

import typer

from topotrain.config.job import ConfigError
from topotrain.tools.cli.job_arguments import (
    AsJson,
    BadInput,
    Conf,
    Emulate,
    Sets,
    check_writable,
    load_job,
    refusing,
    with_link,
)
from topotrain.tools.cli.performance.shown_search import shown_rehearsal
from topotrain.tools.monitor.monitored_run import complain

EXAMPLE = """\b
Example:
  topotrain predict examples/conf/downpour.conf --probe probe.json --link 1gbit,1ms
"""
_MOST_SEED = 2**32 - 1

Probe = Annotated[Path, typer.Option("--probe", metavar="FILE", help="What `topotrain probe` has written.")]
Hosts = Annotated[
    str, typer.Option("--hosts", metavar="N", help="Of the job; else one, or with --link one for each unit.")
]
LinkOption = Annotated[
    str, typer.Option("--link", metavar="LINK", help="Of each host, such as 100mbit,20ms; shared by its processes.")
]
Straggler = Annotated[
    str, typer.Option("--straggler", metavar="NxF", help="Worker N computes F times as long, such as 1x4.")
]
Memory = Annotated[str, typer.Option("--memory", metavar="SIZE", help="Of each host, such as 16GB.")]
Mtbf = Annotated[str, typer.Option("--mtbf", metavar="TIME", help="Mean time between failures of a host, such as 30d.")]
Cores = Annotated[str, typer.Option("--cores", metavar="N", help="Of each host; else those of the probed machine.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("predict", epilog=EXAMPLE)(predict)


def predict(
    conf: Conf,
    probe: Probe = Path("probe.json"),
    hosts: Hosts = "",
    link: LinkOption = "",
    cores: Cores = "",
    straggler: Straggler = "",
    memory: Memory = "",
    mtbf: Mtbf = "",
    emulate: Emulate = "",
    sets: Sets = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, max=_MOST_SEED, help="Of the random draws.")] = 0,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Write a step for Perfetto, as `run --profile` does.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict how fast a job would be on some hosts, and why.

    The program does not run. Its times come from a probe. With --emulate it is the job that `run --emulate` would run
    on this one machine.
    """
    with refusing():
        if link and emulate:
            raise ConfigError(
                "--emulate", emulate, "must not be given with --link: units are on one machine, or on hosts"
            )
        try:
            from topotrain.tools.prediction.machines import parse_machines
            from topotrain.tools.probe.probe_file import load_probe
        except ImportError:
            raise BadInput("this installation has no predictions (package topotrain.tools.prediction)") from None
        machines = parse_machines(hosts, link, straggler, memory, mtbf, cores)
        job = with_link(load_job(conf, sets, None, None, needs_program=False), emulate)
        found = load_probe(probe)
        if trace is not None:
            check_writable("--trace", trace)
        from topotrain.tools.cli.performance.probe_notes import note_other_program
        from topotrain.tools.prediction import predict as predictions
        from topotrain.tools.prediction.prediction_text import prediction_text

        note_other_program(found, probe, job.program)
        try:
            with shown_rehearsal() as listener:
                predicted = predictions.predict(job, found, machines, seed, trace, listener)
        except OSError as error:
            complain(f"{trace}: cannot be written ({error.strerror})")
            raise typer.Exit(1) from None
        print(predicted.to_json() if as_json else prediction_text(predicted))
