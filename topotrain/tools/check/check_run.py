"""Run a script in plain Python and under a cluster block, and compare the two."""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from topotrain.config.job import ChangeMethod, Cluster, Compression, Grads, Job, LRGen, Updater, UpdaterType
from topotrain.config.python_module import as_program
from topotrain.core.events import Event, Metrics, Notice
from topotrain.tools.check.compared_records import Comparison, Record, compare
from topotrain.tools.check.observed_script import Observation
from topotrain.tools.probe.forked_processes import ForkedProcesses, ProcessEnded, forked_processes

_MODULE = "topotrain.tools.check.observed_script"
_SIZES = ("nworkers_per_group", "nworkers_per_procs", "nservers_per_group", "nservers_per_procs")


class RunFailed(Exception):
    """The script, or the job, has not come to its end."""


def skeleton(job: Job) -> Job:
    """Return a job's exact part: a group, or an island that exchanges after each step.

    Raises ConfigError: the job has no such part.
    """
    cluster, empty = job.cluster, Job()
    if cluster.auto:
        cluster = Cluster(nworkers_per_group=2, server_worker_separate=True)
    elif cluster.nworker_groups > 1 or cluster.nserver_groups > 1 or cluster.outer is not None:
        # An outer step of SGD with rate 1 takes over what the island has learned.
        outer = cluster.outer and Updater(UpdaterType.kSGD, learning_rate=LRGen(ChangeMethod.kFixed, base_lr=1.0))
        sizes = {name: getattr(cluster, name) for name in _SIZES}
        separate = cluster.server_worker_separate or outer is not None
        cluster = Cluster(**sizes, server_worker_separate=separate, transport=cluster.transport, outer=outer)
        job = replace(job, correction=empty.correction, shard=empty.shard, apply=empty.apply, pull=empty.pull)
    cluster = replace(cluster, compression=Compression.kNone, backup=0)
    return replace(job, cluster=cluster, warmup_steps=0, start_groups=0, resume=False, snapshot_s=0.0, rendezvous="")


def check(job: Job, steps: int, still: bool, served: str, stage: Callable[[str], None]) -> Comparison:
    """Run the script twice and its job once, and compare. All processes end with it.

    Args:
        steps: to compare. 0: the whole script.
        still: dropout and batch normalization as in evaluation.
        served: the socket of a running forkserver; "": one is started.
        stage: shows what happens.

    Raises:
        RunFailed: the script fails, or the job does.
        KeyboardInterrupt: Ctrl-C.
    """
    with forked_processes(served) as processes:
        runs, folder = _Runs(job, processes), processes.folder
        stage("checking: the plain script")
        plain = runs.plain(Observation(str(folder / "plain"), steps, still=still))
        stage("checking: the plain script, with other rounding")
        rounded = runs.plain(Observation(str(folder / "rounded"), steps, True, still))
        stage("checking: the job")
        record, notices = runs.job(Observation(str(folder / "job"), steps, still=still))
        workers = skeleton(job).cluster.nworkers_per_group
        found = compare(plain, rounded, record, workers, job.grads is Grads.kVisible)
        return replace(found, notices=notices)


@dataclass(frozen=True)
class _Runs:
    """The runs of one check, in a folder."""

    request: Job
    processes: ForkedProcesses

    def plain(self, wanted: Observation) -> Record:
        """Run the script in a process of its own, as plain Python."""
        program, args = self.request.program, list(self.request.args)
        spec = {"observation": asdict(wanted), "program": program, "args": args}
        with closing(self.processes.start(f"{_MODULE}:run_plain", spec, Path(wanted.record).name)) as process:
            try:
                process.answer()
            except ProcessEnded as error:
                raise RunFailed(f"plain Python cannot run {program}: {error}") from None
        record = Record.load(Path(wanted.record))
        if not record.notes["steps"]:
            raise RunFailed(f"{program} makes no step with an optimizer that it gave to tt.prepare")
        return record

    def job(self, wanted: Observation) -> tuple[Record, tuple[str, ...]]:
        job, workspace = skeleton(self.request), self.processes.folder / "workspace"
        words = (json.dumps(asdict(wanted)), job.program, *job.args)
        cluster = replace(job.cluster, workspace=str(workspace))
        job = replace(job, program=as_program(_MODULE), args=words, cluster=cluster)
        reported: dict[str, float] = {}
        notices: dict[str, None] = {}

        def on_event(event: Event) -> None:
            if isinstance(event, Metrics):
                reported.update(event.values)
            elif isinstance(event, Notice):
                notices[event.text] = None

        failed = self.processes.run_job(job, on_event)
        if failed:
            raise RunFailed(f"the job does not run {self.request.program}: {failed}")
        return Record.load(Path(wanted.record), workspace / "final.safetensors", reported), tuple(notices)
