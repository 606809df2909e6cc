"""External tools that run in the foreground: find, start, signal, and wait.

The tool runs in its own session, so Ctrl-C does not reach it directly.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from topotrain.comm.security.secret import load_secret
from topotrain.comm.store import StoreError, open_store, within
from topotrain.comm.store.discovery.job_registry import Registry
from topotrain.comm.store.store_url import parse
from topotrain.config.job import ConfigError
from topotrain.launch import FORKSERVER_VARIABLE
from topotrain.launch.agent.orphans import end
from topotrain.launch.agent.stop_signals import handled
from topotrain.launch.grace_period import grace
from topotrain.launch.launchers.env_tables import LaunchInfo
from topotrain.launch.launchers.submission import LaunchResult, Submission
from topotrain.launch.multinode.node_info import JobEnd, with_job

PATIENCE_S = 40.0
"""Seconds from SIGTERM to SIGKILL: Slurm and torchrun give their processes 30 s."""
ANSWER_S = 60.0
"""Seconds for a command that asks a tool, which waits for the controller of a cluster."""
_STORE_S = 5.0


class StopRequested(Exception):
    """A signal that ends a job has arrived; `number` is its number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def say(text: str) -> None:
    """Print a line to stderr."""
    print(f"topotrain: {text}", file=sys.stderr, flush=True)


def find(program: str, install: str) -> str:
    """Return the path of `program`. Raises ConfigError with the advice to install it."""
    path = shutil.which(program)
    if path is None:
        raise ConfigError("launcher", program, f"is not on PATH: {install}")
    return path


def ask(words: Sequence[str], environ: Mapping[str, str] = os.environ) -> "subprocess.CompletedProcess[str]":
    """Return the output of a command that asks a tool. A late one is killed and fails."""
    try:
        return subprocess.run(
            words, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_S
        )
    except subprocess.TimeoutExpired:
        late = f"no answer within {ANSWER_S:g} s"
        say(f"`{shlex.join(words)}` was ended ({late}): does the controller of the cluster run?")
        return subprocess.CompletedProcess(words, 124, "", late)


class CommandTool(ABC):
    """A `submission.LauncherTool` that is one foreground command."""

    install = ""
    """The advice for a user without the program."""

    @abstractmethod
    def words(self, submission: Submission) -> list[str]:
        """Return the command. Raises ConfigError for options that the tool does not have."""

    def environ_here(self, submission: Submission, program: str) -> Mapping[str, str] | None:
        """Return the environment of the units on this host.

        None: it is not certain that there are any.

        program: the path of the tool.
        """
        return None

    def command(self, submission: Submission) -> str:
        """Return the command line, and the variables that it inherits."""
        return submission.show(shlex.join(self.words(submission)))

    def start(self, submission: Submission) -> LaunchResult:
        """Run the command to its end. With torchrun it runs this node's units only.

        Raises ConfigError where the program is missing.
        """
        program, *rest = self.words(submission)
        found = find(program, self.install)
        submission.write()
        environ = self.environ_here(submission, found)
        with contextlib.nullcontext() if environ is None else forkserver_here(submission, environ):
            return in_front([found, *rest], submission)


@contextlib.contextmanager
def forkserver_here(submission: Submission, environ: Mapping[str, str]) -> Iterator[None]:
    """Load torch for the units on this host while the tool starts.

    environ: the environment of the units.
    """
    from topotrain.launch.shared_forkserver import join

    start = LaunchInfo(0, submission.units, submission.rendezvous)
    shared = None if environ.get(FORKSERVER_VARIABLE) else join(start.scope(environ), environ)
    try:
        yield
    finally:
        if shared is not None:
            shared.leave()


def in_front(words: Sequence[str], submission: Submission) -> LaunchResult:
    """Run a tool that starts all units of a job to its end."""
    try:
        code = run(words, submission)
    except StopRequested as came:
        return LaunchResult(128 + came.number)
    return LaunchResult(agreed(submission.rendezvous, code))


def agreed(rendezvous: str, code: int, environ: Mapping[str, str] = os.environ) -> int:
    """Return the exit code that the units of a failed job have agreed on."""
    # srun returns 143 when it had to end the other units, and torchrun returns 1 for every failure.
    end = ending(rendezvous, environ=environ) if code else None
    return code if end is None else end.code or code


def ending(rendezvous: str, said: JobEnd | None = None, environ: Mapping[str, str] = os.environ) -> JobEnd | None:
    """Return how the job has ended, if it is in the store; set `said` if it is not."""
    try:
        with contextlib.closing(open_store(with_job(rendezvous, ""), load_secret(environ))) as store:
            # Each start of the job has a prefix of its own, which unit 0 has named here.
            job = parse(rendezvous).job
            word = store.get(f"jobs/{job}/run")
            if word is None:
                return None
            run = within(store, f"jobs/{job}.{word.decode()}")
            if said is not None:
                run.compare_and_set("end", None, said.dumped())
            end = run.get("end")
    except StoreError:  # a store that unit 0 has served ends with it
        return None
    return JobEnd.loaded(end) if end else None


def ask_for_end(rendezvous: str, environ: Mapping[str, str]) -> bool:
    """Ask a job's units over their store to save and end; return whether that works."""
    try:
        with contextlib.closing(open_store(with_job(rendezvous, ""), load_secret(environ), _STORE_S)) as store:
            Registry(store).stop(parse(rendezvous).job)
    except StoreError as error:
        say(f"the units cannot be asked for a last snapshot: {error}")
        return False
    return True


def run(words: Sequence[str], submission: Submission) -> int:
    """Run a tool to its end; return its exit code.

    Raises StopRequested after a signal, when the tool has ended.
    """
    where, environ = sys.stderr.fileno() if submission.options.json else None, {**os.environ, **submission.environ}
    with interruptible() as gate:
        gate.close()  # a signal inside Popen would leave an unknown process behind
        process = subprocess.Popen(words, env=environ, stdin=subprocess.DEVNULL, stdout=where, start_new_session=True)
        try:
            # A signal that came during Popen is raised here, when there is a process to end.
            gate.open()
            code = process.wait()
        except StopRequested as came:
            _end(process, submission, grace(submission.job, came.number))
            raise
        except BaseException:
            end(process)
            raise
    # As a shell reports a process that a signal has ended.
    return code if code >= 0 else 128 - code


def _end(process: "subprocess.Popen[bytes]", submission: Submission, grace_s: float) -> None:
    try:
        # Units that are asked over the store have the whole time for a last snapshot, and then end by themselves.
        if grace_s and ask_for_end(submission.rendezvous, {**os.environ, **submission.environ}):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s + PATIENCE_S)
        # SIGTERM ends all units with each of these tools; at Ctrl-C srun would ask for a second one.
        process.terminate()
        process.wait(PATIENCE_S)
    # A second signal means that the user does not want to wait.
    except (StopRequested, subprocess.TimeoutExpired):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        end(process)


@dataclass(slots=True)
class SignalGate:
    """Holds signals back while it is closed. came: the last one; 0 for none."""

    closed: bool = False
    came: int = 0

    def close(self) -> None:
        """Hold signals back from here on."""
        self.closed = True

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Raise StopRequested, or hold the signal back."""
        self.came = number
        if not self.closed:
            raise StopRequested(number)

    def open(self) -> None:
        """Stop holding signals back, and raise StopRequested for one that arrived."""
        self.closed = False
        if self.came:
            raise StopRequested(self.came)


@contextlib.contextmanager
def interruptible() -> Iterator[SignalGate]:
    """Raise StopRequested at each signal that ends a job, as `stop_signals.handled`."""
    gate = SignalGate()
    with handled(gate.on_signal):
        yield gate
