"""The end of a worker's part in a job: the last messages, and the result."""

import time
from pathlib import Path

import torch

from topotrain.comm.transport import ConnectionLost, PeerUnreachable
from topotrain.config import async_momentum
from topotrain.config.job import ConfigError, NonFinite
from topotrain.core.client.client import JobError, PeerLost
from topotrain.core.events import Final, Finished, Metrics, Notice
from topotrain.core.server.nonfinite import all_finite
from topotrain.training import context as process
from topotrain.training.context import Context
from topotrain.training.final_parameters import FINAL, NotSaved, release, save_final
from topotrain.training.parameters.flat_parameters import ModelParts
from topotrain.training.parameters.last_writes import LastWrites, end_script
from topotrain.training.worker import Worker


class Unfinished(Exception):
    """The job's result is not written; the text has a hint how the job can go on."""


def is_complete(here: Context) -> bool:
    """Whether the script is in the middle of no loop, so that it may end here."""
    in_epochs = here.continuing is not None and here.continuing.in_epochs
    return not (in_epochs or (here.loader is not None and here.loader.under_way))


def finish(here: Context) -> None:
    """After the script: send the last messages; worker (0,0) saves the result."""
    process.use()
    worker = here.worker
    here.logged.send()
    if worker is None and here.tables is None:
        raise ConfigError("program", None, "ended without calling topotrain.prepare: there was nothing to train")
    # Before any message: the error of a script that trained nothing must not look like a finished job.
    if here.training is not None:
        here.training.check()
    for extension in here.extensions:
        # Before the worker says that it has finished: the servers then expect nothing more of it.
        extension.stop_pushing(here)
    if worker is None:
        _finish_without_model(here)
        return
    if here.loader is not None:
        # A loop that was left by `break` still holds leases that others may be waiting for.
        here.loader.close()
    if here.continuing is not None:
        here.continuing.finish()
    if here.split is not None:
        for index in {index for index, _ in worker.buffers.edited()} - worker.mirror.own:
            accepted = "was changed after the last step, and the model is split: change it in `with tt.assign(model):`"
            raise ConfigError("model parameter", worker.parts.parameters[index].name, accepted)
    writes = end_script(worker)
    try:
        _save(here, worker, writes)
    except NotSaved as error:
        raise Unfinished(f"the job's result is lost: {error}; {_resume_hint(here)}") from None
    worker.end_job()


def _save(here: Context, worker: Worker, writes: LastWrites) -> None:
    """Write the job's result. Raises NotSaved, SpoiledResult."""
    # On every worker, because tables end with a barrier of all of them.
    more = _exported(here)
    if here.is_main:
        if not worker.tally.steps:
            here.emit(Notice(str(here.me), _no_step(here)))
        started = time.monotonic()
        parts, lost = writes.result(worker) if here.split is None else (here.split.whole(worker), "")
        path = here.workspace / FINAL
        spoiled = _spoiled(here, parts)
        complaint = _complaint(here, worker, spoiled, path) if spoiled else lost
        if not complaint:
            _measure(here)
        save_final(parts, path, more)
        here.emit(Final(str(path), time.monotonic() - started))
        # Only now, so that the file can be examined.
        if complaint:
            raise SpoiledResult(complaint)


def _exported(here: Context) -> dict[str, torch.Tensor]:
    """Weights of the result that the worker's buffers do not hold."""
    return {name: value for extension in here.extensions for name, value in extension.export(here).items()}


def _no_step(here: Context) -> str:
    if here.place.topology.worker_groups > 1:
        return "this worker made no step: its group had no batch, or the program never called optimizer.step()"
    return "the program never called optimizer.step(): nothing was trained"


class SpoiledResult(Exception):
    """The job has ended, and its parameters are not finite, or not the script's."""


def _spoiled(here: Context, parts: ModelParts) -> list[str]:
    """Names of trained parameters that are not finite, and not allowed to be so."""
    if here.place.job.nonfinite is NonFinite.kAllow:
        return []
    # A frozen parameter has the value that the script gave it, such as a mask of -inf.
    described = zip(parts.parameters, parts.tensors, strict=True)
    # Without a copy: a process may have no memory for one more parameter.
    return [known.name for known, value in described if known.trainable and not all_finite(value.detach().reshape(-1))]


def _complaint(here: Context, worker: Worker, spoiled: list[str], path: Path) -> str:
    more = f" and {len(spoiled) - 1} more" if len(spoiled) > 1 else ""
    hint = async_momentum.explanation(here.place.job, here.place.topology, worker.momentum)
    why = hint or "use a smaller learning rate, or clip_norm"
    return (
        f"the final parameters are not finite: {spoiled[0]}{more}, though every gradient that was applied was; they "
        f"are in {path} as they are, and no metric was computed (nonfinite: kAllow would let it pass). {why}"
    )


def _resume_hint(here: Context) -> str:
    """A hint for a job that could not write its result."""
    hints = (extension.resume_hint(here.workspace) for extension in here.extensions)
    return next(filter(None, hints), "there is no snapshot from which the job can go on")


def _measure(here: Context) -> None:
    values = {name: float(m() if callable(m) else m) for name, m in here.metrics.items()}
    if values:
        here.emit(Metrics(values))


def _finish_without_model(here: Context) -> None:
    """End a script that has used a key-value store and nothing else."""
    _exported(here)
    if here.is_main:
        _measure(here)
    sent, received = (0, 0) if here.connections is None else here.connections.traffic()
    link = 0 if here.connections is None else here.connections.link_traffic()[0]
    here.emit(Finished(str(here.me), 0, 0, 0.0, 0, sent, received, bytes_link=link))


def close(here: Context, finished: bool) -> None:
    """Close all connections; finished: the script has ended, and `finish` went well."""
    # Of a script that has failed.
    here.logged.send()
    here.at_close.close()
    for adopted in here.adopted.values():
        adopted.release()
    # The room that `tt.prepare` reserved. After `finish` there is none left.
    if here.is_main and not finished:
        release(here.workspace / FINAL)
    # Before the memory is unmapped that it has pinned for a GPU.
    if here.worker is not None:
        here.worker.mirror.close()
        # A backward from here on is the script's own.
        here.worker.path.private = True
    for extension in here.extensions:
        extension.close(here)
    if here.connections is not None:
        here.connections.close(finished=finished)


def kind_of(error: BaseException) -> str:
    """The kind of failure (`events.Failed`) of a worker's exception."""
    if isinstance(error, ConfigError) or (isinstance(error, JobError) and error.config):
        return "config"
    # Not "program": it may be about another worker that left its loop with an exception, which explains more.
    if isinstance(error, JobError):
        return "quarantine" if error.quarantine else "internal"
    # The connection to another process is a consequence of its death, and no fault of this script.
    return "peer" if isinstance(error, PeerLost | PeerUnreachable | ConnectionLost) else "program"
