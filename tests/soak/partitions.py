"""Row P: the network between two hosts is cut, one way or both; it flaps; the store is wiped, or goes for good.

`python -m tests.soak.partitions --count 20 --seed 1`. The hosts are network namespaces, and each job has a ledger. A
job that hears nothing of a cut, because the network came back before the lease was over, or because only the store was
lost, must end well. Any other must end on both hosts, say why, and go on from its last snapshot with the right cells.
"""

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.record import ROOT, say
from tests.soak.torment import wrong_values

sys.path.insert(0, str(ROOT / "tests" / "support"))

from folder_wipe import block, wipe
from job_runner import JobRunner
from unit_hosts import UNIT, HostNetwork, Job, newest

EPOCHS = 4
LEDGER = ("--epochs", str(EPOCHS), "--step-s", "0.03")
LAYOUTS = {
    "AllReduce": "nworkers_per_group: 2 nservers_per_group: 2",
    "Sandblaster": "nworkers_per_group: 2 nservers_per_group: 1",
    "Downpour": "nworker_groups: 2 nworkers_per_group: 1 nservers_per_group: 2",
}
"""Two units each."""
LEASE_S = {"flap": 12}
"""Seconds; 2 for others. Cuts that follow one another may hide each try of the kernel, up to 6.2 s after the first."""
ENDS_S = 45.0
"""Within this time both units must have ended after a cut."""
BEGINS_S, JOB_S = 300.0, 180.0
WHY = ("has not answered for", "found this one out of reach", "vanished without a word")


@dataclass(slots=True)
class Ground:
    """Two hosts, a private folder, and the command that starts a unit."""

    network: HostNetwork
    folder: Path
    command: Sequence[str] = UNIT


@dataclass(slots=True)
class Trial:
    """What came of one job. wrong: one sentence for each thing that is not as it must be. ended_s: after the cut."""

    kind: str
    layout: str
    seed: int
    wrong: list[str] = field(default_factory=list)
    ended_s: float = 0.0
    said: str = ""


def flap(network: HostNetwork, rng: random.Random) -> None:
    """Short cuts of one direction or both."""
    for _ in range(rng.randint(1, 3)):
        for number in rng.choice([(0,), (1,), (0, 1)]):
            network.block(number)
        time.sleep(rng.uniform(0.1, 1.2))
        network.restore()
        time.sleep(rng.uniform(0.1, 0.5))


def cut(kind: str, network: HostNetwork, rng: random.Random) -> None:
    """Cut one direction, both, a link that is then down, or both until it is too late."""
    if kind == "pulled":
        network.set_link(rng.randrange(2), "down")
        return
    for number in (rng.randrange(2),) if kind == "one way" else (0, 1):
        network.block(number)
    if kind == "comes back":
        time.sleep(rng.uniform(3.5, 6.0))
        network.restore()


KINDS = ("flap", "one way", "wiped", "both ways", "gone", "pulled", "comes back")


def trial(ground: Ground, kind: str, layout: str, seed: int) -> Trial:
    """Run one job over two hosts, and cut what `kind` says in the middle of it."""
    found, rng = Trial(kind, layout, seed), random.Random(seed)
    folder = ground.folder / f"trial-{seed}"
    folder.mkdir()
    cluster, url = f"{LAYOUTS[layout]} lease_s: {LEASE_S.get(kind, 2)}", (folder / "store").as_uri() + "?job=ledger"
    job = Job(JobRunner(folder, "", ""), cluster, "ledger.py", list(LEDGER), [0, 1], url, ground.network)
    job.conf.write_text(f"reduce: kSum snapshot_s: 0.5 restarts: 0\n{job.conf.read_text()}")
    try:
        _begin(job, ground.command)
        time.sleep(rng.uniform(0.0, 0.5))
        if kind == "flap":
            flap(ground.network, rng)
            _well(job, found)
        elif kind in ("wiped", "gone"):
            (block if kind == "gone" else wipe)(folder / "store")
            _well(job, found)
        else:
            began = time.monotonic()
            cut(kind, ground.network, rng)
            _badly(job, found)
            found.ended_s = time.monotonic() - began
            ground.network.restore()
            _goes_on(job, found)
        found.wrong += wrong_values(job.workspace / "final.safetensors", EPOCHS)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        found.wrong.append(f"{type(error).__name__}: {str(error)[:500]}")
    finally:
        ground.network.restore()
        for unit in job.units.values():
            unit.kill()
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _begin(job: Job, command: Sequence[str]) -> None:
    """Start the units; returns when there is a snapshot."""
    assert job.network is not None
    for rank in (0, 1):
        job.start(rank, "--host", job.network.addresses[rank], command=command)
    until = time.monotonic() + BEGINS_S
    while not newest(job):
        assert time.monotonic() < until, "the job did not begin"
        assert all(unit.process.poll() is None for unit in job.units.values()), job.end()
        time.sleep(0.02)


def _well(job: Job, found: Trial) -> None:
    for rank, (code, _, err) in job.end(JOB_S).items():
        found.said += err
        found.wrong += [f"unit {rank} ended with {code}: {err[-500:]}"] if code else []


def _badly(job: Job, found: Trial) -> None:
    """Both units end, and say why."""
    for rank, (code, _, err) in job.end(ENDS_S).items():
        found.said += err
        if not code:
            found.wrong.append(f"unit {rank} ended well, though it was cut off")
        if not any(why in err for why in WHY):
            found.wrong.append(f"unit {rank} does not say why: {err[-500:]}")


def _goes_on(job: Job, found: Trial) -> None:
    """From the last snapshot, on one machine."""
    assert job.network is not None
    words = [sys.executable, "-m", "topotrain", "run", "--quiet", "--resume", str(job.workspace)]
    words += ["--forkserver", job.network.served_at(0)]
    done = subprocess.run(words, cwd=job.folder, capture_output=True, text=True, timeout=JOB_S)
    if done.returncode:
        found.wrong.append(f"--resume ended with {done.returncode}: {done.stderr[-500:]}")


def run(count: int, seed: int) -> list[Trial]:
    """So many trials. Raises OSError, CalledProcessError where namespaces cannot be made."""
    found: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="tt-cut-") as name:
        network = HostNetwork(Path(name))
        try:
            network.start()
            for number in range(count):
                layout = list(LAYOUTS)[number % len(LAYOUTS)]
                one = trial(Ground(network, Path(name)), KINDS[number % len(KINDS)], layout, seed + number)
                after = f", ended {one.ended_s:.1f} s after the cut" if one.ended_s else ""
                say(f"  {one.kind}, {one.layout}, seed {one.seed}: {'; '.join(one.wrong) or 'ok'}{after}")
                if one.wrong:
                    say(one.said)
                found.append(one)
        finally:
            network.stop()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.partitions", description="Cut the network, and count.")
    parser.add_argument("--count", type=int, default=20, help="jobs; 20")
    parser.add_argument("--seed", type=int, default=1, help="of the first job; each has the next")
    given = parser.parse_args()
    try:
        found = run(given.count, given.seed)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"NOT RUN: network namespaces cannot be made here: {getattr(error, 'stderr', '') or error}")
        raise SystemExit(77) from None
    wrong, cuts = [t for t in found if t.wrong], sorted(t.ended_s for t in found if t.ended_s)
    ended = f"; after a cut the job ended within {cuts[-1]:.1f} s" if cuts else ""
    print(f"{len(found)} jobs over network namespaces, {len(wrong)} of them wrong{ended}; seeds from {given.seed}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
