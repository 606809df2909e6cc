"""A side of a comparison: a set of processes that stays alive and runs so many steps when it is told to.

All sides of a table live at once; those whose turn it is not are blocked in a read. A side of topotrain is a real job,
started by `topotrain run`; a peer is two or more processes of ordinary PyTorch.
"""

import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.link import Namespaces
from benchmarks.processor import Turn, processor_seconds
from benchmarks.record import ROOT, environment, say

STEPPER = Path(__file__).parent / "programs" / "stepper.py"
START_S = 120.0
PATIENCE_S = 240.0
END_S = 20.0


class Refused(Exception):
    """A side cannot be measured; the text says why."""


def topotrain(*words: str, folder: Path = ROOT) -> str:
    """Run a command of topotrain in a folder; what it prints on stdout. Raises Refused."""
    command = [sys.executable, "-m", "topotrain", *words]
    done = subprocess.run(command, env=environment(), cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise Refused(f"topotrain {words[0]}: {said[-1].removeprefix('topotrain: error: ')}")
    return done.stdout


def cluster(
    workers: int = 2,
    servers: int = 1,
    groups: int = 1,
    server_groups: int = 1,
    separate: bool = True,
    inside: str = "",
    top: str = "",
) -> str:
    """The text of a conf; counts are per group. `inside` goes into the cluster block, `top` outside."""
    return f"""{top}
cluster {{
  nworker_groups: {groups}
  nserver_groups: {server_groups}
  nworkers_per_group: {workers}
  nservers_per_group: {servers}
  server_worker_separate: {str(separate).lower()}
  {inside}
}}
"""


def refusal(conf: str) -> str:
    """Why topotrain refuses a conf, in one line; empty if it does not."""
    from topotrain.config import job_file
    from topotrain.config.job import ConfigError

    try:
        job_file.loads(conf, "the conf")
    except ConfigError as error:
        return str(error).splitlines()[0]
    return ""


def job_command(folder: Path, conf: str, *words: str) -> list[str]:
    """The command line of a job in a folder, where its conf is written, without the script.

    Args:
        words: the command of topotrain and its options.
    Raises Refused, also for a conf that topotrain does not take (yet).
    """
    if why := refusal(conf):
        raise Refused(why)
    file = folder / "job.conf"
    file.write_text(conf)
    return [sys.executable, "-m", "topotrain", *words, "--set", f"cluster.workspace={folder / 'work'}", str(file)]


@dataclass(slots=True)
class Side:
    """Living processes; use it as what `Sides.job` or `Sides.peer` return."""

    name: str
    processes: list["subprocess.Popen[bytes]"]
    folder: Path
    lines: list[IO[str]] = field(default_factory=list)
    sockets: list[socket.socket] = field(default_factory=list)
    hellos: list[dict[str, Any]] = field(default_factory=list)
    patience_s: float = PATIENCE_S

    def meet(self, listener: socket.socket, workers: int) -> None:
        """Wait for all workers to say that they have taken their first step. Raises Refused."""
        deadline = time.monotonic() + min(START_S, self.patience_s)
        listener.settimeout(0.2)
        while len(self.sockets) < workers:
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                connection.settimeout(self.patience_s)
                self.sockets.append(connection)
                self.lines.append(connection.makefile("r"))
            self._alive(time.monotonic() > deadline)
        for line in self.lines:
            hello = self._read(line)
            if "refused" in hello:
                raise Refused(hello["refused"])
            self.hellos.append(hello)

    def _alive(self, late: bool) -> None:
        if late or any(process.poll() not in (None, 0) for process in self.processes):
            raise Refused(self._last_words())

    def _last_words(self) -> str:
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
        texts = [file.read_text(errors="replace") for file in sorted(self.folder.glob("*.err"))]
        lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
        told = [line for line in lines if "Error" in line or "error:" in line] or lines
        codes = ", ".join(str(process.poll()) for process in self.processes)
        return told[-1] if told else f"{self.name} left no word (exit codes {codes})"

    def _read(self, line: IO[str]) -> dict[str, Any]:
        try:
            text = line.readline()
        except TimeoutError:
            raise Refused(f"{self.name} did not answer within {self.patience_s:g} s") from None
        if not text:
            raise Refused(f"{self.name} ended: {self._last_words()}")
        return dict(json.loads(text))

    def ask(self, **order: Any) -> list[dict[str, Any]]:
        """Send an order to all workers; their answers. Raises Refused."""
        for connection in self.sockets:
            try:
                connection.sendall(json.dumps(order).encode() + b"\n")
            except OSError:
                raise Refused(f"{self.name} ended: {self._last_words()}") from None
        return [self._read(line) for line in self.lines]

    def run(self, steps: int, **more: Any) -> float:
        """Seconds per step, from the order to the last worker's answer."""
        began = time.perf_counter()
        self.ask(steps=steps, **more)
        return (time.perf_counter() - began) / steps

    def turn(self, steps: int, **more: Any) -> Turn:
        """As `run`, with the processor seconds per step of all processes of the side."""
        pids = self.pids()
        before = processor_seconds(pids)
        wall = self.run(steps, **more)
        return Turn(wall, (processor_seconds(pids) - before) / steps)

    def pids(self) -> list[int]:
        """All processes of the side: those that were started here, and those of its job."""
        listed = [json.loads(path.read_text()) for path in self.folder.glob("work/processes*.json")]
        # The launcher is in both lists, and a forkserver serves the jobs of all sides.
        pids = {entry["pid"] for entries in listed for entry in entries if "forkserver" not in entry["roles"]}
        return sorted(pids | {process.pid for process in self.processes})

    def let_go(self) -> None:
        """Tell the processes to end, and do not wait for it; may be said twice."""
        for connection, line in zip(self.sockets, self.lines, strict=True):
            with suppress(OSError):
                connection.sendall(b'{"end": true}\n')
            line.close()

    def end(self) -> None:
        """Let the processes end, or make them."""
        self.let_go()
        deadline = time.monotonic() + END_S
        for process in self.processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
                process.kill()
                process.wait()
        for connection in self.sockets:
            connection.close()


class Sides:
    """Starts sides, and ends them all; a context manager. Its jobs share one forkserver: they start faster.

    Args:
        arguments: of the stepper, in all sides.
        patience_s: the most that an answer of a side may take.
    """

    def __init__(self, arguments: Sequence[str] = (), patience_s: float = PATIENCE_S) -> None:
        self._arguments, self._patience = list(arguments), patience_s
        self._folder = Path(tempfile.mkdtemp(prefix="bench-"))
        self._forkserver: Any = None
        self._rooms = 0
        self._also = ExitStack()
        self.living: dict[str, Side] = {}

    def also_close(self, network: Namespaces) -> None:
        """Take this network away, too, after the last process."""
        self._also.callback(network.close)

    def __enter__(self) -> "Sides":
        return self

    def __exit__(self, *_: object) -> None:
        for side in self.living.values():  # all at once: one after the other they would take a second each
            side.let_go()
        for side in self.living.values():
            side.end()
        if self._forkserver is not None:
            self._forkserver.close()
        self._also.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def job(
        self,
        name: str,
        conf: str,
        workers: int,
        model: str,
        transport: str = "",
        cold: bool = False,
        script: Path = STEPPER,
    ) -> Side:
        """A job of topotrain with `workers` workers in all.

        Args:
            transport: the value of `cluster.transport`, if not the default.
            cold: with a forkserver of its own, as a user's job has it.
            script: what it runs.
        Raises Refused.
        """
        folder = self.room(name)
        words = ["run", "--quiet", *(() if cold else ("--forkserver", self.serve()))]
        words += ["--set", f"cluster.transport={transport}"] if transport else []
        command = [*job_command(folder, conf, *words), str(script), *self._asked(folder, model)]
        return self._start(name, folder, [command], [{}], workers)

    def _asked(self, folder: Path, model: str) -> list[str]:
        """The arguments of every stepper."""
        return ["--socket", str(folder / "line"), "--model", model, *self._arguments]

    def units(self, name: str, conf: str, model: str, hosts: Sequence[str], wrap: Sequence[Sequence[str]]) -> Side:
        """A job of one worker on each host, by `topotrain unit`. Raises Refused.

        Args:
            hosts: the address of each.
            wrap: as for `peer`.
        """
        folder = self.room(name)
        words = ("unit", "--quiet", "--nprocs", str(len(hosts)), "--rendezvous", (folder / "meet").as_uri())
        script = [str(STEPPER), *self._asked(folder, model)]
        commands = [
            [*before, *job_command(folder, conf, *words, "--host", host, "--rank", str(rank)), *script]
            for rank, (host, before) in enumerate(zip(hosts, wrap, strict=False))
        ]
        return self._start(name, folder, commands, [{}] * len(hosts), len(hosts))

    def peer(
        self,
        name: str,
        way: str,
        size: int,
        model: str,
        wrap: Sequence[Sequence[str]] = (),
        script: Path = STEPPER,
        **more: str,
    ) -> Side:
        """`size` processes of ordinary PyTorch.

        Args:
            way: "ddp", "ddp+4mb", "ddp+fp16", "averager", "ddp+nccl", "zero", "fsdp", "alone" or "no_update".
            wrap: per process, the beginning of its command line (to put it into a network of its own).
            script: what each of them runs.
            more: variables for all of them.
        """
        folder = self.room(name)
        command = [sys.executable, str(script), *self._asked(folder, model), "--peer", way]
        commands = [[*(wrap[rank] if wrap else ()), *command] for rank in range(size)]
        return self._start(name, folder, commands, self.meeting(size, **more), size)

    def meeting(self, size: int, **more: str) -> list[dict[str, str]]:
        """The variables of torch.distributed, for each of `size` processes."""
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(size), **more}
        return [{**common, "RANK": str(rank)} for rank in range(size)]

    def room(self, name: str) -> Path:
        """A fresh folder, which goes with the rest."""
        self._rooms += 1
        folder = self._folder / f"{self._rooms}-{name}".replace(" ", "-").replace("/", "-")
        folder.mkdir(parents=True)
        return folder

    def serve(self) -> str:
        """The socket of the forkserver that the jobs share."""
        if self._forkserver is None:
            from topotrain.launch.agent import forkserver

            self._forkserver = forkserver.start(self._folder / "forkserver.log", environ=environment())
        return str(self._forkserver.path)

    def _start(
        self,
        name: str,
        folder: Path,
        commands: Sequence[Sequence[str]],
        variables: Sequence[Mapping[str, str]],
        workers: int,
    ) -> Side:
        side = Side(name, [], folder, patience_s=self._patience)
        self.living[name] = side
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "line"))
            listener.listen(64)
            for number, (command, more) in enumerate(zip(commands, variables, strict=True)):
                side.processes.append(spawn(folder / f"{number}.err", command, more))
            try:
                side.meet(listener, workers)
            except Refused:
                del self.living[name]
                side.end()
                raise
        return side


def spawn(errors: Path, command: Sequence[str], more: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """A process whose stderr goes to that file."""
    with errors.open("wb") as file:
        env = {**environment(), **more}
        return subprocess.Popen(command, env=env, cwd=errors.parent, stdout=subprocess.DEVNULL, stderr=file)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def gather(starts: Mapping[str, Callable[[], Side]]) -> tuple[dict[str, Side], dict[str, str]]:
    """The sides that could be started, and why the others could not."""
    living: dict[str, Side] = {}
    missing: dict[str, str] = {}
    for name, begin in starts.items():
        try:
            living[name] = begin()
        except Refused as reason:
            missing[name] = str(reason)
            say(f"  {name}: {reason}")
    return living, missing
