"""The processes of a job from the inside: what the forkserver calls in a fresh worker or server process."""

import contextlib
import os
import runpy
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from topotrain import textproto
from topotrain.events import Failed, Final, Finished, Metrics, Notice, Serving
from topotrain.exchange import JobError, PeerLost
from topotrain.front import api  # noqa: F401  # loaded before the fork: every worker needs it
from topotrain.front.context import Context, enter
from topotrain.front.final import save_final
from topotrain.front.profile import Profile
from topotrain.host import WorkerRoads, serve
from topotrain.job import ConfigError
from topotrain.launch.child import Control, exit_code
from topotrain.roads import Place
from topotrain.topology import Address, Role


def run_servers(spec: dict[str, Any], channel: socket.socket, fds: Sequence[int]) -> int:
    """Be the servers of one unit."""
    control = Control(channel)
    addresses = [Address(Role.SERVER, group, index) for group, index in spec["servers"]]
    profile = Profile(Path(spec["run_dir"]), addresses[0])
    serving, trouble = _voices(control, addresses[0])
    sent, received = serve(_place(spec), addresses, serving, trouble, profile.server)
    profile.leave()
    for number, me in enumerate(addresses):
        # The process counts as a whole; its first server speaks for it.
        own = (sent, received) if number == 0 else (0, 0)
        control.emit(Finished(str(me), 0, 0, 0.0, 0, *own))
    return 0


def _voices(control: Control, first: Address) -> tuple[Callable[[Address, tuple[str, ...]], None], Callable[[], None]]:
    """What the servers of a process are to call: when they can be reached, and when one cannot go on."""

    def serving(me: Address, urls: tuple[str, ...]) -> None:
        control.emit(Serving(str(me), urls, os.getpid()))

    def trouble() -> None:
        text = traceback.format_exc()
        control.emit(Failed(str(first), "internal", text.strip().splitlines()[-1], text))
        os._exit(1)

    return serving, trouble


def _place(spec: dict[str, Any]) -> Place:
    job = textproto.loads(spec["job"], "the job")
    return Place.of(
        job, spec["rendezvous"], Path(spec["run_dir"]) / "token", Path(spec["sockets"]), spec["incarnation"]
    )


def run_worker(spec: dict[str, Any], channel: socket.socket, fds: Sequence[int]) -> int:
    """Be one worker: run the user's program in its place in the job."""
    control = Control(channel)
    ((group, index),) = spec["workers"]
    place = _place(spec)
    me = Address(Role.WORKER, group, index)
    shared = fds[0] if spec["shared_memfd"] else None
    profile = Profile(Path(spec["run_dir"]), me)
    here = Context(place, me, Path(place.job.workspace).absolute(), control.emit, shared, spans=profile.worker())
    serving, trouble = _voices(control, Address(Role.SERVER, 0, me.index))
    here.roads_of = partial(WorkerRoads, serving=serving, trouble=trouble, recorder=profile.server)
    enter(here)
    # The main worker's error is shown with the job's end; on its stderr the terminal would have it twice.
    log = Path(spec["log"]) if here.is_main else None
    code = _guarded(here, log, lambda: _run_program(spec["program"], spec["args"]))
    if code == 0:
        code = _guarded(here, log, lambda: _finish(here))
    profile.leave()
    if here.worker is not None:
        here.worker.mirror.close()  # before the memory that it has pinned goes
    if here.roads is not None:
        here.roads.close(finished=code == 0)
    for group, index in spec["servers"] if code == 0 else ():
        control.emit(Finished(str(Address(Role.SERVER, group, index)), 0, 0, 0.0, 0, 0, 0))
    return code


def _run_program(program: str, args: Sequence[str]) -> None:
    sys.argv = [program, *args]
    sys.path[0:1] = [str(Path(program).resolve().parent)]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as leaving:
        code = exit_code(leaving.code)
        if code:
            trace = _users_part(leaving.__traceback__)
            raise RuntimeError(f"the program left with exit code {code}").with_traceback(trace) from None


def _guarded(here: Context, log: Path | None, do: Callable[[], None]) -> int:
    """Run; what is raised is told, written to `log` (None: to stderr), and becomes an exit code."""
    try:
        do()
        return 0
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        kind = _kind(error)
        if here.worker is not None:
            here.worker.exchange.leave()  # what the others hear from here on is no cause
        text = "".join(traceback.format_exception(error.with_traceback(_users_part(error.__traceback__))))
        _write(text, log)
        words = str(error) if kind == "config" else traceback.format_exception_only(error)[-1].strip()
        here.emit(Failed(str(here.me), kind, words, text if error.__traceback__ or kind != "config" else ""))
        return 2 if kind == "config" else 1


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the program's own first line on: the calls that lead there are the same for everybody."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.run_path.__code__.co_filename):
        trace = trace.tb_next
    return trace


def _write(text: str, log: Path | None) -> None:
    if log is None:
        print(text, file=sys.stderr, end="", flush=True)
        return
    with contextlib.suppress(OSError), log.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def _kind(error: BaseException) -> str:
    if isinstance(error, ConfigError) or (isinstance(error, JobError) and error.config):
        return "config"
    if isinstance(error, JobError):  # may be about a worker that left its loop with an exception, which explains more
        return "internal"
    return "peer" if isinstance(error, PeerLost) else "program"


def _finish(here: Context) -> None:
    """After the program: goodbye to the servers; worker (0,0) brings the result home."""
    worker = here.worker
    if worker is None:
        raise ConfigError("program", None, "ended without calling topotrain.prepare: there was nothing to train")
    if here.loader is not None:
        here.loader.close()
    worker.finish()
    if here.is_main:
        if not worker.tally.steps:
            here.emit(Notice(str(here.me), "the program never called optimizer.step(): nothing was trained"))
        started = time.monotonic()
        worker.take_final()
        values = {name: float(m() if callable(m) else m) for name, m in here.metrics.items()}
        path = here.workspace / "final.safetensors"
        save_final(worker.parts, path)
        if values:
            here.emit(Metrics(values))
        here.emit(Final(str(path), time.monotonic() - started))
    if here.finishing is not None:
        here.finishing()
