"""Digests of the final parameters of synchronous jobs: `python -m benchmarks.digests [--only NAME ...] [--write]`.

A synchronous job ends with the same bits each time it is run. results/digests.json has a digest for every case of the
table below. Without an option every case is run once and compared with its digest. `--write` runs every case twice and
records those whose two runs agree.

Rule: a case is a job file, a script and a command line, nothing else. No module of the package is imported here, so
that this file works unchanged after its modules have been moved. Digests of another kind of machine are not compared.
"""

import argparse
import hashlib
import json
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from safetensors.torch import load_file

from benchmarks.record import RESULTS, ROOT, machine, say
from benchmarks.safety import address
from benchmarks.sides import Refused, environment

RECORD = RESULTS / "digests.json"
SCRIPT = Path(__file__).parent / "programs" / "fixed_steps.py"
LIMIT_S, ENDING_S = 240.0, 20.0
"""What a job may take, and what one that is stopped may take for ending its processes."""

SANDBLASTER = "nworkers_per_group: 3 nservers_per_group: 2 server_worker_separate: true"
ALLREDUCE = "nworkers_per_group: 3 nservers_per_group: 3"
PAIR = "nworkers_per_group: 2 nservers_per_group: 2"
IN_MEMORY = "nworkers_per_group: 2 nworkers_per_procs: 2"
ONE_WORKER = "nservers_per_group: 3 server_worker_separate: true"
TCP = "transport: kTcp"
SNAPSHOTS = "snapshot_s: 0 checkpoint_freq: 8 checkpoint_after: 8"
HIDDEN = "grads: kHidden"
ADAM = "updater { type: kAdam learning_rate { type: kStep base_lr: 0.003 step_conf { gamma: 0.5 change_freq: 7 } } }"
CLIPPED = "updater { type: kSGD momentum: 0.9 learning_rate { type: kFixed base_lr: 0.05 } %s }"
STAGES = 'partition { match: "^fc1" partition_dim: -1 location: 0 } partition { partition_dim: -1 location: 1 }'
MOMENTUM, NOISY = "--optimizer momentum", "--optimizer adam --model noisy"


class Start(StrEnum):
    """What starts the processes of a case."""

    RUN = "topotrain run"
    PYTHON = "python"
    UNITS = "topotrain unit"
    UNITS_TLS = "topotrain unit, at an address that is not loopback"


@dataclass(frozen=True, slots=True)
class Case:
    """A job.

    Args:
        cluster: the inside of the cluster block.
        args: of the script.
        top: fields of the job outside the cluster block.
        units: how many there are; needed where units are started one by one.
        resumed: the cluster block under which the job goes on from its snapshot behind step 8.
        same_as: a case with the same final parameters, by docs/exactness.md.
    """

    name: str
    cluster: str = ""
    args: str = MOMENTUM
    top: str = ""
    start: Start = Start.RUN
    units: int = 0
    resumed: str = ""
    same_as: str = ""


CASES: Sequence[Case] = (
    # layouts
    Case("sandblaster", SANDBLASTER),
    Case("allreduce", ALLREDUCE, same_as="sandblaster"),
    Case("one-server", "nworkers_per_group: 3 server_worker_separate: true", same_as="sandblaster"),
    Case("co-located", "nworkers_per_group: 3 nservers_per_group: 2", same_as="sandblaster"),
    Case("servers-in-one-unit", f"{SANDBLASTER} nservers_per_procs: 2", same_as="sandblaster"),
    Case("no-servers", "nworkers_per_group: 3 nserver_groups: 0", same_as="sandblaster"),
    Case("in-memory-sandblaster", IN_MEMORY),
    Case(
        "units-of-two",
        "nworkers_per_group: 4 nworkers_per_procs: 2 nservers_per_group: 4 nservers_per_procs: 2",
    ),
    Case("one-worker", ONE_WORKER, "--optimizer sgd"),
    Case("python", args="--optimizer sgd", start=Start.PYTHON, same_as="one-worker"),
    Case("two-groups-apart", "nworker_groups: 2 nserver_groups: 0", top="shard: kStatic"),
    Case("local-steps", f"{ONE_WORKER} n_push: 2 n_fetch: 2", "--optimizer sgd"),
    Case("shares", f"{SANDBLASTER} shares: [1, 2, 3]"),
    Case("per-worker-batch", SANDBLASTER, top="per_worker_batch: true"),
    Case("sum", SANDBLASTER, "--optimizer adam", "reduce: kSum"),
    # transports
    Case("transport-shm", f"{SANDBLASTER} transport: kShm", same_as="sandblaster"),
    Case("transport-tcp", f"{SANDBLASTER} {TCP}", same_as="sandblaster"),
    Case("transport-tcp-allreduce", f"{ALLREDUCE} {TCP}", same_as="sandblaster"),
    Case("transport-tcp-lanes", f"{SANDBLASTER} {TCP} connections: 2 slice_bytes: 4096", same_as="sandblaster"),
    Case("transport-link", f"{SANDBLASTER} link {{ bandwidth: 1000 delay: 1 }}", same_as="sandblaster"),
    Case("units-tcp", f"{ALLREDUCE} {TCP}", start=Start.UNITS, units=3, same_as="sandblaster"),
    Case("units-tls", f"{ALLREDUCE} {TCP}", start=Start.UNITS_TLS, units=3, same_as="sandblaster"),
    # collectives
    Case("collective-ring", f"{ALLREDUCE} algorithm: kRing"),
    Case("collective-tree", f"{ALLREDUCE} algorithm: kTree"),
    Case("collective-naive", f"{ALLREDUCE} algorithm: kNaive", same_as="sandblaster"),
    Case("collective-gloo", f"{PAIR} engine: kGloo"),
    # when gradients are seen, applied and fetched
    Case("hidden", SANDBLASTER, top=HIDDEN, same_as="sandblaster"),
    Case("on-arrival", f"{SANDBLASTER} slice_bytes: 4096", top=f"{HIDDEN} apply: kOnArrival", same_as="sandblaster"),
    Case("lazy", f"{SANDBLASTER} slice_bytes: 4096", top="pull: kLazy", same_as="sandblaster"),
    Case("fastest", ALLREDUCE, top=f"{HIDDEN} apply: kOnArrival pull: kLazy", same_as="sandblaster"),
    # slicing and compression
    Case("slicing-tensor-adafactor", f"{SANDBLASTER} slicing: kTensor", "--optimizer adafactor"),
    Case("fp16", f"{SANDBLASTER} compression: kFp16"),
    Case("top-k", f"{SANDBLASTER} compression: kTopK compression_ratio: 0.1 {TCP}"),
    # one model over several workers
    Case("split-features", PAIR, top='partition { match: "^fc[12]$" partition_dim: 1 }'),
    Case("split-samples", PAIR, top="partition { partition_dim: 0 }"),
    Case("split-pipeline", PAIR, top=f"{STAGES} microbatches: 2"),
    Case("split-1f1b", PAIR, f"{MOMENTUM} --model loss", f"{STAGES} microbatches: 2 schedule: k1F1B"),
    Case("split-by-script", PAIR, f"{MOMENTUM} --model views"),
    # optimizers, models and loops
    Case("adam", SANDBLASTER, "--optimizer adam"),
    Case("adamw", SANDBLASTER, "--optimizer adamw"),
    Case("trainer", SANDBLASTER, "--trainer", f"train_steps: 20 {ADAM}"),
    Case("bf16", SANDBLASTER, "--optimizer sgd --model bf16"),
    Case("batch-norm", SANDBLASTER, f"{MOMENTUM} --model norm"),
    Case("dropout", ALLREDUCE, f"{MOMENTUM} --model dropout"),
    Case("stream", SANDBLASTER, f"{MOMENTUM} --stream"),
    Case("accumulate", SANDBLASTER, f"{MOMENTUM} --accumulate 2"),
    Case("clip-in-script", SANDBLASTER, f"{MOMENTUM} --clip visible"),
    Case("clip-on-servers", SANDBLASTER, f"{MOMENTUM} --clip hidden", HIDDEN),
    Case("clip-norm", SANDBLASTER, "", CLIPPED % "clip_norm: 0.5"),
    # tables
    Case("sparse-weight", SANDBLASTER, "--optimizer sgd --model sparse"),
    Case("table", SANDBLASTER, f"{MOMENTUM} --model served"),
    # faults
    Case("replicas", f"{SANDBLASTER} {TCP} replicas: 2", same_as="sandblaster"),
    Case("without-resume", SANDBLASTER, NOISY, SNAPSHOTS),
    Case("resume-allreduce", SANDBLASTER, NOISY, SNAPSHOTS, resumed=ALLREDUCE, same_as="without-resume"),
    Case("resume-fewer-workers", SANDBLASTER, MOMENTUM, SNAPSHOTS, resumed=PAIR),
    Case("resume-table", SANDBLASTER, f"{MOMENTUM} --model served", SNAPSHOTS, resumed=ALLREDUCE, same_as="table"),
)


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


def run(case: Case, seed: int = 0) -> str:
    """Run a job and return the digest of what it has written.

    Raises JobFailed, and Refused where the machine has not what the case needs.
    """
    host = address() if case.start is Start.UNITS_TLS else "127.0.0.1"
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


def _conf(case: Case, cluster: str, seed: int) -> str:
    return f'name: "digest" seed: {seed} {case.top}\ncluster {{ {cluster} }}\n'


def _words(case: Case, seed: int) -> list[str]:
    return [str(SCRIPT), "--seed", str(seed), *case.args.split()]


def _commands(case: Case, folder: Path, seed: int, host: str) -> list[list[str]]:
    """The command lines that start a case, all at once."""
    conf, workspace = folder / "job.conf", folder / "workspace"
    conf.write_text(_conf(case, case.cluster, seed))
    ours = ["--quiet", "--set", f"cluster.workspace={workspace}"]
    job = [str(conf), *_words(case, seed)]
    if case.start is Start.PYTHON:
        return [[sys.executable, *_words(case, seed), "--save", str(workspace / "final.safetensors")]]
    if case.start is Start.RUN:
        return [[sys.executable, "-m", "topotrain", "run", *ours, *job]]
    meeting = ["--rendezvous", (folder / "meeting").as_uri(), "--host", host, "--nprocs", str(case.units)]
    unit = [sys.executable, "-m", "topotrain", "unit", *ours, *meeting]
    return [[*unit, "--rank", str(rank), *job] for rank in range(case.units)]


def _resuming(case: Case, folder: Path, seed: int) -> list[str]:
    """The command line that goes on from the snapshot behind step 8."""
    conf, workspace = folder / "resumed.conf", folder / "workspace"
    conf.write_text(_conf(case, case.resumed, seed))
    resume = ["--resume", str(workspace / "manifests" / "step-8"), "--set", f"cluster.workspace={workspace}"]
    return [sys.executable, "-m", "topotrain", "run", "--quiet", *resume, str(conf), *_words(case, seed)]


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
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
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


def code() -> str:
    """The last commit that changed the package, with "+changes" where the package holds something else."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words, "--", "topotrain"], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    found = git("log", "-1", "--format=%h", "--abbrev=12")
    return (found or "unknown") + ("+changes" if git("status", "--porcelain") else "")


class Verdict(StrEnum):
    """What came of a case."""

    OK = "ok"
    DIFFERENT = "DIFFERENT"
    UNSTABLE = "UNSTABLE"
    UNEQUAL = "UNEQUAL"
    FAILED = "FAILED"
    NOT_RUN = "NOT RUN"
    NOT_RECORDED = "NOT RECORDED"


WELL = (Verdict.OK, Verdict.NOT_RUN)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case's verdict, its digest where there is one, and a word on it."""

    name: str
    verdict: Verdict
    digest: str = ""
    text: str = ""


Runner = Callable[[Case], str]


def compare(case: Case, recorded: Mapping[str, Mapping[str, str]], runner: Runner = run) -> Outcome:
    """Run a case once, beside its recorded digest."""
    try:
        found = runner(case)
    except Refused as reason:
        return Outcome(case.name, Verdict.NOT_RUN, text=str(reason))
    except JobFailed as reason:
        return Outcome(case.name, Verdict.FAILED, text=str(reason))
    if case.name not in recorded:
        return Outcome(case.name, Verdict.NOT_RECORDED, found)
    expected = recorded[case.name]
    if found == expected["digest"]:
        return Outcome(case.name, Verdict.OK, found)
    return Outcome(case.name, Verdict.DIFFERENT, found, f"recorded {expected['digest'][:16]} at {expected['code']}")


def settle(case: Case, recorded: Mapping[str, Mapping[str, str]], runner: Runner = run) -> Outcome:
    """Run a case twice; its digest is fit to be recorded where the verdict is OK."""
    try:
        found, again = runner(case), runner(case)
    except Refused as reason:
        return Outcome(case.name, Verdict.NOT_RUN, text=str(reason))
    except JobFailed as reason:
        return Outcome(case.name, Verdict.FAILED, text=str(reason))
    if found != again:
        return Outcome(case.name, Verdict.UNSTABLE, found, f"the second run: {again[:16]}")
    reference = recorded.get(case.same_as, {}).get("digest", found)
    if reference != found:
        return Outcome(case.name, Verdict.UNEQUAL, found, f"{case.same_as}: {reference[:16]}")
    return Outcome(case.name, Verdict.OK, found)


def chosen(names: Sequence[str]) -> list[Case]:
    """Cases by name; all of them for none. Raises ValueError for a name that no case has."""
    known = {case.name: case for case in CASES}
    for name in names:
        if name not in known:
            raise ValueError(f"--only {name}: must be one of {', '.join(known)}")
    return [known[name] for name in names] if names else list(CASES)


def _record(cases: Sequence[Case], recorded: dict[str, dict[str, str]]) -> Iterator[Outcome]:
    """Settle cases one after the other. The file is written after each, so that nothing is lost by Ctrl-C."""
    state = code()
    for case in cases:
        outcome = settle(case, recorded)
        if outcome.verdict is not Verdict.NOT_RUN:
            recorded.pop(case.name, None)
        if outcome.verdict is Verdict.OK:
            recorded[case.name] = {"digest": outcome.digest, "code": state}
        order = {name: recorded[name] for name in (case.name for case in CASES) if name in recorded}
        page = {"command": "python -m benchmarks.digests --write", "conditions": conditions(), "machine": machine()}
        RECORD.write_text(json.dumps({**page, "cases": order}, indent=1) + "\n", encoding="utf-8")
        yield outcome


def _gone(recorded: Mapping[str, object]) -> list[Outcome]:
    """Digests whose case is not in the table any more: nothing says that they still hold."""
    known = {case.name for case in CASES}
    return [Outcome(name, Verdict.FAILED, text="no such case any more") for name in recorded if name not in known]


def _shown(outcomes: Iterable[Outcome], count: int, as_json: bool) -> list[Outcome]:
    """All outcomes, each told as soon as it is there."""
    told, began = [], time.monotonic()
    for number, outcome in enumerate(outcomes, 1):
        told.append(outcome)
        say(f"[{number}/{count}] {outcome.name}: {outcome.verdict}, {time.monotonic() - began:.0f} s so far")
        if not as_json:
            print(f"{outcome.verdict:<12} {outcome.name:<26} {outcome.digest[:16]:<16} {outcome.text}".rstrip())
    return told


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.digests", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these cases")
    parser.add_argument("--write", action="store_true", help="run every case twice, and record what is the same")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON on stdout")
    options = parser.parse_args()
    try:
        cases = chosen(options.only)
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # processes are then taken away as usual
    page: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    recorded, here = dict(page.get("cases", {})), conditions()
    why = incomparable(page["conditions"], here) if page else ""
    if why and (options.only or not options.write):
        say(f"not compared: this machine has {why}; digests of one kind of machine say nothing about another")
        raise SystemExit(2)
    if options.write:
        told = _shown(_record(cases, recorded if options.only else {}), len(cases), options.json)
    else:
        found = (compare(case, recorded) for case in cases)
        told = _shown(found, len(cases), options.json) + ([] if options.only else _gone(recorded))
    if options.json:
        print(json.dumps({"conditions": here, "code": code(), "cases": [asdict(outcome) for outcome in told]}))
    wrong = [outcome for outcome in told if outcome.verdict not in WELL]
    if wrong and page and machine() != page["machine"]:
        say(f"recorded on: {page['machine']}; this is: {machine()}")
    say(f"{len(told) - len(wrong)} of {len(told)} cases are as they should be")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
