"""The commands `topotrain launch NAME`, one for each launcher."""

import json
import os
from typing import Annotated, Any

from typer import Context, Exit, Option, Typer

from topotrain.launch.launchers import KUBERNETES, LAUNCHERS, LOCAL, OPTIONS, check_name, check_options, flag_of
from topotrain.launch.launchers import launch as start
from topotrain.tools.cli import job_arguments as arguments
from topotrain.tools.cli.command_line import PanelGroup, ProgramCommand, add
from topotrain.tools.cli.run import run

HELP = "Train a job under another tool that starts processes."
EXAMPLES = {
    LOCAL: "examples/conf/allreduce.conf train.py",
    "torchrun": "--hosts node1,node2 --id night7 examples/conf/hogwild.conf train.py",
    "slurm": "--nodes 2 --pass=--partition=cpu --dry-run examples/conf/downpour.conf train.py",
    "srun": "--pass=--partition=cpu examples/conf/allreduce.conf train.py",
    "submitit": "--pass=timeout_min=60 examples/conf/allreduce.conf train.py",
    "mpirun": "--hosts node1,node2 examples/conf/allreduce.conf train.py",
    "ray": "--pass=strategy=STRICT_SPREAD examples/conf/hogwild.conf train.py",
    KUBERNETES: "--image registry/train:1 --output job.yaml examples/conf/downpour.conf train.py",
}


class LauncherCommand(ProgramCommand):
    """The command of one launcher. Its help has no options of the others."""

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters; those of other launchers are hidden, and refused by name."""
        known = {flag_of(option) for option in OPTIONS}
        taken = {flag_of(option) for option in LAUNCHERS[self.name or ""].takes}
        found: list[Any] = list(super().get_params(ctx))
        for parameter in found:
            if parameter.opts[0] in known - taken:
                parameter.hidden = True
        return found


class LauncherGroup(PanelGroup):
    """The group of launchers; a wrong name lists them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of the first word, a launcher's name."""
        if not ctx.resilient_parsing:
            check_name(args[0])
        return super().resolve_command(ctx, args)


launch = Typer(cls=LauncherGroup, help=HELP, no_args_is_help=True, rich_markup_mode=None)


def _launch(
    context: Context,
    conf: arguments.Conf,
    program: arguments.Program = None,
    args: arguments.Args = None,
    sets: arguments.Sets = None,
    emulate: arguments.Emulate = "",
    rendezvous: Annotated[
        str, Option(metavar="URL", help="The store in which the units meet; without it, a folder in the workspace.")
    ] = "",
    nodes: Annotated[int, Option(metavar="N", min=0, help="On how many machines; 0: the launcher decides.")] = 0,
    hosts: Annotated[str, Option(metavar="A,B", help="Names of the machines.")] = "",
    passed: Annotated[
        list[str] | None,
        Option("--pass", metavar="WORD", help="An option for the tool itself, unchanged; may be given several times."),
    ] = None,
    job_id: Annotated[
        str, Option("--id", metavar="NAME", help="The job's name in the store; without it, a new one.")
    ] = "",
    wait: Annotated[bool, Option("--wait", help="Follow the batch job to its end, and end with its code.")] = False,
    max_restarts: Annotated[
        int, Option(metavar="N", min=0, help="All units may start again N times after a failure.")
    ] = 0,
    image: Annotated[str, Option(metavar="NAME", help="The container's image, with the script in it.")] = "",
    namespace: Annotated[str, Option(metavar="NAME", help="The namespace of the job; without it, `default`.")] = "",
    form: Annotated[str, Option("--format", metavar="KIND", help="trainjob (as usual) or jobset.")] = "",
    output: Annotated[str, Option(metavar="FILE", help="Where the manifests are written; without it, to stdout.")] = "",
    with_secret: Annotated[bool, Option("--with-secret", help="Write the job's secret, too.")] = False,
    requeue: Annotated[
        bool, Option("--requeue", help="Before the time limit save, queue the job again, and go on.")
    ] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Print what would be submitted; write nothing.")] = False,
    logs: arguments.Logs = None,
    metrics: arguments.Metrics = "",
    as_json: arguments.AsJson = False,
) -> None:
    name = context.info_name or ""
    from topotrain.config.topology import layout
    from topotrain.launch.launchers.submission import LaunchOptions

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
        unit_words=arguments.words_for_unit(logs, metrics),
    )
    if name == LOCAL and not dry_run:
        # Options of other launchers must not be ignored in silence.
        check_options(name, options)
        run(conf, program, args, sets, emulate=emulate, logs=logs, metrics=metrics, as_json=as_json)
    job = arguments.with_link(arguments.load_job(conf, sets, program, args, elsewhere=name == KUBERNETES), emulate)
    started = start(name, job, layout(job.cluster), options, os.environ, dry_run)
    print(json.dumps(started.as_data(), indent=2) if as_json else started.text, end="\n" if as_json else "")
    raise Exit(started.code)


for _name, _entry in LAUNCHERS.items():
    _text = f"{_entry.says}\n\nExample:\n  topotrain launch {_name} {EXAMPLES[_name]}\n"
    add(launch, _launch, _name, _text, cls=LauncherCommand)
