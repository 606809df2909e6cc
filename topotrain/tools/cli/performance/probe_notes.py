"""Notes on stderr about the program and the machine of a given probe."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topotrain.tools.probe.probe_file import Probe


def note_other_program(probe: "Probe", file: Path, program: str) -> None:
    """Warn that a probe was made with a program of another name than the job's.

    The job's may be "".
    """
    from topotrain.tools.probe.probe_origin import is_of_other_file

    if is_of_other_file(probe, program):
        _say(f"warning: {file} was made with {probe.program}, and the job has the program {program}")


def note_not_run(probe: "Probe", file: Path, program: str) -> None:
    """Say that a program is not run, because its figures are those of a probe."""
    if program:
        _say(f"all figures are those of {file}, made with {probe.program}: {program} is not run")


def note_other_machine(probe: "Probe", file: Path) -> None:
    """Warn that a probe was made on another machine, or with other versions."""
    from topotrain.tools.probe.probe_origin import unlike_this_machine

    differs = unlike_this_machine(probe)
    if differs:
        _say(f"warning: {file} was not made here, so its figures may not hold: {differs}")


def _say(text: str) -> None:
    print(f"topotrain: {text}", file=sys.stderr, flush=True)
