"""Segments of a program: consecutive steps in the same layout, for display."""

from dataclasses import dataclass

from topotrain.parallel.program.split_program import LocationKind, Program, ProgramStep, StepKind, ValueLocation


@dataclass(frozen=True, slots=True)
class LayoutSegment:
    """Consecutive steps with results in the same layout."""

    number: int
    layout: ValueLocation
    steps: tuple[ProgramStep, ...]

    def title(self) -> str:
        """Return the names of its modules, or of its functions if it has no modules."""
        modules = [step.target for step in self.steps if step.kind is StepKind.MODULE]
        names = list(dict.fromkeys(modules)) or [step.name for step in self.steps]
        return ", ".join(names) if len(names) <= 3 else f"{names[0]} … {names[-1]}"


def stretches(program: Program) -> tuple[LayoutSegment, ...]:
    """Return the segments of a program, without arguments and parameters."""
    found: list[list[ProgramStep]] = []
    for step in program.steps:
        if step.kind in (StepKind.INPUT, StepKind.ATTRIBUTE):
            continue
        if found and _place(found[-1][-1]) == _place(step):
            found[-1].append(step)
        else:
            found.append([step])
    return tuple(LayoutSegment(number, steps[0].layout, tuple(steps)) for number, steps in enumerate(found))


def words_of(layout: ValueLocation) -> str:
    """Return a layout in words: "samples", "features (dim 1)", "worker 2"."""
    words = {
        LocationKind.BATCH: "samples",
        LocationKind.FEATURE: f"features (dim {layout.dim})",
        LocationKind.AT: f"worker {layout.worker}",
        LocationKind.WHOLE: "all of it",
        LocationKind.SAME: "the same",
        LocationKind.OWN: "its own",
    }
    return words[layout.where]


def _place(step: ProgramStep) -> ValueLocation:
    # Values that each worker computes from its own share count as computed by samples.
    return ValueLocation(LocationKind.BATCH) if step.layout.where is LocationKind.OWN else step.layout
