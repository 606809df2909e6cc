"""A short history of a job of two worker groups, for the tests of what is made from histories."""

from topotrain.core.events import Event, Incident, Logged, Resources, ServerLoad, Started, StepDone, Traffic
from topotrain.tools.recording.job_history import JobHistory
from topotrain.tools.recording.recorded_lines import RecordingHeader, TimedEvent

STARTED = 1_800_000_000.0
JOB = {"name": "digits", "framework": "Downpour", "workspace": "workspace/digits", "block": "cluster { }"}
UNIT = {"rank": 0, "host": "localhost", "workers": [[0, 0], [1, 0]], "servers": [[0, 0]]}
HEADER = RecordingHeader(started=STARTED, job=JOB, layout={"units": [UNIT], "server_group_of_worker_group": [0, 0]})


def step(who: str, number: int, loss: float | None = 0.75, stale: float = 1.5) -> StepDone:
    """A step of a worker: 10 samples in half a second."""
    return StepDone(
        who, number / 2, number, 10 * number, loss, stale, 4, 1, 1, staleness_p95=3.0, epoch=0, progress=number / 48
    )


def events(steps: int = 12) -> list[Event]:
    """What the processes tell until the last step."""
    started = [Started(who, pid) for pid, who in enumerate(("worker 0/0", "worker 1/0", "server 0/0"), 70)]
    stepped = [step(who, number) for number in range(1, steps + 1) for who in ("worker 0/0", "worker 1/0")]
    return [
        *started,
        *stepped,
        Logged("worker 0/0", steps / 2, steps, {'accuracy "of" all': 0.5}),
        Resources("server 0/0", 72, 5_000_000, 1.0),
        ServerLoad("server 0/0", 30, 30, 0.5),
        *(Traffic("worker 0/0", {"server 0/0": 1000 * count}) for count in range(1, 5)),
        Incident(3, "worker 9/9", "worker 9/9 was killed", "it starts again", 1.0),
    ]


def sampled(steps: int = 12) -> JobHistory:
    """The history of these events, with one each quarter of a second."""
    history = JobHistory()
    history.add(TimedEvent(0.0, HEADER))
    for number, event in enumerate(events(steps)):
        history.add(TimedEvent(number / 4, event))
    return history
