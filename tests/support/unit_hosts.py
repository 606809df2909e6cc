"""Units that are started one by one, and hosts with an address of their own for them: network namespaces."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from free_ports import free_port
from job_runner import PROGRAMS, JobRunner
from launch_targets import wait_for
from process_pool import Forked, client
from safetensors.torch import load_file
from two_hosts import VirtualNetwork

UNIT = ("-m", "topotrain", "unit")
TOKEN = "a" * 64
# The product waits longer before it takes a silent unit for a lost one; a test need not.
HASTY = """
import sys
from topotrain.launch import registered_job
from topotrain.launch.multinode import node, node_membership, node_rendezvous, unit_membership
from topotrain.tools.cli.app import main
for module in (registered_job, node_membership, node_rendezvous, unit_membership):
    module.BEAT_S, module.ALIVE_S = 0.3, 1.5
node_membership.LOST_S, node_membership.STORE_LOST_S, node.STORE_S = 3.0, 2.5, 1.0
sys.exit(main())
"""
# A forkserver makes its processes where it is itself, so each host has one.
WARM = """
import sys
from contextlib import closing
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import process_pool
with closing(process_pool.start(Path(sys.argv[1]))) as running:
    print(running.served, running.path, flush=True)
    sys.stdin.read()
"""


def wait(condition: Callable[[], object]) -> None:
    """Until it holds, for five minutes at most."""
    wait_for(condition, 300)


HASTILY = ("-c", HASTY, "unit")
"""What stands behind `python` for `topotrain unit` with less patience."""


class Unit:
    """One `topotrain unit`, forked from the pool at `warm_at`, which is on the host that the unit shall be on."""

    def __init__(self, warm_at: str, words: Sequence[str], folder: Path, token: str) -> None:
        environ = {**os.environ, "TOPOTRAIN_TOKEN": token, "PYTHONUNBUFFERED": "1"}
        self._err = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = Forked(warm_at, words, folder, environ, self._err.fileno())

    def until(self, line: str) -> None:
        for said in self.process.stdout:
            if said.strip() == line:
                return
        raise AssertionError(self.end())

    def end(self, timeout_s: float = 300) -> tuple[int, str, str]:
        out, _ = self.process.communicate(timeout=timeout_s)
        assert self.process.returncode is not None
        with self._err:
            self._err.seek(0)
            return self.process.returncode, out, self._err.read()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()
        self._err.close()


class Job:
    """The units of one job; `hosts` are numbers of a network's, None for this machine."""

    def __init__(
        self,
        runner: JobRunner,
        cluster: str,
        program: str,
        args: Sequence[str],
        hosts: "Sequence[int | None]",
        url: str,
        network: "HostNetwork | None" = None,
        extra: str = "",
    ) -> None:
        self.folder, self.url, self.hosts = runner.folder, url, hosts
        self.network, self.runner = network, runner
        self.workspace = self.folder / "units"
        self.conf = self.folder / "units.conf"
        self.conf.write_text(f'name: "job" {extra}\ncluster {{ {cluster} workspace: "{self.workspace}" }}\n')
        self.program = [str(PROGRAMS / program), *args]
        self.units: dict[int, Unit] = {}
        self.said: dict[int, str] = {}  # on stderr, by units that have ended well

    def start(self, rank: int, *options: str, token: str = TOKEN, command: Sequence[str] = UNIT) -> Unit:
        host = self.hosts[rank]
        served_at, warm_at = self.runner.served_at, self.runner.warm_at
        if host is not None:
            assert self.network is not None
            served_at, warm_at = self.network.served_at(host), self.network.warm_at(host)
        words = [*command, "--rank", str(rank), "--nprocs", str(len(self.hosts)), "--forkserver", served_at]
        words += ["--rendezvous", self.url, "--report", str(self._report(rank)), *options]
        if rank == 0:
            words += [str(self.conf), *self.program]
        self.units[rank] = Unit(warm_at, words, self.folder, token)
        return self.units[rank]

    def start_hastily(self, *ranks: int) -> None:
        """With little patience for silent units."""
        for rank in ranks:
            self.start(rank, command=HASTILY)

    def begin(self) -> None:
        """Start all units; returns when there is a snapshot."""
        self.start_hastily(*range(len(self.hosts)))
        wait(lambda: newest(self))

    # ---- faults ----

    def kill(self, role: str) -> None:
        """Kill a process of the job."""
        (pid,) = (entry["pid"] for entry in self.processes() if role in entry["roles"])
        os.kill(pid, signal.SIGKILL)

    def lose(self, *ranks: int) -> None:
        """Kill all processes of units at once, as if their hosts had lost their power."""
        for rank in ranks:
            unit = self.units.pop(rank)
            with suppress(ProcessLookupError):
                os.killpg(unit.process.pid, signal.SIGKILL)
            for pid in self.pids(rank):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            unit.kill()

    def trains(self) -> None:
        """Wait until the job trains again, and longer than it took to notice."""
        number = newest(self)
        wait(lambda: newest(self) > number + 1)

    def ask(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run `topotrain jobs` with the job's secret."""
        environ = {**os.environ, "TOPOTRAIN_TOKEN": TOKEN}
        command = [*client(self.runner.warm_at), "-m", "topotrain", "jobs", *words]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, cwd=self.folder)

    # ---- its end ----

    def end(self, timeout_s: float = 300) -> dict[int, tuple[int, str, str]]:
        """By rank: exit code, stdout and stderr."""
        return {rank: unit.end(timeout_s) for rank, unit in sorted(self.units.items())}

    def run(self, *options: str) -> None:
        """Start all, the last one first; all must end well."""
        for rank in reversed(range(len(self.hosts))):
            self.start(rank, *options)
        self.end_well()

    def end_well(self) -> None:
        """Let a program that waits for the file "on" go on (programs/ledger.py); all units must end well."""
        (self.folder / "on").touch()
        for rank, (code, _, err) in self.end().items():
            assert code == 0, f"unit {rank}: {err}"
            self.said[rank] = err

    def clean_up(self) -> None:
        for unit in self.units.values():
            unit.process.send_signal(signal.SIGCONT)
            unit.kill()

    # ---- what is known of it ----

    @property
    def final(self) -> dict[str, torch.Tensor]:
        return load_file(self.workspace / "final.safetensors")

    def check_ledger(self, times: int) -> None:
        """Every sample has counted so often (programs/ledger.py)."""
        for name, cells in self.final.items():
            assert torch.equal(cells, torch.full_like(cells, times)), (name, cells)

    def check_bits(self, expected: dict[str, torch.Tensor]) -> None:
        assert self.final.keys() == expected.keys()
        assert not [name for name, value in expected.items() if not torch.equal(value, self.final[name])]

    @property
    def reporter(self) -> int:
        """The only unit with a report: that which leads at the end."""
        (rank,) = (rank for rank in range(len(self.hosts)) if (self._report(rank)).exists())
        return rank

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._report(self.reporter).read_text())
        return found

    def _report(self, rank: int) -> Path:
        return self.folder / f"report-{rank}.json"

    def pids(self, *ranks: int) -> list[int]:
        """Of all processes, or of the workers and servers of these units."""
        return [entry["pid"] for entry in self.processes(*ranks)]

    def addresses(self) -> set[str]:
        return {address for entry in self.processes() for address in entry["address"]}

    def processes(self, *ranks: int) -> list[dict[str, Any]]:
        """The entries of all processes, or of the workers and servers of these units."""
        paths = [self.workspace / f"processes-{rank}.json" for rank in ranks or range(len(self.hosts))]
        entries = [entry for path in paths if path.exists() for entry in json.loads(path.read_text())]
        return [entry for entry in entries if not ranks or (entry["pid"] and (entry["workers"] or entry["servers"]))]


class Units:
    """Makes the jobs of a test, and ends what is left of them."""

    def __init__(self, runner: JobRunner) -> None:
        self._runner = runner
        self._made: list[Job] = []

    def job(
        self,
        cluster: str,
        program: str,
        *args: str,
        hosts: "int | Sequence[int | None]",
        extra: str = "",
        store: str = "",
        network: "HostNetwork | None" = None,
    ) -> Job:
        """hosts: how many units on this machine, or the host of each. store: "file", a URL, or by default unit 0."""
        if store == "file":
            store = (self._runner.folder / "store").as_uri()
        store = store or f"tcp://{network.addresses[0] if network else '127.0.0.1'}:{free_port()}"
        where = [None] * hosts if isinstance(hosts, int) else hosts
        made = Job(self._runner, cluster, program, args, where, f"{store}?job=job", network, extra)
        self._made.append(made)
        return made

    def paced(self, cluster: str, epochs: int, **given: Any) -> Job:
        """A ledger whose steps take their time until its end is waited for."""
        pace = ("--step-s", "0.1", "--on", str(self._runner.folder / "on"))
        given["extra"] = f"reduce: kSum snapshot_s: 0.3 {given.get('extra', '')}"
        return self.job(cluster, "ledger.py", "--epochs", str(epochs), *pace, **given)

    def clean_up(self) -> None:
        for job in self._made:
            job.clean_up()


def newest(job: Job) -> int:
    """The number of the newest snapshot; 0: there is none."""
    return max((int(path.parent.name) for path in job.workspace.glob("manifests/*/manifest.json")), default=0)


# ---- several hosts ---------------------------------------------------------------------------------------------------


class HostNetwork(VirtualNetwork):
    """Two hosts, and a forkserver on each."""

    def __init__(self, folder: Path) -> None:
        """`folder` has a short path."""
        super().__init__("hosts")
        self._folder = folder
        self._served: list[subprocess.Popen[str]] = []
        self._paths: list[list[str]] = []

    def start(self) -> None:
        self.create()
        for number in range(2):
            words = [*self.prefix(number), sys.executable, "-c", WARM]
            words += [str(self._folder / str(number)), str(Path(__file__).parent)]
            pipe = subprocess.PIPE
            self._served.append(subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True))
        for served in self._served:
            assert served.stdout is not None
            self._paths.append(served.stdout.readline().split())

    def stop(self) -> None:
        for served in self._served:
            served.communicate()
        self.remove()

    def served_at(self, number: int) -> str:
        return self._paths[number][0]

    def warm_at(self, number: int) -> str:
        """Who makes processes on a host that are as those of a shell there (process_pool.py)."""
        return self._paths[number][1]

    def listening(self, number: int) -> "Listening":
        """Who listens on a host; its forkserver is there for as long as the network is."""
        return Listening(self._served[number].pid)


class Listening:
    """All addresses at which anybody listens for TCP on the host of process `pid`, at any time until this is closed."""

    def __init__(self, pid: int) -> None:
        self._tables = [Path(f"/proc/{pid}/net/{name}") for name in ("tcp", "tcp6")]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.addresses: set[str] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.2):  # each look costs 20 ms of the processor
            for table in self._tables:
                for line in table.read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == "0A":
                        self.addresses.add(_address(fields[1].partition(":")[0]))


def _address(digits: str) -> str:
    """From the kernel's form: words of 32 bits in this machine's order."""
    words = [bytes.fromhex(digits[at : at + 8]) for at in range(0, len(digits), 8)]
    return str(ip_address(b"".join(word if sys.byteorder == "big" else word[::-1] for word in words)))
