"""Namespaces for launchers, in which nothing but loopback exists, and a real Slurm of two nodes.

Rule: all processes inside end with the sandbox, and the sandbox with the test: its first process waits for the end of
its stdin. The second address on loopback is there because resolvers answer nothing for a machine that has only
127.0.0.1.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PATIENCE_S = 120.0
GONE_S = 5.0  # what the product promises
FIRST = "hostname localhost && ip link set lo up && ip address add 10.77.0.1/32 dev lo && echo up"
KINDS = ("net", "uts", "pid", "ipc", "mount")
SLURM = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
CONF = """
ClusterName=sandbox
SlurmctldHost=localhost
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=5
SlurmdParameters=config_overrides
NodeName=a NodeHostname=localhost NodeAddr=127.0.0.1 Port=17001 CPUs=8
NodeName=b NodeHostname=localhost NodeAddr=127.0.0.1 Port=17002 CPUs=8
PartitionName=all Nodes=a,b Default=YES MaxTime=INFINITE State=UP
"""


class Missing(Exception):
    """The sandbox cannot be built here; the text says what is missing."""


@dataclass(frozen=True)
class Started:
    """A command in the sandbox. `pid` is its own there, `process` what led into it."""

    process: "subprocess.Popen[str]"
    pid: int

    @property
    def output(self) -> Iterator[str]:
        """The lines of stdout and stderr, as they come."""
        assert self.process.stdout is not None
        return self.process.stdout

    def end(self) -> tuple[int, str]:
        """The exit code, and the output that nobody has read."""
        said = "".join(self.output)  # not `communicate`, which misses what a reader before it had in its buffer
        return self.process.wait(PATIENCE_S), said


@dataclass(frozen=True)
class Sandbox:
    """`pid` is its first process; `environ` is what those who run inside should know."""

    pid: int
    folder: Path
    environ: dict[str, str] = field(default_factory=dict)
    spawned: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def words(self, command: Sequence[str]) -> list[str]:
        return ["nsenter", f"--target={self.pid}", *(f"--{kind}" for kind in KINDS), "--", *command]

    def spawn(self, *command: str, log: str) -> None:
        """Start what runs until the sandbox ends."""
        with (self.folder / f"{log}.log").open("ab") as out:
            environ = {**os.environ, **self.environ}
            where = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            self.spawned.append(subprocess.Popen(self.words(command), env=environ, **where))  # type: ignore[call-overload]

    def run(
        self, *command: str, cwd: Path | None = None, environ: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        everything = {**os.environ, **self.environ, **(environ or {})}
        # nsenter would go to the first process's folder, that of the whole sandbox
        words = self.words(["env", f"--chdir={cwd or self.folder}", *command])
        return subprocess.run(words, env=everything, capture_output=True, text=True, timeout=300)

    @contextmanager
    def started(self, *command: str, cwd: Path) -> Iterator["Started"]:
        """Run a command during the block, at whose end it is asked to end if it still runs."""
        words = self.words(["env", f"--chdir={cwd}", "sh", "-c", 'echo $$; exec "$@"', "sh", *command])
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        environ = {**os.environ, **self.environ}
        with subprocess.Popen(words, env=environ, text=True, **pipes) as process:  # type: ignore[call-overload]
            pid = int(process.stdout.readline())
            try:
                yield Started(process, pid)
            finally:
                if process.poll() is None:
                    self.run("kill", "-TERM", str(pid))

    def left(self, *words: str) -> str:
        """Who still runs with one of `words` in the command line, after some patience; the sandbox's forkserver is not
        meant, but who was forked by it: such a process has its part in a job as its name."""
        until = time.monotonic() + GONE_S
        while True:
            lines = self.run("ps", "-ww", "-eo", "stat,comm,args").stdout.splitlines()
            lives = [line for line in lines if line[0] != "Z" and any(word in line for word in words)]
            found = [line for line in lives if "forkserver" not in line or not line.split()[1].startswith("python")]
            if not found or time.monotonic() > until:
                return "\n".join(found)
            time.sleep(0.05)

    def wait_for(self, what: str, ready: "list[str] | Path", says: str = "", patience: float = PATIENCE_S) -> None:
        """Until a file exists, or a command's output contains `says`; an error if a spawned process fails meanwhile."""
        until = time.monotonic() + patience
        while time.monotonic() < until and not any(process.poll() for process in self.spawned):
            if isinstance(ready, Path):
                if ready.exists():
                    return
            else:
                done = self.run(*ready)
                if done.returncode == 0 and says in done.stdout:
                    return
            time.sleep(0.05)
        logs = "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in self.folder.glob("*.log"))
        raise AssertionError(f"{what} is not ready: a process of it failed, or {patience:g} s are over\n{logs}")


@contextmanager
def open_sandbox(folder: Path) -> Iterator[Sandbox]:
    """An empty sandbox. Raises Missing."""
    for program in ("unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            raise Missing(f"no {program} (Debian: util-linux, iproute2)")
    flags = [f"--{kind}" for kind in KINDS]
    command = ["unshare", *flags, "--fork", "--mount-proc", "--kill-child", "sh", "-c", f"{FIRST} && exec cat"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    outside = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
    sandbox = None
    try:
        if outside.stdout.readline() != b"up\n":
            raise Missing(f"no namespaces for this user: {outside.stderr.read().decode().strip()}")
        children = Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text().split()
        folder.mkdir(parents=True, exist_ok=True)
        sandbox = Sandbox(int(children[0]), folder)
        yield sandbox
    finally:
        outside.kill()
        outside.wait()
        for pipe in (outside.stdin, outside.stdout, outside.stderr):
            pipe.close()
        if sandbox is not None:
            _bury(sandbox)


def _bury(sandbox: Sandbox) -> None:
    """Those who led into the sandbox end with it. A forkserver that was killed could not remove its own folder."""
    for process in sandbox.spawned:
        process.wait(PATIENCE_S)
    if "TOPOTRAIN_FORKSERVER" in sandbox.environ:
        shutil.rmtree(Path(sandbox.environ["TOPOTRAIN_FORKSERVER"]).parent, ignore_errors=True)


def add_slurm(sandbox: Sandbox) -> None:
    """Two nodes, a and b, and their controller. Raises Missing."""
    for program in SLURM:
        if shutil.which(program) is None:
            raise Missing(f"no {program} (Debian: slurm-wlm, munge)")
    folder = sandbox.folder / "slurm"
    for name in ("state", "spool-a", "spool-b"):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(folder=folder))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    sandbox.environ["SLURM_CONF"] = str(conf)
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    # --force: the way there leads through /tmp, which all may write
    sandbox.spawn("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files, log="munged")
    sandbox.wait_for("munged", folder / "munge.socket")
    sandbox.spawn("slurmctld", "-D", "-i", "-f", str(conf), log="slurmctld")
    for node in ("a", "b"):
        sandbox.spawn("slurmd", "-D", "-N", node, "-f", str(conf), log=f"slurmd-{node}")
    sandbox.wait_for("Slurm", ["sinfo", "--noheader", "--format=%T=%D"], "idle=2")


def add_forkserver(sandbox: Sandbox) -> None:
    """One forkserver for all units inside, so that torch is loaded once."""
    code = (
        "import sys, time; from pathlib import Path; from topotrain.launch.agent import forkserver;"
        "served = forkserver.start(Path(sys.argv[1])); Path(sys.argv[2] + '.new').write_text(served.path);"
        "Path(sys.argv[2] + '.new').rename(sys.argv[2]); time.sleep(1e6)"
    )
    told = sandbox.folder / "forkserver"
    sandbox.spawn(sys.executable, "-c", code, str(sandbox.folder / "forkserver.log"), str(told), log="forkserver-start")
    sandbox.wait_for("the forkserver", told)
    sandbox.environ["TOPOTRAIN_FORKSERVER"] = told.read_text()
