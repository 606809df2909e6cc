"""Ray: runs one actor per unit in a placement group, in the foreground.

Only Ray's core is used. Ray places and monitors the actors. An actor runs one unit as a child process, and the unit
ends with its actor. The loss of an actor or a node ends the job, with that as its cause. With --max-restarts a failed
job restarts as a whole, from its beginning and under a new name, as under torchrun.
"""

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
from topotrain.launch.grace_period import grace
from topotrain.launch.launchers import foreground_tool
from topotrain.launch.launchers.ray_capacity import Amounts, better, fits
from topotrain.launch.launchers.submission import RENDEZVOUS_VARIABLE, LaunchResult, Submission, without_password
from topotrain.launch.multinode.node_info import JobEnd, with_job
from topotrain.launch.runtime.child_channel import die_with_parent

if TYPE_CHECKING:
    from topotrain.launch.agent.stop_signals import StopSignals

INSTALL = "pip install 'topotrain[ray]'"
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
LOOK_S, QUIET_S, ROOM_S = 0.2, 5.0, 300.0
"""Seconds between two polls of the actors; until a notice about missing capacity; until the launcher gives up."""
FINAL_CODES = frozenset({0, 2, 130, 143})
"""Exit codes without a restart: success, bad input, and signals."""
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@dataclass(frozen=True, slots=True)
class RayOptions:
    """The user's options for Ray.

    cpus: CPUs of each unit; 0: one for each of its processes. room: seconds to wait for capacity.
    grows: the user has set `room`, so nodes may still join the cluster.
    chosen: the user has set `strategy`.
    """

    strategy: str
    address: str = "auto"
    cpus: float = 0.0
    gpus: float = 0.0
    room: float = ROOM_S
    grows: bool = False
    chosen: bool = False


def ask(topology: Topology, extra: Sequence[str]) -> RayOptions:
    """Parse the words of --pass. Raises ConfigError."""
    # Several server groups hold replicas of each shard, which must not be lost with one node.
    given = RayOptions("STRICT_SPREAD" if topology.synced else "SPREAD")
    for word in extra:
        name, _, value = word.partition("=")
        if name == "strategy" and value in STRATEGIES:
            given = replace(given, strategy=value, chosen=True)
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
    """Return the resources of each unit, by rank."""
    gpus = {"GPU": asked.gpus} if asked.gpus else {}
    units = submission.topology.units
    return [{"CPU": asked.cpus or len(unit.workers) + bool(unit.servers), **gpus} for unit in units]


def command(submission: Submission) -> str:
    """Return a description of the calls to Ray, which has no command line for them."""
    asked = ask(submission.topology, submission.options.extra)
    lines = [f"ray.init(address={asked.address!r})"]
    if asked.strategy == "STRICT_SPREAD" and not (asked.chosen or asked.grows):
        lines.append("# strategy='SPREAD' if the cluster has one node")
    lines.append(f"placement_group(strategy={asked.strategy!r}, bundles=[")
    lines += [f"    {bundle},  # unit {rank}" for rank, bundle in enumerate(bundles(submission, asked))]
    unit = f"the actor in bundle R runs {shlex.join(submission.command)} --rank R --nprocs {submission.units}"
    return submission.show("\n".join([*lines, "])", unit]))


def start(submission: Submission) -> LaunchResult:
    """Run all units to their end, with restarts as allowed.

    Raises ConfigError where Ray is not installed, or has no capacity.
    """
    asked = ask(submission.topology, submission.options.extra)
    wanted = bundles(submission, asked)
    from topotrain.launch.agent.stop_signals import signals

    with _connected(asked.address) as ray:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        asked = _for_nodes(nodes, wanted, asked)
        # Before the folder is written: a job that can never run leaves nothing behind.
        _check_room(nodes, wanted, asked)
        submission.write()
        with signals() as stop:
            count = 0
            while True:
                attempt = _Attempt(ray, for_attempt(submission, count), asked, stop)
                code = attempt.run()
                # A signal or a wrong configuration would only repeat itself.
                if code in FINAL_CODES or stop.came or count == submission.options.max_restarts:
                    return LaunchResult(code, {"restarts": str(count)})
                count += 1
                foreground_tool.say(f"all units start again ({count} of {submission.options.max_restarts})")


def for_attempt(submission: Submission, count: int) -> Submission:
    """Return the submission of attempt number `count`, with a name of its own."""
    if count == 0:
        return submission
    # A unit must not read how an earlier attempt has ended.
    name = f"{submission.id}.life-{count}"
    url = with_job(submission.rendezvous, name)
    return replace(submission, id=name, rendezvous=url, environ={**submission.environ, RENDEZVOUS_VARIABLE: url})


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Yield the connected Ray module. Raises ConfigError."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise ConfigError("launcher", "ray", f"is not installed: {INSTALL}") from None
    # An existing cluster has its dashboard already.
    own = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=True, **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        accepted = f"no Ray cluster answers ({why}): name one with --pass=address=, or run `ray start --head`"
        raise ConfigError("--pass=address", without_password(address), accepted) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _for_nodes(nodes: Sequence[Amounts], wanted: Sequence[Amounts], asked: RayOptions) -> RayOptions:
    """Return the options with the default strategy for a cluster of these nodes."""
    # With `room` more nodes may join. A strategy of the user's is kept.
    only = len(nodes) == 1 and len(wanted) > 1 and not asked.grows
    if not only or asked.chosen or asked.strategy != "STRICT_SPREAD" or not fits(nodes, wanted, "SPREAD"):
        return asked
    foreground_tool.say(
        "the Ray cluster has one node, so the copies of each shard share it and are lost with it: "
        "strategy SPREAD in place of STRICT_SPREAD"
    )
    return replace(asked, strategy="SPREAD")


def _check_room(nodes: Sequence[Amounts], wanted: Sequence[Amounts], asked: RayOptions) -> None:
    """Raise ConfigError where these nodes never have enough capacity."""
    # With `room` nodes may still join, so nothing is impossible yet.
    if asked.grows or fits(nodes, wanted, asked.strategy):
        return
    have = "; ".join(_amounts(node) for node in nodes)
    other = better(nodes, wanted)
    accepted = f"has no room for the {len(wanted)} units ({_amounts(wanted[0])} for unit 0) on the nodes ({have}), "
    accepted += f"but {other} has; " if other else "and no other strategy has; "
    accepted += "where nodes are still to join, set the seconds to wait with --pass=room=SECONDS"
    raise ConfigError("--pass=strategy", asked.strategy, accepted)


def _amounts(amounts: Amounts) -> str:
    return ", ".join(f"{amounts[kind]:g} {kind}" for kind in ("CPU", "GPU") if kind in amounts) or "0 CPU"


class UnitActor:
    """The actor that runs one unit on its node."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __repr__(self) -> str:  # Ray's prefix of each line of the actor's output
        return f"unit {self._rank}"

    def where(self) -> str:
        """Return the name of this host, and of Ray's node on it."""
        ray: Any = importlib.import_module("ray")
        return f"{socket.gethostname()} (Ray node {ray.get_runtime_context().get_node_id()[:12]})"

    def run(self, words: Sequence[str], environ: Mapping[str, str], folder: str, keep_stdout: bool) -> int:
        """Run the unit, and return its exit code.

        keep_stdout: whether its stdout stays stdout; otherwise it is redirected to stderr.
        """
        bound = [sys.executable, "-m", "topotrain.launch.launchers.ray", str(os.getpid()), *words]
        out = None if keep_stdout else sys.stderr.fileno()
        try:
            # As arguments of the call, because Ray shows the environment of an actor on command lines.
            everything = {**os.environ, **environ}
            code = subprocess.run(bound, env=everything, cwd=folder, stdin=subprocess.DEVNULL, stdout=out).returncode
        except OSError as error:
            foreground_tool.say(f"{error.filename}: {error.strerror} on {self.where()}")
            return 2
        return code if code >= 0 else 128 - code


def main(parent: str, *words: str) -> None:
    """Replace this process by the unit, which gets SIGTERM when the actor ends."""
    die_with_parent(signal.SIGTERM)
    # The actor may have ended before the signal was requested, which then never comes.
    if os.getppid() == int(parent):
        os.execv(words[0], words)


@dataclass(slots=True)
class _Attempt:
    """One attempt of the whole job."""

    ray: Any
    at: Submission
    asked: RayOptions
    stop: "StopSignals"
    codes: dict[int, int] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    lost: Failed | None = None
    lost_rank: int = -1

    def run(self) -> int:
        """Run the attempt to its end; return its exit code."""
        util = self.ray.util
        group = util.placement_group(bundles(self.at, self.asked), strategy=self.asked.strategy)
        actors: list[Any] = []
        try:
            if not self._has_room(group):
                return 128 + self.stop.came[0] if self.stop.came else 1
            actors += [self._actor(group, rank) for rank in range(self.at.units)]
            self._watch(actors)
        finally:
            # It leaves nothing in the cluster: an actor would keep its resources.
            for actor in actors:
                with suppress(self.ray.exceptions.RayError):
                    self.ray.kill(actor)
            util.remove_placement_group(group)
        if self.stop.came:
            return 128 + self.stop.came[0]
        if self.lost:
            return 1
        # The first nonzero code may be that of a unit that the others have ended.
        return foreground_tool.agreed(self.at.rendezvous, next((code for code in self.codes.values() if code), 0))

    def _has_room(self, group: Any) -> bool:
        began = time.monotonic()
        due = began + QUIET_S
        while not group.wait(LOOK_S):
            now = time.monotonic()
            if self.stop.came:
                return False
            if now >= due or now - began > self.asked.room:
                need = _amounts(group.bundle_specs[0])
                units = f"{self.at.units} units ({need} for unit 0; {self.asked.strategy})"
                foreground_tool.say(
                    f"the Ray cluster has no room for {units}; {now - began:.0f} of {self.asked.room:g} s waited"
                )
                due = now + 4 * QUIET_S
            if now - began > self.asked.room:
                return False
        return True

    def _actor(self, group: Any, rank: int) -> Any:
        scheduling: Any = importlib.import_module("ray.util.scheduling_strategies")
        bundle = group.bundle_specs[rank]
        place = scheduling.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        # Ray restarts no actor: the loss of one ends the job, which may restart as a whole.
        options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "max_restarts": 0}
        return self.ray.remote(UnitActor).options(**options, scheduling_strategy=place).remote(rank)

    def _watch(self, actors: Sequence[Any]) -> None:
        """Wait until all units have ended."""
        options = self.at.options
        places = {actor.where.remote(): rank for rank, actor in enumerate(actors)}
        runs: dict[Any, int] = {}
        for rank, actor in enumerate(actors):
            words = [*self.at.command, "--rank", str(rank), "--nprocs", str(self.at.units)]
            runs[actor.run.remote(words, dict(self.at.environ), os.getcwd(), not options.json)] = rank
        until = float("inf")
        # A second signal means that the user does not want to wait.
        while runs and time.monotonic() < until and len(self.stop.came) < 2:
            for ref in self.ray.wait([*places, *runs], timeout=LOOK_S)[0]:
                self._receive(ref, places, runs)
            bad = self.stop.came or self.lost or any(self.codes.values())
            if bad and until == float("inf"):
                # The other units end by themselves when they read the reason. Actors that stay are killed.
                until = time.monotonic() + foreground_tool.PATIENCE_S + self._report()

    def _receive(self, ref: Any, places: dict[Any, int], runs: dict[Any, int]) -> None:
        rank = places.get(ref, runs.get(ref, -1))
        try:
            answer = self.ray.get(ref)
        except self.ray.exceptions.RayError as error:
            # Later losses follow from the first one.
            if self.lost is None:
                where = self.hosts.get(rank, "a node")
                self.lost = Failed(f"unit {rank}", "died", f"its Ray actor on {where} is lost: {_reason(error)}", "")
                self.lost_rank = rank
                foreground_tool.say(f"{self.lost.who}: {self.lost.text}")
        else:
            if ref in runs:
                self.codes[rank] = answer
            else:
                self.hosts[rank] = answer
                foreground_tool.say(f"unit {rank} is on {answer}")
        places.pop(ref, None)
        runs.pop(ref, None)

    def _report(self) -> float:
        """Write the reason of the job's end to the store for the remaining units.

        Returns the seconds that they have for a last snapshot.
        """
        if self.stop.came:
            number = self.stop.came[0]
            grace_s = grace(self.at.job, number)
            if grace_s and foreground_tool.ask_for_end(self.at.rendezvous, {**os.environ, **self.at.environ}):
                return grace_s
            foreground_tool.ending(
                self.at.rendezvous, JobEnd(128 + number, text=f"ended by {signal.Signals(number).name} to the launcher")
            )
        elif self.lost is not None:
            foreground_tool.ending(self.at.rendezvous, JobEnd.of(self.lost, self.lost_rank, ""))
        return 0.0


def _reason(error: Exception) -> str:
    """Return the line of Ray's error that gives the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "because" in line or "died" in line.lower()), lines[0] if lines else "")


if __name__ == "__main__":
    main(*sys.argv[1:])
