"""The command `topotrain replay`.

It runs a recorded job again with the same decisions, or compares two recordings.
"""

import json
import re
import shlex
import sys
import zipfile
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from topotrain.config.job import ConfigError, Job
from topotrain.config.plain_text import printable
from topotrain.tools.cli import job_arguments as arguments
from topotrain.tools.cli.job_arguments import (
    BadInput,
    CommandFailed,
    check_program,
    check_writable,
    completion,
    writing,
)
from topotrain.tools.monitor.monitored_run import train
from topotrain.tools.monitor.terminal import say

if TYPE_CHECKING:
    import torch

    from topotrain.tools.replay.decision_file import DecisionFile
    from topotrain.tools.replay.replay_run import Until

_UNTIL = re.compile(r"(?:(\d{1,6}):)?(\d{1,15})")


def is_archive(path: str) -> bool:
    """Whether this may be a recording."""
    return Path(path).is_file() and zipfile.is_zipfile(path)


def replay(
    file: Annotated[
        Path,
        Argument(metavar="FILE", help="Of `run --record`.", show_default=False, autocompletion=completion(is_archive)),
    ],
    program: arguments.Program = None,
    args: arguments.Args = None,
    until: Annotated[
        str,
        Option(metavar="VERSION", help="Stop at this version of server group 0; G:VERSION is one of server group G."),
    ] = "",
    dump: Annotated[
        list[str] | None,
        Option(
            metavar="PARAM", help="Print this parameter at that version, or at the end; may be given several times."
        ),
    ] = None,
    out: Annotated[Path | None, Option(metavar="FILE", help="Write what --dump names, as safetensors.")] = None,
    compare: Annotated[
        Path | None,
        Option(metavar="FILE", help="Run nothing: print the first decision in which this recording differs."),
    ] = None,
    workspace: Annotated[str, Option(metavar="DIR", help="The workspace of the replay, instead of FILE.replay.")] = "",
    recorded: Annotated[
        bool,
        Option(
            "--recorded",
            help="Run the program and arguments that FILE names, which are code, instead of PROGRAM and ARGS.",
        ),
    ] = False,
    as_json: arguments.AsJson = False,
    quiet: arguments.Quiet = False,
    forkserver: arguments.Forkserver = "",
) -> None:
    """Run a recorded job again, to the same bits.

    The same processes run the same program, and each server makes its decisions in the recorded order. A recording
    may come from another user, so its own program runs with --recorded only.

    Example:
      topotrain run --record job.record examples/conf/downpour.conf examples/digits.py
      topotrain replay --until 40 --dump 0.bias job.record examples/digits.py
      topotrain replay job.record --compare other.record
    """
    from topotrain.tools.replay.decision_file import load_decisions

    record = load_decisions(file)
    if compare is not None:
        if program or until or dump or out is not None or workspace or recorded:
            text = "leave out PROGRAM, --recorded, --until, --dump, --out and --workspace"
            raise BadInput(f"--compare runs nothing: {text}")
        raise Exit(_compare(record, load_decisions(compare), file, compare, as_json))
    if out is not None and not dump:
        raise BadInput("--out is for the parameters that --dump names: give one")
    check_asked(record.job, program, recorded)
    job = replayed_job(record.job, program, args, workspace or f"{file}.replay")
    stop = parse_until(until, record)
    if out is not None:
        check_writable("--out", out)
    from topotrain.config.topology import layout
    from topotrain.tools.replay.replay_run import ReplayRun, ReplayStopped

    _warn_of_versions(record)
    with closing(ReplayRun(record, stop)) as run, suppress(ReplayStopped):
        result = train(job, layout(job.cluster), run, quiet=quiet, as_json=as_json, forkserver=forkserver, folder=run)
        if result.outcome.code:
            raise Exit(result.outcome.code)
        if stop is not None:
            raise CommandFailed(f"the job has ended before version {stop[1]} of server group {stop[0]}")
    values = _dumped(record, job, run.folder, stop, dump or ())
    if out is not None:
        from topotrain.training.final_parameters import to_bytes

        with writing("--out", out):
            out.write_bytes(to_bytes({name: value.contiguous() for name, value in values.items()}))
    group, version = stop or (0, record.last_version(0))
    if as_json:
        dumped = {name: value.tolist() for name, value in values.items()}
        more = {"whole": stop is None, "workspace": job.workspace, "dump": dumped}
        print(json.dumps({"group": group, "version": version, **more}, indent=2))
        return
    for name, value in values.items():
        print(f"{name} at version {version}:\n{value}")
    if not quiet:
        where = f"stopped at version {version} of server group {group}" if stop else f"all {version} versions"
        print(f"replayed, as recorded: {where}", file=sys.stderr)


def check_asked(job: Job, program: str | None, recorded: bool) -> None:
    """Raise BadInput unless the user says which program may run."""
    if recorded and program:
        raise BadInput("--recorded runs the program of the recording: leave out PROGRAM")
    if not recorded and not program:
        names = printable(f"{job.program} {shlex.join(job.args)}")
        raise BadInput(f"give PROGRAM, or --recorded to run what the recording names, which is: {names}")


def replayed_job(recorded: Job, program: str | None, args: list[str] | None, workspace: str) -> Job:
    """Return the recorded job with this program, in a workspace of its own.

    Raises BadInput.
    """
    words = tuple(args or ()) if program else recorded.args
    job = replace(recorded, program=program or recorded.program, args=words, rendezvous="", resume=False)
    check_program(job.program)
    # The result of the recorded job stays where it is.
    return replace(job, cluster=replace(job.cluster, workspace=workspace))


def parse_until(text: str, record: "DecisionFile") -> "Until | None":
    """Return the server group and version of "40" or "1:40"; None: the end.

    A recording of an interrupted job ends at its last version.

    Raises:
        ConfigError: the recording has no such version.
    """
    if not text:
        last = 0 if record.whole else record.last_version(0)
        if not record.whole and not last:
            raise ConfigError("", None, "the recorded job was interrupted before its first version", "replay")
        return None if record.whole else (0, last)
    found, groups = _UNTIL.fullmatch(text), max(server.group for server in record.servers) + 1
    group, version = (int(found[1] or 0), int(found[2])) if found else (0, 0)
    last = record.last_version(group) if group < groups else 0
    if not 1 <= version <= last:
        several = f", or GROUP:VERSION with a server group up to {groups - 1}" if groups > 1 else ""
        accepted = f"must be a version from 1 to {last or record.last_version(0)}{several}"
        raise ConfigError("--until", text, accepted)
    return group, version


def _dumped(
    record: "DecisionFile", job: Job, folder: Path, until: "Until | None", names: Sequence[str]
) -> "dict[str, torch.Tensor]":
    """Return the named parameters at the end of the replay. Raises ConfigError.

    folder: where the servers have left their values.
    """
    from topotrain.config.private_files import read_bytes
    from topotrain.extensions.decision_record.process_order import joined_values, values_of
    from topotrain.training.final_parameters import from_bytes

    if not names:
        return {}
    if until is None:
        path = Path(job.workspace) / "final.safetensors"
        values = from_bytes(read_bytes(path), str(path))
    else:
        paths = [folder / values_of(server) for server in record.servers if server.group == until[0]]
        shapes: list[tuple[str, list[int], list[int]]] = json.loads(paths[0].with_suffix(".json").read_text())
        values = joined_values(shapes, [from_bytes(read_bytes(path), str(path)) for path in paths])
    missing = [name for name in names if name not in values]
    if missing:
        raise ConfigError("--dump", missing[0], f"must be a parameter of the model: {', '.join(values)}")
    return {name: values[name] for name in names}


def _warn_of_versions(record: "DecisionFile") -> None:
    """Warn where another version may compute other bits."""
    from importlib.metadata import version

    for name in ("torch", "topotrain"):
        known, here = record.versions.get(name, ""), version(name)
        if known and known != here:
            say(f"warning: recorded with {name} {known}, and this is {here}: the bits may differ")


def _compare(first: "DecisionFile", second: "DecisionFile", name: Path, other: Path, as_json: bool) -> int:
    """Show the first difference; return 1 if there is one."""
    from topotrain.tools.replay.compare_records import first_difference

    found = first_difference(first, second)
    if as_json:
        print(json.dumps({"same": found is None, "difference": None if found is None else asdict(found)}, indent=2))
    elif found is None:
        print("both recordings have the same decisions")
    else:
        print(f"{found.server} decides differently behind version {found.version}:")
        print(f"  {name}: {found.first}\n  {other}: {found.second}")
    return 0 if found is None else 1
