"""A prediction as text: a short table, and sentences that can be checked."""

from collections.abc import Iterator, Sequence

from topotrain.tools.plan.layout_plan import columns
from topotrain.tools.prediction.prediction import LinkLoad, Prediction

_SHOWN = 4
_BUSY, _IDLE = 0.8, 0.3
"""A resource that is busy for a larger share of the time bounds the job. Below the other one it does not matter."""


def prediction_text(found: Prediction) -> str:
    return "\n".join(
        [f"{found.framework}, {found.processes} workers and servers", "", *_table(found), "", *_told(found)]
    )


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"


def size(nbytes: float) -> str:
    """Return bytes as text, in units of 1000."""
    for unit in ("bytes", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:,.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.4g} GB"


def _table(found: Prediction) -> Iterator[str]:
    parts = found.parts
    rows = [
        ("step", f"{milliseconds(found.step_s)}, of twenty one takes {milliseconds(found.step_p95_s)}"),
        ("samples", f"{found.samples_per_s:,.4g} per second"),
    ]
    whole = parts.total or 1.0
    for name, text in (
        ("compute", "script, forward and backward"),
        ("push", "until the last gradient, and the commit, are on their servers"),
        ("wait", "for those of other workers"),
        ("apply", "servers add up, agree and update"),
        ("pull", "until the mean, and the new values, are here"),
    ):
        seconds = getattr(parts, name)
        rows.append((f"  {name}", f"{milliseconds(seconds):>10}  {seconds / whole:4.0%}  {text}"))
    width = max(len(name) for name, _ in rows)
    yield from (f"{name.ljust(width)}  {text}" for name, text in rows)


def _told(found: Prediction) -> Iterator[str]:
    for resource in found.busiest[:1]:
        tail = ": it bounds the job" if resource.share > _BUSY else ""
        if resource.share < _IDLE:
            tail = ": no resource is full, and messages on their way take the rest of the time"
        yield f"{resource.name}: busy for {resource.share:.0%} of the time{tail}"
    rest = ", ".join(f"{each.name} {each.share:.0%}" for each in found.busiest[1:_SHOWN] if each.share >= 0.005)
    if rest:
        yield f"after it: {rest}"
    for wait in found.waits[:1]:
        yield f"{wait.process} is waited for most: {milliseconds(wait.seconds)} of a step"
    yield from _links(found.links)
    yield _staleness(found)
    most = max(found.memory, key=lambda each: each.nbytes, default=None)
    if most is not None:
        yield f"memory: {size(most.nbytes)} of training state in {most.process}, the most of all; without activations"
    yield f"start: {found.start_s:,.3g} s until the first step"
    if found.goodput is not None:
        yield (
            f"failures: {found.goodput:.1%} of the steps are left, {found.useful_samples_per_s:,.4g} samples per second"
        )
    yield _how(found)


def _links(links: Sequence[LinkLoad]) -> Iterator[str]:
    far = [link for link in links if link.between_hosts]
    where = "between hosts" if far else "between processes of a host"
    shown = sorted(far or links, key=lambda link: -link.nbytes)
    if not shown:
        yield "links: no messages between processes"
        return
    whole = sum(link.nbytes for link in shown)
    yield f"links: {size(whole)} and {sum(link.messages for link in shown):,.4g} messages in a step {where}; the most:"
    rows = [(f"  {link.name}", size(link.nbytes), f"{link.messages:,.4g} messages") for link in shown[:_SHOWN]]
    yield from columns(("  link", "in a step", ""), rows)[1:]


def _staleness(found: Prediction) -> str:
    stale = found.staleness
    if found.same_as_one_process:
        return "updates: as in one process: synchronous, and nothing is lossy"
    if not stale.max:
        return "updates: not those of one process; no gradient is stale"
    return (
        f"updates: not those of one process; a gradient is {stale.mean:.3g} updates old, of twenty one "
        f"{stale.p95:g}, at most {stale.max:g}"
    )


def _how(found: Prediction) -> str:
    how = f"rehearsed with the job's own servers and workers in virtual time (seed {found.seed})"
    if found.error is None:
        none = f"no error was measured for {found.processes} processes on such hosts"
        return f"how: {how}\nerror: {none}, only for two workers on the probed one"
    return f"how: {how}; expect the step within {found.error:.0%}"
