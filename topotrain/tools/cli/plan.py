"""The command `topotrain plan`."""

import json
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from topotrain.config.job import ConfigError, Job
from topotrain.tools.cli import job_arguments as arguments
from topotrain.tools.cli.job_arguments import BadInput, CommandFailed, check_writable, load_job, writing

if TYPE_CHECKING:
    from topotrain.tools.plan.layout_plan import PlannedSchema
    from topotrain.tools.plan.model_cut import CutPlan


def plan(
    conf: arguments.Conf,
    program: arguments.Program = None,
    args: arguments.Args = None,
    sets: arguments.Sets = None,
    as_json: Annotated[bool, Option("--json", help="Print the plan as JSON on stdout.")] = False,
    inputs: Annotated[
        list[str] | None,
        Option(
            "--input",
            metavar="SIZES",
            help="Split models: sizes of one argument of the forward, samples first, such as 32x1x8x8, 32x64:int64 or "
            "mask=32x64:bool; one option per tensor, instead of what the loader's first batch tells.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        Option(metavar="FILE", help="Split models: draw the cut graph (.png, .pdf or .svg; needs topotrain[plot])."),
    ] = None,
    measure: Annotated[
        bool,
        Option(
            "--measure",
            help="With placement: kAuto, time the modules on this machine instead of estimating, and "
            "print the choice as partition blocks.",
        ),
    ] = False,
) -> None:
    """Show which unit runs which worker and server; nothing is started.

    With PROGRAM also slices and memory, for which the script runs up to `tt.prepare`. Where one model is split over the
    workers of a group, the cut graph is shown, too.

    Example:
      topotrain plan examples/conf/hogwild.conf --json
    """
    from topotrain.tools.plan.layout_plan import plan as rehearse

    job = load_job(conf, sets, program, args, needs_program=False)
    # Without the model first: a cluster block that cannot work is found before the script runs.
    found = rehearse(job)
    if program is None:
        if plot or measure or inputs:
            raise BadInput("--input, --plot and --measure are about a model: give a PROGRAM")
        print(json.dumps(found.as_data(), indent=2) if as_json else found.explain())
        return
    # Before the script runs, which may take minutes.
    _drawable(plot)
    schema, cut = _seen(job, inputs or (), measure)
    found = rehearse(job, schema)
    if cut is not None:
        found = replace(found, memory=())  # the cut has its own estimate, with owners and activations
    if cut is None and (plot or measure or inputs):
        raise BadInput("--input, --plot and --measure are about a split model: this job splits none")
    if as_json:
        more = {} if cut is None else {"cut": cut.as_data()}
        print(json.dumps(found.as_data() | more, indent=2))
    else:
        print("\n\n".join([found.explain(), *([] if cut is None else [cut.explain()])]))
    if cut is not None and plot is not None:
        from topotrain.tools.plan import graph_plot

        with writing("", plot):
            graph_plot.draw(cut.bill, plot, job.name)


def _seen(job: Job, inputs: Sequence[str], measure: bool) -> "tuple[PlannedSchema, CutPlan | None]":
    """Run the script up to `tt.prepare`; return its model's schema and cut."""
    from topotrain.parallel.api.dry_run import look
    from topotrain.tools.plan.layout_plan import PlannedSchema

    try:
        seen = look(job.program, job.args)
    except ConfigError:
        raise
    # The script's own error, with its traceback: this is no bad input, so the code is 1.
    except Exception:
        raise CommandFailed(f"{job.program} failed before `tt.prepare`\n{traceback.format_exc()}") from None
    momentum, names = seen.momentum(job.updater), seen.optimizer_names(job.updater)
    if job.cluster.nworkers_per_group > 1:
        from topotrain.tools.plan.model_cut import cut_of

        cut = cut_of(job, seen.model, seen.loader, inputs, measure, seen.state_factor())
        if cut is not None:
            return PlannedSchema(cut.parameters, seen.state_factor(), momentum, names), cut.plan
    return PlannedSchema(seen.parts().parameters, seen.state_factor(), momentum, names, seen.trained()), None


def _drawable(file: Path | None) -> None:
    """Check before the script runs that a picture can be drawn."""
    from topotrain.tools.monitor import loss_curves

    if file is not None:
        if file.suffix not in loss_curves.ENDINGS:
            raise BadInput(f"--plot {file}: must end with {', '.join(loss_curves.ENDINGS)}")
        if not loss_curves.available():
            raise BadInput(loss_curves.MISSING)
        check_writable("--plot", file)
