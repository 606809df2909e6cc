"""Digests of the final parameters of synchronous jobs: `python -m tests.soak.digests [--only NAME ...] [--write]`.

A synchronous job ends with the same bits each time it is run. digests.json beside this file has the cases and their
digests. Without an option every case is run once and compared with its digest. `--write` runs every case twice and
records those whose two runs agree.

A case is a job file, a script and a command line. No module of the package is imported here, so that this file works
unchanged after its modules have been moved. Digests of another kind of machine are not compared.
"""

import argparse
import hashlib
import json
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from safetensors.torch import load_file

from benchmarks.record import ROOT, commit, environment, machine, say

RECORD = Path(__file__).with_suffix(".json")
SCRIPT = ROOT / "benchmarks" / "programs" / "fixed_steps.py"
UNITS = 3
LIMIT_S, ENDING_S = 240.0, 20.0
"""What a job may take, and what one that is stopped may take for ending its processes."""


@dataclass(frozen=True, slots=True)
class Case:
    """A job, and the digest of its final parameters.

    Args:
        cluster: the inside of the cluster block.
        args: of the script.
        top: fields of the job outside the cluster block.
        start: "run", "python", "units" (three of them), or "units over TLS", at an address that is not loopback.
        resumed: the cluster block under which the job goes on from its snapshot behind step 8.
        same_as: a case with the same final parameters, by docs/exactness.md.
        digest, code: as recorded, and the commit of the package. Empty: not recorded.
    """

    name: str
    cluster: str = ""
    args: str = ""
    top: str = ""
    start: str = "run"
    resumed: str = ""
    same_as: str = ""
    digest: str = ""
    code: str = ""


def read() -> tuple[dict[str, Any], dict[str, Case]]:
    """The record: what it was made with, and the cases."""
    page = json.loads(RECORD.read_text(encoding="utf-8"))
    return page, {name: Case(name, **fields) for name, fields in page.pop("cases").items()}


def write(cases: Mapping[str, Case]) -> None:
    """Record cases, a line for each, without empty fields."""
    page = {"command": "python -m tests.soak.digests --write", "conditions": conditions(), "machine": machine()}
    fields = {name: {k: v for k, v in asdict(case).items() if v and k != "name"} for name, case in cases.items()}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in fields.items())
    RECORD.write_text(f'{json.dumps(page, indent=1)[:-2]},\n "cases": {{\n{lines}\n }}\n}}\n', encoding="utf-8")


class Entry(NamedTuple):
    """One tensor of a file, as it stands there."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def digest(entries: Iterable[Entry]) -> str:
    """sha256 over the names, dtypes, shapes and bytes of tensors, in the order of their names."""
    total = hashlib.sha256()
    for entry in sorted(entries):
        total.update(json.dumps([entry.name, entry.dtype, entry.shape, len(entry.data)]).encode())
        total.update(entry.data)
    return total.hexdigest()


def parameters(path: Path) -> Iterator[Entry]:
    """The tensors of a safetensors file."""
    for name, found in safetensors.deserialize(path.read_bytes()):
        yield Entry(name, str(found["dtype"]), tuple(found["shape"]), bytes(found["data"]))


def rows(folder: Path) -> Iterator[Entry]:
    """Rows of the tables in a folder of the workspace, in the order of their ids, whichever part has them."""
    for table in sorted(folder.glob("*/")):
        parts = [load_file(path) for path in sorted(table.glob("part-*.safetensors"))]
        ids = torch.cat([part["ids"] for part in parts])
        order = ids.argsort()
        for name, tensor in (("ids", ids), ("values", torch.cat([part["values"] for part in parts]))):
            data = tensor[order].contiguous().view(torch.uint8).numpy().tobytes()
            yield Entry(f"tables/{table.name}/{name}", str(tensor.dtype), tuple(tensor.shape), data)


class JobFailed(Exception):
    """A job did not end well, or left no parameters; the text is its last line."""


class Refused(Exception):
    """The machine has not what a case needs."""


def address() -> str:
    """An address of this machine at which TLS is spoken: any that is not loopback. Raises Refused."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError as error:
            raise Refused(f"this machine has no address but loopback ({error.strerror})") from None
        found = str(one.getsockname()[0])
    if found.startswith("127."):
        raise Refused("this machine has no address but loopback")
    return found


def run(case: Case, seed: int = 0) -> str:
    """Run a job and return the digest of what it has written.

    Raises JobFailed, and Refused where the machine has not what the case needs.
    """
    host = address() if case.start == "units over TLS" else "127.0.0.1"
    with tempfile.TemporaryDirectory(prefix="digests-") as name:
        folder = Path(name)
        workspace = folder / "workspace"
        workspace.mkdir(mode=0o700)
        final = workspace / "final.safetensors"
        _finish(_commands(case, folder, seed, host), folder)
        if case.resumed:
            final.unlink()  # what is read below is the second job's
            _finish([_resuming(case, folder, seed)], folder)
        if not final.exists():
            raise JobFailed("the job has written no final.safetensors")
        return digest([*parameters(final), *rows(workspace / "tables")])


def _job(case: Case, cluster: str, seed: int, conf: Path) -> list[str]:
    """Write a job file; its path, the script and the script's arguments."""
    conf.write_text(f'name: "digest" seed: {seed} {case.top}\ncluster {{ {cluster} }}\n')
    return [str(conf), str(SCRIPT), "--seed", str(seed), *case.args.split()]


def _commands(case: Case, folder: Path, seed: int, host: str) -> list[list[str]]:
    """The command lines that start a case, all at once."""
    workspace, job = folder / "workspace", _job(case, case.cluster, seed, folder / "job.conf")
    ours = ["--quiet", "--set", f"cluster.workspace={workspace}"]
    if case.start == "python":
        return [[sys.executable, *job[1:], "--save", str(workspace / "final.safetensors")]]
    topotrain = [sys.executable, "-m", "topotrain"]
    if case.start == "run":
        return [[*topotrain, "run", *ours, *job]]
    meeting = ["--rendezvous", (folder / "meeting").as_uri(), "--host", host, "--nprocs", str(UNITS)]
    return [[*topotrain, "unit", *ours, *meeting, "--rank", str(rank), *job] for rank in range(UNITS)]


def _resuming(case: Case, folder: Path, seed: int) -> list[str]:
    """The command line that goes on from the snapshot behind step 8."""
    workspace, job = folder / "workspace", _job(case, case.resumed, seed, folder / "resumed.conf")
    resume = ["--resume", str(workspace / "manifests" / "step-8"), "--set", f"cluster.workspace={workspace}"]
    return [sys.executable, "-m", "topotrain", "run", "--quiet", *resume, *job]


def _finish(commands: Sequence[Sequence[str]], folder: Path) -> None:
    """Run these at the same time, until all have ended well. Raises JobFailed, with none of them left."""
    deadline = time.monotonic() + LIMIT_S
    log = folder / "errors"
    with log.open("wb") as errors, ExitStack() as living:
        processes = []
        for command in commands:
            process = subprocess.Popen(command, cwd=folder, env=environment(), stdout=subprocess.DEVNULL, stderr=errors)
            living.callback(_stop, process)
            processes.append(process)
        try:
            codes = [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            raise JobFailed(f"the job took longer than {LIMIT_S:g} s") from None
    if any(codes):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        told = [line for line in lines if "error:" in line or "Error" in line] or lines or ["no message"]
        raise JobFailed(f"exit codes {codes}: {told[-1]}")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End a process that still runs: it has others to end, so it is asked first."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)
        process.kill()
        process.wait()


def conditions() -> dict[str, str]:
    """What the bits of a synchronous job may depend on, beside the package."""
    return {
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def incomparable(recorded: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Why digests of these two machines are not compared; empty if they are."""
    return ", ".join(
        f"{key} {here.get(key, 'unknown')} (recorded: {recorded.get(key, 'unknown')})"
        for key in sorted({*recorded, *here})
        if recorded.get(key) != here.get(key)
    )


WELL = ("ok", "NOT RUN")
Outcome = tuple[str, str, str]
"""A verdict, the digest where there is one, and a word on it."""


def outcome(case: Case, runner: Callable[[Case], str] = run, same: Case | None = None, twice: bool = False) -> Outcome:
    """Run a case and compare it with its record; `twice`: with a second run, and with the case that is the same."""
    try:
        found, again = runner(case), runner(case) if twice else ""
    except (Refused, JobFailed) as reason:
        return "NOT RUN" if isinstance(reason, Refused) else "FAILED", "", str(reason)
    if twice and found != again:
        return "UNSTABLE", found, f"the second run: {again[:16]}"
    expected = same if twice else case
    if expected is None or not expected.digest:
        return "ok" if twice else "NOT RECORDED", found, ""
    if found == expected.digest:
        return "ok", found, ""
    text = f"{expected.name if twice else 'recorded'}: {expected.digest[:16]} at {expected.code}"
    return "UNEQUAL" if twice else "DIFFERENT", found, text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.digests", description=__doc__.splitlines()[0])
    page, cases = read()
    parser.add_argument("--only", nargs="+", default=list(cases), choices=cases, metavar="NAME", help="these cases")
    parser.add_argument("--write", action="store_true", help="run every case twice, and record what is the same")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # processes are then taken away as usual
    why, state = incomparable(page["conditions"], conditions()), commit()
    if why and not (options.write and options.only == list(cases)):
        say(f"not compared: this machine has {why}; digests of one kind of machine say nothing about another")
        raise SystemExit(2)
    wrong = 0
    for name in options.only:
        case = cases[name]
        verdict, found, text = outcome(case, run, cases.get(case.same_as), options.write)
        if options.write and verdict != "NOT RUN":
            right = verdict == "ok"
            cases[name] = replace(case, digest=found if right else "", code=state if right else "")
            write(cases)  # after each case, so that nothing is lost by Ctrl-C
        wrong += verdict not in WELL
        print(f"{verdict:<12} {name:<26} {found[:16]:<16} {text}".rstrip(), flush=True)
    if wrong and machine() != page["machine"]:
        say(f"recorded on: {page['machine']}; this is: {machine()}")
    say(f"{len(options.only) - wrong} of {len(options.only)} cases are as they should be")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
