"""How a worker's part in a job ends, whoever started its process: goodbye to the servers, and the result comes home."""

import time

from topotrain.buffers import ModelParts
from topotrain.events import Final, Finished, Metrics, Notice
from topotrain.exchange import JobError, PeerLost
from topotrain.front.context import Context
from topotrain.front.final import save_final
from topotrain.front.homecoming import bring_home, say_goodbye
from topotrain.front.splitting import Split
from topotrain.job import ConfigError
from topotrain.wire import Broken, Unreachable
from topotrain.worker import Worker


def is_complete(here: Context) -> bool:
    """Whether the script, should it end here, has done its part: it is not in the middle of a loop."""
    in_epochs = here.continuing is not None and here.continuing.in_epochs
    return not (in_epochs or (here.loader is not None and here.loader.under_way))


def finish(here: Context) -> None:
    """After the program: goodbye to the servers; worker (0,0) brings the result home."""
    worker = here.worker
    if worker is None and here.tables is None:
        raise ConfigError("program", None, "ended without calling topotrain.prepare: there was nothing to train")
    say_goodbye(here)
    if worker is None:
        _finish_without_model(here)
        return
    if here.loader is not None:
        here.loader.close()
    if here.continuing is not None:
        here.continuing.finish()
    worker.finish()
    more = bring_home(here)
    if here.is_main:
        if not worker.tally.steps:
            here.emit(Notice(str(here.me), "the program never called optimizer.step(): nothing was trained"))
        started = time.monotonic()
        parts = _whole(here, worker)
        path = here.workspace / "final.safetensors"
        _measure(here)
        save_final(parts, path, more)
        here.emit(Final(str(path), time.monotonic() - started))
    if here.finishing is not None:
        here.finishing()


def _whole(here: Context, worker: Worker) -> ModelParts:
    """The job's result stands in the model."""
    if here.split is not None:
        cut: Split = here.split
        return cut.whole(worker)
    worker.take_final()
    return worker.parts


def _measure(here: Context) -> None:
    values = {name: float(m() if callable(m) else m) for name, m in here.metrics.items()}
    if values:
        here.emit(Metrics(values))


def _finish_without_model(here: Context) -> None:
    """The program has used a key-value store and nothing else."""
    bring_home(here)
    if here.is_main:
        _measure(here)
    sent, received = (0, 0) if here.roads is None else here.roads.traffic()
    here.emit(Finished(str(here.me), 0, 0, 0.0, 0, sent, received))


def close(here: Context, finished: bool) -> None:
    """Leave the roads; finished: the script came to its end, and `finish` went well."""
    if here.worker is not None:
        here.worker.mirror.close()  # before the memory that it has pinned goes
    if here.tables is not None and here.tables.rows is not None:
        here.tables.rows.release()
    if here.roads is not None:
        here.roads.close(finished=finished)


def kind_of(error: BaseException) -> str:
    """What kind of failure (`events.Failed`) an exception of a worker is."""
    if isinstance(error, ConfigError) or (isinstance(error, JobError) and error.config):
        return "config"
    if isinstance(error, JobError):  # may be about a worker that left its loop with an exception, which explains more
        return "quarantine" if error.quarantine else "internal"
    return "peer" if isinstance(error, PeerLost | Unreachable | Broken) else "program"
