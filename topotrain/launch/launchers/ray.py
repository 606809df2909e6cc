"""Ray: one actor per unit in a placement group of a Ray cluster, in front. Ray's core alone is used.

Rule: Ray places and watches, our units do the rest. An actor runs one unit as a process of its own and nothing else;
when the actor goes, the unit goes, too. A lost actor or node ends the job with that as its cause. Ray itself restarts
nobody: with --max-restarts a job that failed starts again as a whole, from its beginning and under a name of its own
(as under torchrun), though a running job could take one unit in again. What a unit must know travels as the argument
of a call, since Ray shows an actor's environment on command lines.
"""

import ctypes
import importlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from topotrain.config.job import ConfigError
from topotrain.config.topology import Topology
from topotrain.core.events import Failed
from topotrain.launch.launchers import foreground_tool
from topotrain.launch.launchers.ray_capacity import better, fits
from topotrain.launch.launchers.submission import RENDEZVOUS_VARIABLE, LaunchResult, Submission, without_password
from topotrain.launch.multinode.node_info import JobEnd, with_job

if TYPE_CHECKING:
    from topotrain.launch.agent.stop_signals import StopSignals

INSTALL = "pip install 'topotrain[ray]'"
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
LOOK_S, QUIET_S, ROOM_S = 0.2, 5.0, 300.0
"""Between two looks at the actors; until waiting for room in the cluster is told; until it is given up."""
FINAL_CODES = frozenset({0, 2, 130, 143})
"""Ends that a restart would not better: well, bad input, and by signal."""
_PR_SET_PDEATHSIG = 1
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@dataclass(frozen=True, slots=True)
class RayOptions:
    """What the user wants of Ray. cpus: of each unit; 0: one for each of its processes. room: seconds to wait.

    grows: the user has said for how long, so nodes may still join.
    """

    strategy: str
    address: str = "auto"
    cpus: float = 0.0
    gpus: float = 0.0
    room: float = ROOM_S
    grows: bool = False


def ask(topology: Topology, extra: Sequence[str]) -> RayOptions:
    """Read --pass words. Raises ConfigError.

    Several server groups are several copies of each shard, which shall not go with one node: then one unit per node is
    a must, and else a wish.
    """
    given = RayOptions("STRICT_SPREAD" if topology.synced else "SPREAD")
    for word in extra:
        name, _, value = word.partition("=")
        if name == "strategy" and value in STRATEGIES:
            given = replace(given, strategy=value)
        elif name == "address" and value:
            given = replace(given, address=value)
        elif name in ("cpus", "gpus", "room") and _is_number(value):
            number: dict[str, Any] = {name: float(value)}
            given = replace(given, **number, grows=given.grows or name == "room")
        else:
            strategies = "|".join(STRATEGIES)
            accepted = f"must be strategy={strategies}, address=HOST:PORT|auto|local, cpus=N, gpus=N or room=SECONDS"
            raise ConfigError("--pass", word, accepted)
    return given


def _is_number(text: str) -> bool:
    return text.isascii() and text.replace(".", "", 1).isdecimal()


def bundles(submission: Submission, asked: RayOptions) -> list[dict[str, float]]:
    """What each unit takes of a node, by rank. Raises ConfigError for options that Ray has no use for."""
    options = submission.options
    for option, value in (("--nodes", options.nodes), ("--hosts", options.hosts)):
        if value:
            raise ConfigError(option, value, "is not for ray, which finds the nodes: say how with --pass=strategy=")
    gpus = {"GPU": asked.gpus} if asked.gpus else {}
    units = submission.topology.units
    return [{"CPU": asked.cpus or len(unit.workers) + bool(unit.servers), **gpus} for unit in units]


def command(submission: Submission) -> str:
    """What is asked of Ray, which has no command line for it."""
    asked = ask(submission.topology, submission.options.extra)
    lines = [f"ray.init(address={asked.address!r})", f"placement_group(strategy={asked.strategy!r}, bundles=["]
    lines += [f"    {bundle},  # unit {rank}" for rank, bundle in enumerate(bundles(submission, asked))]
    unit = f"the actor in bundle R runs {shlex.join(submission.command)} --rank R --nprocs {submission.units}"
    return submission.show("\n".join([*lines, "])", unit]))


def start(submission: Submission) -> LaunchResult:
    """Run all units to their end, as often as they may start. Raises ConfigError where there is no Ray, or no room."""
    asked = ask(submission.topology, submission.options.extra)
    wanted = bundles(submission, asked)
    from topotrain.launch.agent.stop_signals import signals

    with _connected(asked.address) as ray:
        _check_room(ray, wanted, asked)
        submission.write()
        with signals() as heard:
            count = 0
            while True:
                life = _Life(ray, lived(submission, count), asked, heard)
                code = life.live()
                if code in FINAL_CODES or heard.came or count == submission.options.max_restarts:
                    return LaunchResult(code, {"restarts": str(count)})
                count += 1
                _say(f"all units start again ({count} of {submission.options.max_restarts})")


def lived(submission: Submission, count: int) -> Submission:
    """The job in its life number `count`: a unit must not hear how an earlier life has ended."""
    if count == 0:
        return submission
    name = f"{submission.id}.life-{count}"
    url = with_job(submission.rendezvous, name)
    return replace(submission, id=name, rendezvous=url, environ={**submission.environ, RENDEZVOUS_VARIABLE: url})


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Ray itself, connected. Raises ConfigError."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise ConfigError("launcher", "ray", f"is not installed: {INSTALL}") from None
    own = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=True, **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        accepted = f"no Ray cluster answers ({why}): name one with --pass=address=, or `ray start --head` begins one"
        raise ConfigError("--pass=address", without_password(address), accepted) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_room(ray: Any, wanted: Sequence[Mapping[str, float]], asked: RayOptions) -> None:
    """Raise ConfigError where the units would wait for room that these nodes never have."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if asked.grows or fits(nodes, wanted, asked.strategy):
        return
    have = "; ".join(_amounts(node) for node in nodes)
    other = better(nodes, wanted)
    accepted = f"has no room for the {len(wanted)} units ({_amounts(wanted[0])} for unit 0) on the nodes ({have}), "
    accepted += f"but {other} has; " if other else "and no other strategy has; "
    accepted += "where nodes are still to join, say with --pass=room=SECONDS for how long to wait"
    raise ConfigError("--pass=strategy", asked.strategy, accepted)


def _amounts(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amounts[kind]:g} {kind}" for kind in ("CPU", "GPU") if kind in amounts) or "0 CPU"


class UnitActor:
    """The actor: runs one unit on its node."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __repr__(self) -> str:  # Ray sets it before each line of the actor's output
        return f"unit {self._rank}"

    def where(self) -> str:
        """The name of this host, and of Ray's node on it."""
        ray: Any = importlib.import_module("ray")
        return f"{socket.gethostname()} (Ray node {ray.get_runtime_context().get_node_id()[:12]})"

    def run(self, words: Sequence[str], environ: Mapping[str, str], folder: str, keep_stdout: bool) -> int:
        """The exit code of a process that lives no longer than this one. `keep_stdout`: else its stdout is stderr."""
        bound = [sys.executable, "-m", "topotrain.launch.launchers.ray", str(os.getpid()), *words]
        out = None if keep_stdout else sys.stderr.fileno()
        try:
            everything = {**os.environ, **environ}
            code = subprocess.run(bound, env=everything, cwd=folder, stdin=subprocess.DEVNULL, stdout=out).returncode
        except OSError as error:
            print(f"topotrain: {error.filename}: {error.strerror} on {self.where()}", file=sys.stderr, flush=True)
            return 2
        return code if code >= 0 else 128 - code


def main(parent: str, *words: str) -> None:
    """Become the unit, which gets a SIGTERM when the actor `parent` ends, however that comes about."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == int(parent):
        os.execv(words[0], words)


@dataclass(slots=True)
class _Life:
    """One start of the whole job."""

    ray: Any
    at: Submission
    asked: RayOptions
    heard: "StopSignals"
    codes: dict[int, int] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    lost: Failed | None = None
    lost_rank: int = -1

    def live(self) -> int:
        """Run it to its end; returns its exit code. Nothing of it is left in the cluster."""
        util = self.ray.util
        group = util.placement_group(bundles(self.at, self.asked), strategy=self.asked.strategy)
        actors: list[Any] = []
        try:
            if not self._has_room(group):
                return 128 + self.heard.came[0] if self.heard.came else 1
            actors += [self._actor(group, rank) for rank in range(self.at.units)]
            self._watch(actors)
        finally:
            for actor in actors:
                with suppress(self.ray.exceptions.RayError):
                    self.ray.kill(actor)
            util.remove_placement_group(group)
        if self.heard.came:
            return 128 + self.heard.came[0]
        if self.lost:
            return 1
        return foreground_tool.agreed(self.at, next((code for code in self.codes.values() if code), 0))

    def _has_room(self, group: Any) -> bool:
        began = time.monotonic()
        due = began + QUIET_S
        while not group.wait(LOOK_S):
            now = time.monotonic()
            if self.heard.came:
                return False
            if now >= due or now - began > self.asked.room:
                need = _amounts(group.bundle_specs[0])
                units = f"{self.at.units} units ({need} for unit 0; {self.asked.strategy})"
                _say(f"the Ray cluster has no room for {units}; {now - began:.0f} of {self.asked.room:g} s waited")
                due = now + 4 * QUIET_S
            if now - began > self.asked.room:
                return False
        return True

    def _actor(self, group: Any, rank: int) -> Any:
        scheduling: Any = importlib.import_module("ray.util.scheduling_strategies")
        bundle = group.bundle_specs[rank]
        place = scheduling.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "max_restarts": 0}
        return self.ray.remote(UnitActor).options(**options, scheduling_strategy=place).remote(rank)

    def _watch(self, actors: Sequence[Any]) -> None:
        """Return when all units have ended; after a loss or a signal not later than PATIENCE_S."""
        options = self.at.options
        places = {actor.where.remote(): rank for rank, actor in enumerate(actors)}
        runs: dict[Any, int] = {}
        for rank, actor in enumerate(actors):
            words = [*self.at.command, "--rank", str(rank), "--nprocs", str(self.at.units)]
            runs[actor.run.remote(words, dict(self.at.environ), os.getcwd(), not options.json)] = rank
        until = float("inf")
        while runs and time.monotonic() < until and len(self.heard.came) < 2:
            for ref in self.ray.wait([*places, *runs], timeout=LOOK_S)[0]:
                self._hear(ref, places, runs)
            bad = self.heard.came or self.lost or any(self.codes.values())
            if bad and until == float("inf"):
                until = time.monotonic() + foreground_tool.PATIENCE_S
                self._tell()

    def _hear(self, ref: Any, places: dict[Any, int], runs: dict[Any, int]) -> None:
        rank = places.get(ref, runs.get(ref, -1))
        try:
            answer = self.ray.get(ref)
        except self.ray.exceptions.RayError as error:
            if self.lost is None:
                where = self.hosts.get(rank, "a node")
                self.lost = Failed(f"unit {rank}", "died", f"its Ray actor on {where} is lost: {_reason(error)}", "")
                self.lost_rank = rank
                _say(f"{self.lost.who}: {self.lost.text}")
        else:
            if ref in runs:
                self.codes[rank] = answer
            else:
                self.hosts[rank] = answer
                _say(f"unit {rank} is on {answer}")
        places.pop(ref, None)
        runs.pop(ref, None)

    def _tell(self) -> None:
        """Let the units that still live know why the job ends."""
        if self.heard.came:
            number = self.heard.came[0]
            foreground_tool.ending(
                self.at, JobEnd(128 + number, text=f"ended by {signal.Signals(number).name} to the launcher")
            )
        elif self.lost is not None:
            foreground_tool.ending(self.at, JobEnd.of(self.lost, self.lost_rank, ""))


def _reason(error: Exception) -> str:
    """The line of Ray's text that says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "because" in line or "died" in line.lower()), lines[0] if lines else "")


def _say(text: str) -> None:
    print(f"topotrain: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
