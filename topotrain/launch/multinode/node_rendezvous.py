"""Rendezvous of a job's units in the store, until all know the same.

    jobs/ID/job      the job's text, written when the user submits it; unit 0 may use its own instead
    jobs/ID/run      a random word for this start of the job, by unit 0
    jobs/ID/stop     set by `topotrain jobs stop`
    jobs/ID.RUN/     one start: job, host/R, alive/R, meeting with link/R and speed/R (see `link_measurement`), hosts,
                     end, the unit that leads it (leader), back/R of a unit that rejoins the running job, with
                     welcome/R.WORD as the reply, and the addresses of its processes
    jobs/ID.RUN.N/   the addresses of the processes after the Nth restart of the whole job

Each start has its own keys, so data of an earlier start is never read.
"""

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Self, TypeVar

from topotrain.comm.store import Store, StoreError, within
from topotrain.comm.store.maintained_values import MaintainedValues
from topotrain.comm.store.store_base import is_foreign
from topotrain.config import job_file
from topotrain.config.job import ConfigError, Job, OnFailure
from topotrain.config.topology import layout
from topotrain.launch.multinode.link_measurement import MEETING_KEY
from topotrain.launch.multinode.node_info import (
    EndedBeforeStart,
    HostMap,
    JobEnd,
    NodeInfo,
    NodeVerifier,
    address_towards,
    hosts_of,
    machine,
)

MEETING_S = 60.0
"""Seconds for which units wait for each other before training starts."""
QUIET_S, REPEAT_S = 5.0, 20.0
"""Seconds of waiting before the first notice, and between later ones."""
BEAT_S, ALIVE_S = 1.0, 4.0
"""Seconds between two heartbeats of a unit, and seconds after which a heartbeat expires."""
_LOOK_S = 1.0
_MISSED = 3
"""Number of consecutive reads that may find no start: the store may have lost its data, and unit 0 rewrites it."""
_T = TypeVar("_T")
_FROM = "from"


def welcome_key(rank: int, word: str) -> str:
    """Return the key that the leader writes when a process may rejoin as unit `rank`."""
    return f"welcome/{rank}.{word}"


class RendezvousNotice:
    """Prints to stderr what a unit waits for, when that takes long.

    Args:
        rank: of the unit.
        nprocs: the number of units.
    """

    def __init__(self, rank: int, nprocs: int) -> None:
        self._unit, self._began = f"unit {rank} of {nprocs}", time.monotonic()
        self._due = self._began + QUIET_S

    def __call__(self, what: str) -> None:
        """Show the wait if that is due; called again and again while it lasts."""
        now = time.monotonic()
        self.show(f"topotrain: {self._unit} waits at the rendezvous for {what}, {now - self._began:.0f} s", now)

    def show(self, text: str, now: float) -> None:
        """Print a line now and then."""
        if now >= self._due:
            self._due = now + REPEAT_S
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Remove from the terminal what must not stay there."""


class Heartbeat:
    """Writes this unit's heartbeat to the store every BEAT_S until it is closed."""

    def __init__(self, run: Store, rank: int) -> None:
        self._run, self._key = run, f"alive/{rank}"
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def _beat(self) -> None:
        count = 0
        while True:
            # A new value each time: `_await_end` and `_check_rank` distinguish it from one that was left.
            count += 1
            with suppress(StoreError):  # training continues without the store
                # The key expires without this thread, also when the process is killed or frozen.
                self._run.set(self._key, str(count).encode(), ALIVE_S)
            if self._closed.wait(BEAT_S):
                return

    def close(self) -> None:
        """Stop, and delete the heartbeat."""
        self._closed.set()
        # The thread may be waiting for the store. Before the deletion: it could write the key again.
        self._thread.join(2 * ALIVE_S)
        with suppress(StoreError):
            self._run.delete(self._key)


class NodeRendezvous:
    """The rendezvous of one unit with the others.

    Args:
        root: the whole store.
        job: the name of the job in the store.
        rank: the rank of this unit.
        nprocs: the number of units.
        secret: the secret of the job.
        patience: seconds to wait for the others; 0: MEETING_S.
        notice: shows what the unit waits for.
    """

    def __init__(
        self,
        root: Store,
        job: str,
        rank: int,
        nprocs: int,
        secret: bytes,
        patience: float = 0,
        notice: RendezvousNotice | None = None,
    ) -> None:
        self._root, self.id, self.rank, self._nprocs = root, job, rank, nprocs
        self.verifier = NodeVerifier(secret, job, nprocs)
        self.shared = within(root, f"jobs/{job}")
        self.patience = patience or MEETING_S
        self._deadline = time.monotonic() + self.patience
        self._waiting = notice or RendezvousNotice(rank, nprocs)
        self.word = ""
        self.heartbeat: Heartbeat | None = None
        # Units may come after the store has lost its data, so these keys are written again and again.
        self._kept = MaintainedValues(root)
        self._missing = 0  # consecutive reads that found no start of the job in the store
        self.me: NodeInfo | None = None
        self.returns = False
        """Whether this unit was restarted while its job runs."""

    @property
    def run_id(self) -> str:
        """The name of this start in the store."""
        return f"{self.id}.{self.word}"

    @property
    def run(self) -> Store:
        """The keys of this start."""
        return within(self._root, f"jobs/{self.run_id}")

    @property
    def opens(self) -> bool:
        """Whether this unit has opened this start of the job."""
        return self.rank == 0 and not self.returns

    def close(self) -> None:
        """Leave, and delete this unit's heartbeat."""
        self._kept.close()
        if self.heartbeat is not None:
            self.heartbeat.close()

    def enter(self, me: NodeInfo) -> None:
        """Open a start of the job as unit 0, or join it as another unit.

        Where the job runs on under another leader, unit 0 rejoins it. Raises ConfigError or StoreError.
        """
        self.me, self.returns = me, False
        self._kept.close()  # of an earlier start
        self._kept = MaintainedValues(self._root)
        while self.rank == 0:
            if self._open():
                self._kept.keep(f"jobs/{self.id}/run", self.word.encode())
                self._set("host/0", me.dumped())
                self.heartbeat = Heartbeat(self.run, 0).start()
                return
            if self._return(me):
                return
        old = ""
        while True:
            # Waits for another word than the last one, which was that of a start that is gone.
            self.word = self._await(self.shared, "run", "unit 0", old).decode()
            old = self.word  # of an earlier start, if this one has to be read again
            # The first process of a rank wins: two units with one rank would both train.
            if not self.run.compare_and_set(f"host/{self.rank}", None, me.dumped()):
                self._check_rank()
                if self.run.get("hosts") is not None and self.run.get("end") is None and self._return(me):
                    return
            # Read once more after the rank is taken: unit 0 deletes the keys of a start that it replaces.
            elif self.shared.get("run") == self.word.encode():
                self._kept.keep(self._whole(f"host/{self.rank}"), me.dumped())
                self.heartbeat = Heartbeat(self.run, self.rank).start()
                return
            else:  # an earlier start, which was deleted before this unit joined it
                self.run.delete(f"host/{self.rank}")

    def _return(self, me: NodeInfo) -> bool:
        """Rejoin a running job that has lost the unit of this rank.

        The unit announces itself to the leader, and waits for a reply. Returns False if another start has begun. Raises
        EndedBeforeStart or StoreError.
        """
        self._set(f"back/{self.rank}", me.dumped())
        what = f"the leader of job {self.id!r}, which is running, and can include unit {self.rank} when it restarts"
        try:
            self._await(self.run, welcome_key(self.rank, me.word), what)
        except JobRestarted:
            self._kept.close()
            self.run.delete(f"back/{self.rank}")  # that start may have been deleted before this key was written
            self._kept = MaintainedValues(self._root)
            return False
        self.returns = True
        # Not before the reply: a start without running units must show no heartbeats.
        self.heartbeat = Heartbeat(self.run, self.rank).start()
        return True

    def _open(self) -> bool:
        """Open a start of the job; return False if an earlier one runs on."""
        known = self._patiently(lambda: self.shared.get("run"), "the store")
        if known is None:
            self._await_strangers()
        old = None if known is None else within(self._root, f"jobs/{self.id}.{known.decode()}")
        if old is not None and self._await_end(old):
            self.word = (known or b"").decode()
            return False
        self.word = secrets.token_hex(4)
        # Another process may have begun a start meanwhile as unit 0.
        if not self.shared.compare_and_set("run", known, self.word.encode()):
            raise self._running("another unit 0")
        if old is not None:
            forget(old)  # not before: a unit that joins it late must find its rank taken
            forget_attempts(self._root, f"{self.id}.{(known or b'').decode()}")
        return True

    def _await_strangers(self) -> None:
        """Wait until no unit with another secret has this job's name. Raises ConfigError."""
        while is_foreign(self.shared, "run") and any("/alive/" in k for k in self._root.keys(f"jobs/{self.id}.")):
            self._waiting(f"the end of a job {self.id!r} with another secret")
            if time.monotonic() > self._deadline:
                raise self._running("with another secret")
            time.sleep(BEAT_S / 4)

    def _await_end(self, old: Store) -> bool:
        """Wait until all units of an earlier start are gone; ConfigError if it is running.

        Returns True instead if only its unit 0 is gone, and the others go on without it.
        """
        first = _heartbeats(old)
        while living := _heartbeats(old):
            self._waiting(f"the end of an earlier start of job {self.id!r}")
            # A heartbeat that stays the same is of a killed unit, and expires. One that moves is of a running unit.
            moving = [key for key, now in living.items() if now != first.get(key)]
            runs = bool(moving) and old.get("end") is None
            survives = runs and "alive/0" not in moving and _survives(old)
            if survives and "alive/0" not in living:
                return True
            # Moving heartbeats of an ended start are those of units that still clean up.
            if time.monotonic() > self._deadline or (runs and not survives):
                raise self._running(", ".join(f"unit {key.partition('/')[2]}" for key in moving or living))
            time.sleep(BEAT_S / 4)
        return False

    def _running(self, who: str) -> ConfigError:
        accepted = f"runs already ({who}): end it with `topotrain jobs stop`, or choose a name with ?job=NAME"
        return ConfigError("job", self.id, accepted)

    def _check_rank(self) -> None:
        """Raise ConfigError when another process has the rank of this unit."""
        raw = self.run.get(f"host/{self.rank}")
        beat = self.run.get(f"alive/{self.rank}")
        # Without a heartbeat the unit of a running job is lost, and this process may replace it.
        if raw is None or (beat is None and self.run.get("hosts") is not None):
            return
        with suppress(TimeoutError):
            # A heartbeat that moves is of a running process. A timeout means that its process is gone.
            self.run.watch(f"alive/{self.rank}", ALIVE_S, beat)
            raise self._taken(NodeInfo.loaded(raw))

    def _taken(self, there: NodeInfo) -> ConfigError:
        return ConfigError("--rank", self.rank, f"is taken: {there.who} is in job {self.id!r} already")

    def _whole(self, key: str) -> str:
        """Return the name, in the whole store, of a key of this start."""
        return f"jobs/{self.run_id}/{key}"

    def _set(self, key: str, value: bytes) -> None:
        """Write a key of this start, and maintain it. Raises StoreError."""
        self._kept.set(self._whole(key), value)

    def bring(self, job: Job | None) -> Job:
        """Return the job that was given to unit 0 or submitted, and publish it.

        For unit 0. Raises ConfigError or StoreError.
        """
        if job is None:
            text = self._await(self.shared, "job", "a job: unit 0 was started without one, and none was submitted")
            job = job_file.loads(text.decode(), "the job in the store")
        self._set("job", job_file.dumps(job).encode())
        return job

    def take(self, given: Job | None) -> Job:
        """Return the job that unit 0 has published.

        For all units but the one that opens the job. Raises EndedBeforeStart, StoreError, and ConfigError if it differs
        from `given`.
        """
        job = job_file.loads(self._await(self.run, "job", "the job from unit 0").decode(), "the job in the store")
        if given is None:
            return job
        if given.digest() != job.digest():
            raise ConfigError("JOB.conf", given.name or None, f"differs from that of the job ({job.name or 'no name'})")
        return replace(job, program=given.program, args=given.args) if given.program else job

    def check(self, job: Job) -> None:
        """Raise ConfigError where the job has another number of units."""
        units = len(layout(job.cluster).units)
        if self._nprocs != units:
            raise ConfigError("--nprocs", self._nprocs, f"must be {units}, the number of units of this job")

    def gather(self, url: str, served: bool) -> HostMap:
        """Read the descriptions of all units, and let all measure their links. For unit 0.

        Raises EndedBeforeStart, ConfigError or StoreError.
        """
        known: dict[int, NodeInfo] = {}
        while len(known) < self._nprocs:
            rank = next(rank for rank in range(self._nprocs) if rank not in known)
            others = [str(r) for r in range(self._nprocs) if r not in known and self.run.get(f"host/{r}") is None]
            what = ("unit " if len(others) < 2 else "units ") + ", ".join(others or [str(rank)])
            known[rank] = self.verifier.verify(self._await(self.run, f"host/{rank}", what))
        units = [known[rank] for rank in range(self._nprocs)]
        hosts = hosts_of(units, url, served)
        for unit in units:  # a unit that joins after a loss of the store's data must find its rank taken
            self._kept.keep(self._whole(f"host/{unit.rank}"), unit.dumped())
        self._set(MEETING_KEY, hosts.dumped())
        return hosts

    def publish(self, hosts: HostMap) -> HostMap:
        """Publish the hosts, with which the job starts. For unit 0. Raises StoreError."""
        self._set("hosts", hosts.dumped())
        return hosts

    def learn(self, key: str = "hosts") -> HostMap:
        """Return the hosts that unit 0 has published. Not for the unit that opens the job.

        key: MEETING_KEY for the hosts before the units measure their links.

        Raises ConfigError, EndedBeforeStart or StoreError.
        """
        hosts = HostMap.loaded(self._await(self.run, key, "the other units"))
        # A store that has lost the claim of this process lets another process have the rank.
        if not self.returns and self.me is not None and hosts.units[self.rank].word != self.me.word:
            raise self._taken(hosts.units[self.rank])
        return hosts

    def choose(self, name: str, seal: str) -> None:
        """Publish the snapshot that the job resumes from; "": none. For unit 0.

        Call it before `gather`. Raises StoreError.
        """
        self._set(_FROM, f"{seal} {name}".encode())

    def chosen(self) -> tuple[str, str]:
        """Return the name and the seal of the snapshot to resume from.

        Not for the unit that opens the job.

        Raises EndedBeforeStart or StoreError.
        """
        sealed, _, name = self._await(self.run, _FROM, "the snapshot that unit 0 has chosen").decode().partition(" ")
        return name, sealed

    def introduce(self, given: str, url: str) -> NodeInfo:
        """Return the description of this unit.

        Its address is `given`, or else the one on the route to the store.
        """
        address, proof = given or address_towards(url), self.verifier.proof(self.rank)
        return NodeInfo(
            self.rank,
            socket.gethostname(),
            os.getpid(),
            machine(),
            address,
            proof,
            self._nprocs,
            bool(given),
            secrets.token_hex(4),
        )

    def _await(self, store: Store, key: str, what: str, old: str = "") -> bytes:
        """Return a value. Raises EndedBeforeStart, JobRestarted, or StoreError when late."""
        while True:
            try:
                # Short waits, so that the end or the replacement of this start is noticed meanwhile.
                return self._patiently(lambda: store.watch(key, _LOOK_S, old.encode() or None), what)
            except TimeoutError:
                self._waiting(what)
                # A wait for one of the job's own keys does not depend on this start.
                self._check_start(store is self.shared)
            if time.monotonic() > self._deadline:
                who = f"(job {self.id!r}, unit {self.rank})"
                why = ": its value in the store is not of this unit's secret" if is_foreign(store, key) else ""
                raise StoreError(f"{what} did not come within {self.patience:g} s {who}{why}")

    def _check_start(self, outside: bool) -> None:
        """Raise EndedBeforeStart or JobRestarted unless this start is the current one."""
        if outside or not self.word:
            return
        raw = self.run.get("end")
        if raw is not None:
            raise EndedBeforeStart(JobEnd.loaded(raw))
        known = self.shared.get("run")
        # A missing word alone is no replacement: the store may have lost its data, and unit 0 writes it again.
        self._missing = self._missing + 1 if known is None else 0
        if self._missing > _MISSED or known not in (None, self.word.encode()):
            raise JobRestarted

    def _patiently(self, ask: Callable[[], _T], what: str) -> _T:
        """Retry an operation on a store that may not be available yet."""
        while True:
            try:
                return ask()
            except StoreError as error:
                if _is_final(error) or time.monotonic() > self._deadline:
                    raise
                self._waiting(f"{what} ({error})")
                time.sleep(BEAT_S / 4)


class JobRestarted(Exception):
    """Unit 0 has begun another start of the job."""


def _survives(run: Store) -> bool:
    """Return whether a start goes on when its unit 0 is lost. Raises StoreError."""
    hosts, text = run.get("hosts"), run.get("job")
    if hosts is None or text is None:
        return False
    job = job_file.loads(text.decode(), "the job in the store")
    return not HostMap.loaded(hosts).served and job.on_failure is OnFailure.kContinue


def _is_final(error: StoreError) -> bool:
    """Return whether a retry cannot succeed."""
    from topotrain.comm.store.tcp_store import AccessDenied

    return isinstance(error, AccessDenied)


def _heartbeats(run: Store) -> dict[str, bytes]:
    """Return the heartbeats of a start, by key. Raises StoreError."""
    return {key: value for key in run.keys("alive/") if (value := run.get(key)) is not None}


def outlast(run: Store, rank: int, nprocs: int = 0) -> None:
    """Wait in the leader until the other units have left, or are silent.

    rank: of this unit. nprocs: of the job, where units that have not come yet count, too.
    """
    until, own = time.monotonic() + ALIVE_S + 2 * BEAT_S, {f"alive/{rank}"}
    unseen = {f"alive/{other}" for other in range(nprocs)} - own
    with suppress(StoreError):
        while time.monotonic() < until and ((there := _heartbeats(run).keys() - own) or unseen):
            unseen -= there
            time.sleep(BEAT_S / 10)


def forget_attempts(root: Store, run_id: str) -> None:
    """Delete the data of all attempts of a start but the first. Raises StoreError."""
    for key in root.keys(f"jobs/{run_id}."):
        root.delete(key)


def forget(store: Store, but: str = "") -> None:
    """Delete all keys except `but`. Raises StoreError."""
    for key in store.keys(""):
        if key != but:
            store.delete(key)
