"""Views of jobs that no job has made: of any size, with all kinds of events, the same in every run."""

import math
from dataclasses import dataclass
from typing import Any

UNSAFE = "<img src=x onerror=\"document.title='broken'\"> & <b>bold</b>"
"""What a script may print. It must be shown as it is."""

_KINDS = (
    ("snapshot", "job", "snapshot 1 at step 40"),
    ("incident", "worker 0/1", f"worker 0/1 died (signal 9): {UNSAFE}"),
    ("recovered", "worker 0/1", "its group trains again after 1.4 s"),
    ("left", "job", "worker group 2 leaves"),
    ("joined", "job", "worker group 2 joins"),
    ("resized", "job", "1 worker leaves"),
    ("skipped", "worker 1/0", "step 77 was skipped: a gradient was not finite"),
    ("notice", "server 0/0", "its backup copy is complete"),
    ("evaluation", "job", "test at step 100: loss 0.41"),
)


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """How large the job is, and what happens in it.

    units_of: processes per unit. slow: the index of a group that is behind the others; -1: none.
    """

    groups: int = 3
    workers: int = 1
    servers: int = 2
    hosts: int = 1
    framework: str = "Downpour"
    name: str = "digits"
    seconds: float = 240.0
    points: int = 120
    slow: int = 2
    running: bool = False

    def view(self) -> dict[str, Any]:
        """Return the job's view, version 1."""
        workers = [f"worker {g}/{i}" for g in range(self.groups) for i in range(self.workers)]
        servers = [f"server 0/{i}" for i in range(self.servers)]
        return {
            "version": 1,
            "cursor": 1000,
            "job": self._job(),
            "processes": [self._process(number, name) for number, name in enumerate(workers + servers)],
            "series": self._series(workers, servers),
            "states": {name: self._states(number, name) for number, name in enumerate(workers + servers)},
            "story": [
                {"at": self.seconds * (number + 1) / (len(_KINDS) + 1), "kind": kind, "of": of, "text": text}
                for number, (kind, of, text) in enumerate(_KINDS)
            ],
        }

    def _job(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "framework": self.framework,
            "workspace": f"/jobs/{self.name}",
            "started": 1_800_000_000,
            "elapsed": self.seconds,
            "ended": None if self.running else self.seconds,
            "code": None if self.running else 0,
            "block": f"cluster {{\n  nworker_groups: {self.groups}\n  nservers_per_group: {self.servers}\n}}",
            "progress": 0.63 if self.running else 1.0,
            "eta_s": 140.0 if self.running else None,
            "epoch": 4,
            "step": 2 * self.points,
            "loss": 0.1004,
            "samples_per_s": 240.0,
        }

    def _process(self, number: int, name: str) -> dict[str, Any]:
        role, _, place = name.partition(" ")
        group, index = map(int, place.split("/"))
        found: dict[str, Any] = {"name": name, "role": role, "group": group, "index": index, "unit": number}
        found |= {"host": f"node{number % self.hosts}" if self.hosts > 1 else "localhost", "pid": 4000 + number}
        if role == "server":
            found["slices"] = [{"name": f"layers.{n}.weight", "first": 640 * n, "count": 640} for n in range(12)]
        return found

    def _states(self, number: int, name: str) -> list[list[Any]]:
        passing = ("computes", "waits") if name.startswith("worker") else ("applies", "waits")
        times = [self.seconds * (0.02 + 0.96 * n / 60) + 0.07 * number for n in range(60)]
        found: list[list[Any]] = [[0.0, "starting"]]
        found += [[at, passing[(n + number) % 2]] for n, at in enumerate(times)]
        if name == "worker 0/1" or (self.workers == 1 and name == "worker 1/0"):
            death = self.seconds * 0.2
            found = [entry for entry in found if not death <= entry[0] < death + self.seconds * 0.1]
            found += [[death, "dead"], [death + self.seconds * 0.05, "restarts"]]
        if not self.running:
            found.append([self.seconds - 0.01, "finished"])
        return sorted(found, key=lambda entry: float(entry[0]))

    def _series(self, workers: list[str], servers: list[str]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []

        def add(metric: str, of: str, value: Any) -> None:
            times = [self.seconds * (n + 1) / self.points for n in range(self.points)]
            points = [[at, 2 * (n + 1), value(n)] for n, at in enumerate(times)]
            found.append({"id": f"{of}:{metric}", "metric": metric, "of": of, "points": points})

        for group in range(self.groups):
            add("loss", f"group {group}", lambda n, g=group: 2.3 * math.exp(-n / 35) + 0.1 + 0.03 * math.sin(n + g))
        for number, worker in enumerate(workers):
            speed = 40.0 if int(worker.split()[1].split("/")[0]) == self.slow else 100.0
            add("loss", worker, lambda n, k=number: 2.3 * math.exp(-n / 35) + 0.1 + 0.05 * math.sin(n + k))
            add("samples_per_s", worker, lambda n, k=number, s=speed: s + 4 * math.sin(n / 3 + k))
            add("waiting_share", worker, lambda n, k=number: 0.3 + 0.1 * math.sin(n / 5 + k))
            add("staleness_mean", worker, lambda n, k=number: 1.5 + 0.3 * math.sin(n / 9 + k))
            add("staleness_p95", worker, lambda n, k=number: 3.0 + 0.3 * math.sin(n / 9 + k))
            add("staleness_max", worker, lambda n, k=number: 4.0 + n // 60)
            add("log:accuracy", worker, lambda n, k=number: 1 - math.exp(-n / 40) + 0.01 * math.sin(n + k))
        for number, name in enumerate(workers + servers):
            add("memory_bytes", name, lambda n, k=number: 2.4e8 + 1e6 * k + 4e5 * math.sin(n / 10))
            add("bytes_per_s", name, lambda n, k=number: 2e6 * (1 + k) + 1e5 * math.sin(n))
        for number, server in enumerate(servers):
            add("updates_per_s", server, lambda n, k=number: 60 + 3 * math.sin(n / 4 + k))
        add("staleness_bound", "job", lambda n: 6.0)
        return found
