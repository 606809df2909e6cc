"""A cut graph told in stretches: steps that follow one another in one place, which is how a reader thinks of it."""

from dataclasses import dataclass

from topotrain.parallel.program.split_program import Kind, Layout, Program, Step, Where


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps in order, all with results in the same layout."""

    number: int
    layout: Layout
    steps: tuple[Step, ...]

    def title(self) -> str:
        """What is in it: its modules, or its functions where it has none; only the ends of a long list."""
        modules = [step.target for step in self.steps if step.kind is Kind.MODULE]
        names = list(dict.fromkeys(modules)) or [step.name for step in self.steps]
        return ", ".join(names) if len(names) <= 3 else f"{names[0]} … {names[-1]}"


def stretches(program: Program) -> tuple[Stretch, ...]:
    """The steps that compute; arguments and parameters are no work."""
    found: list[list[Step]] = []
    for step in program.steps:
        if step.kind in (Kind.INPUT, Kind.ATTRIBUTE):
            continue
        if found and _place(found[-1][-1]) == _place(step):
            found[-1].append(step)
        else:
            found.append([step])
    return tuple(Stretch(number, steps[0].layout, tuple(steps)) for number, steps in enumerate(found))


def told(layout: Layout) -> str:
    """A layout in words: "samples", "features (dim 1)", "worker 2"."""
    words = {
        Where.BATCH: "samples",
        Where.FEATURE: f"features (dim {layout.dim})",
        Where.AT: f"worker {layout.worker}",
        Where.WHOLE: "all of it",
        Where.SAME: "the same",
        Where.OWN: "its own",
    }
    return words[layout.where]


def _place(step: Step) -> Layout:
    """Where its work is done: what a worker computes from its own share belongs to the samples."""
    return Layout(Where.BATCH) if step.layout.where is Where.OWN else step.layout
