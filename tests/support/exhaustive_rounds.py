"""Every order of events of two workers with an outer optimizer: a few steps, two shards, two fragments.

The rules are the product's (`DecisionLog`, `ApplyOrder`, `Clocks`, `OuterRounds.updates`, `RoundSchedule`,
`UntoldSteps`, `TakeRule`). A worker and a shard are automata around them. Each step of a worker has a cell of its own
in each fragment on each shard, so that values are lists of whole numbers. No process dies here: `exhaustive_search` is
about deaths.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

from exhaustive_search import clone, frozen

from topotrain.config.job import ChangeMethod, Cluster, Job, LRGen, Updater, UpdaterType
from topotrain.core import protocol as m
from topotrain.core.server.consistency import ApplyOrder, Clocks, DecisionLog
from topotrain.extensions.outer_optimizer.local_values import TakeRule
from topotrain.extensions.outer_optimizer.outer_rounds import OuterRounds
from topotrain.extensions.outer_optimizer.rounds import RoundSchedule, UntoldSteps

SHARDS = 2


class Cells:
    """A list of whole numbers, with the operations on tensors that `TakeRule` uses."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def sub_(self, other: "Cells") -> "Cells":
        return self.add_(other, -1)

    def add_(self, other: "Cells", alpha: int = 1) -> "Cells":
        self.numbers = [a + alpha * b for a, b in zip(self.numbers, other.numbers, strict=True)]
        return self

    def copy_(self, other: "Cells") -> "Cells":
        self.numbers = list(other.numbers)
        return self


@dataclass(frozen=True)
class RoundScope:
    """How large the search is; steps: of each worker."""

    groups: int = 2
    fragments: int = 2
    steps: int = 4
    interval: int = 1
    overlap: int = 0
    quorum: int = 0

    @property
    def job(self) -> Job:
        outer = Updater(type=UpdaterType.kSGD, learning_rate=LRGen(type=ChangeMethod.kFixed, base_lr=1.0))
        block = Cluster(
            nworker_groups=self.groups,
            nservers_per_group=SHARDS,
            server_worker_separate=True,
            outer=outer,
            sync_freq=self.interval * self.fragments,
            fragments=self.fragments,
            overlap=self.overlap,
            quorum=self.quorum,
        )
        return Job(cluster=block)


@dataclass(frozen=True)
class Told:
    """A push and its commit: what a worker has learned of a fragment."""

    step: int
    fragment: int
    learned: tuple[int, ...]
    fetch: bool


@dataclass(frozen=True)
class Answer:
    """The reply to a push; values: of its fragment."""

    step: int
    values: tuple[int, ...]


@dataclass(frozen=True)
class Ended:
    """A worker's script has ended."""


@dataclass(eq=False)
class RoundShard:
    """What a server does with a push."""

    number: int
    scope: RoundScope
    job: Job
    net: "RoundsState"
    order: ApplyOrder = field(default_factory=ApplyOrder)
    staged: dict[int, Told] = field(default_factory=dict)  # by group
    ended: set[int] = field(default_factory=set)
    joined: list[m.StepDecision] = field(default_factory=list)
    version: int = 0

    def __post_init__(self) -> None:
        cells = self.scope.groups * self.scope.steps
        self.values = [Cells([0] * cells) for _ in range(self.scope.fragments)]
        self.log = None if self.number else DecisionLog(SHARDS)
        self.clocks = Clocks(range(self.scope.groups), None)

    def take(self, sender: int | tuple[str, int], message: object) -> None:
        match message:
            case Told():
                assert isinstance(sender, int)
                self.staged[sender] = message
                vote = m.StepVote(sender, message.step, True, 0.0, False, self.order.next, 0)
                self.net.say(("shard", self.number), ("shard", 0), vote)
            case m.StepVote():
                assert self.log is not None and isinstance(sender, tuple)
                self.log.staged(sender[1], message)
                self.decide()
            case m.StepDecision():
                for decision in self.order.arrive(message):
                    self.joined.append(decision)
                    if not decision.joined:
                        together, self.joined = self.joined, []
                        self._carry_out(together)
                self.decide()
            case Ended():
                assert isinstance(sender, int)
                self.ended.add(sender)
                self.clocks.leave(sender)
                self.decide()

    def decide(self) -> None:
        if self.log is None:
            return
        staging = {
            group: SimpleNamespace(first=SimpleNamespace(optimizer=told.fragment))
            for group, told in self.staged.items()
        }
        server = SimpleNamespace(
            groups=range(self.scope.groups),
            worker_groups=SimpleNamespace(clocks=self.clocks),
            state=SimpleNamespace(known=SimpleNamespace(staging=staging)),
        )
        policy = OuterRounds(server, self.job)  # type: ignore[arg-type]
        for update in policy.updates(self.log.ready()):
            for group, step in update:
                decision = self.log.decide(group, step, joined=(group, step) != update[-1])
                for shard in range(SHARDS):
                    self.net.say(("shard", 0), ("shard", shard), decision)

    def _carry_out(self, decisions: list[m.StepDecision]) -> None:
        pushes = {decision.group: self.staged.pop(decision.group) for decision in decisions}
        assert [pushes[each.group].step for each in decisions] == [each.step for each in decisions]
        fragments = {told.fragment for told in pushes.values()}
        assert len(fragments) == 1, f"a round of fragments {fragments}"
        (fragment,) = fragments
        for told in pushes.values():
            self.values[fragment].add_(Cells(list(told.learned)))
        self.version += 1
        for group, told in pushes.items():
            self.clocks.tick(group)
            answer = Answer(told.step, tuple(self.values[fragment].numbers))
            self.net.say(("shard", self.number), group, answer)


@dataclass(eq=False)
class RoundWorker:
    """A worker: it makes steps, pushes fragments in turn, and takes new values."""

    number: int
    scope: RoundScope
    net: "RoundsState"
    made: int = 0
    pushes: int = 0
    pushed_at: int = 0
    awaited: int | None = None
    fetches: bool = True
    answers: dict[int, Answer] = field(default_factory=dict)
    ends: bool = False
    over: bool = False

    def __post_init__(self) -> None:
        scope = self.scope
        self.schedule = RoundSchedule(scope.interval * scope.fragments, scope.fragments, scope.overlap)
        self.untold = UntoldSteps(scope.fragments)
        places = [(shard, fragment) for shard in range(SHARDS) for fragment in range(scope.fragments)]
        cells = scope.groups * scope.steps
        self.own, self.received, self.sent = ({place: Cells([0] * cells) for place in places} for _ in range(3))

    @property
    def may_step(self) -> bool:
        """Whether the script goes on. Otherwise it waits for values, or has ended."""
        if self.ends or self.over:
            return False
        if self.awaited is None or self.scope.quorum:
            return True
        return not self.schedule.takes(self.made)

    def step(self) -> None:
        if self.made == self.scope.steps:
            self.ends = True
            self.go_on()
            return
        for own in self.own.values():
            own.numbers[self.number * self.scope.steps + self.made] += 1
        self.made += 1
        self.untold.step()
        if self.scope.quorum:
            if self.awaited is None and self.made - self.pushed_at >= self.schedule.interval:
                self.push(True)
        elif self.schedule.pushes(self.made):
            self.push(True)
        self.go_on(at_step=True)

    def push(self, fetch: bool) -> None:
        fragment = self.pushes % self.scope.fragments
        self.awaited, self.fetches, self.answers = fragment, fetch, {}
        self.untold.push(fragment)
        for shard in range(SHARDS):
            own, received = self.own[shard, fragment], self.received[shard, fragment]
            self.sent[shard, fragment].copy_(own)
            learned = tuple(a - b for a, b in zip(own.numbers, received.numbers, strict=True))
            self.net.say(self.number, ("shard", shard), Told(self.pushes, fragment, learned, fetch))
        self.pushes += 1
        self.pushed_at = self.made

    def take(self, shard: int, message: Answer) -> None:
        if message.step == self.pushes - 1 and self.awaited is not None:
            self.answers[shard] = message
        # A worker that does not wait takes new values at a step.
        if not self.may_step:
            self.go_on()

    def go_on(self, at_step: bool = False) -> None:
        """Take new values, if they are here and due, and at the end of the script push the rest."""
        due = self.ends or (at_step if self.scope.quorum else self.schedule.takes(self.made))
        if self.awaited is not None and due and len(self.answers) == SHARDS:
            self._settle()
        while self.ends and not self.over and self.awaited is None:
            fragment = self.pushes % self.scope.fragments
            if self.untold[fragment].steps:
                self.push(False)
                return
            self.over = True
            for shard in range(SHARDS):
                self.net.say(self.number, ("shard", shard), Ended())

    def _settle(self) -> None:
        fragment, self.awaited = self.awaited, None
        assert fragment is not None
        if self.fetches:
            self.net.check_pace(self)
            for shard, answer in self.answers.items():
                place = shard, fragment
                self.received[place].copy_(Cells(list(answer.values)))
                TakeRule().take([self.own[place]], [self.sent[place]], [self.received[place]])  # type: ignore[list-item]
        self.answers = {}

    def check(self) -> None:
        """Own value = received value + what is not told, and each step is in it once."""
        lo = self.number * self.scope.steps
        for place, own in self.own.items():
            mine = own.numbers[lo : lo + self.made]
            assert mine == [1] * self.made, f"worker {self.number} has its own steps as {mine} in {place}"
            received = self.received[place].numbers
            others = [n for n in range(len(received)) if not lo <= n < lo + self.made]
            assert all(own.numbers[n] == received[n] for n in others), f"worker {self.number} is not at its base"


class RoundsState:
    """One state of the job: what each process knows, and what is under way."""

    def __init__(self, scope: RoundScope) -> None:
        self.scope, self.job = scope, scope.job
        self.ways: dict[tuple[object, object], list[object]] = {}
        self.shards = [RoundShard(number, scope, self.job, self) for number in range(SHARDS)]
        self.workers = [RoundWorker(number, scope, self) for number in range(scope.groups)]

    def say(self, sender: object, to: object, message: object) -> None:
        if sender == to:
            self.shards[0].take(sender, message)  # type: ignore[arg-type]
        else:
            self.ways.setdefault((sender, to), []).append(message)

    def actions(self) -> list[tuple[str, object]]:
        found: list[tuple[str, object]] = [("deliver", way) for way, messages in self.ways.items() if messages]
        return found + [("step", worker.number) for worker in self.workers if worker.may_step]

    def act(self, kind: str, what: object) -> None:
        if kind == "step":
            self.workers[what].step()  # type: ignore[index]
        else:
            sender, to = what  # type: ignore[misc]
            message = self.ways[sender, to].pop(0)
            if isinstance(to, int):
                self.workers[to].take(sender[1], message)  # type: ignore[arg-type]
            else:
                self.shards[to[1]].take(sender, message)
        for shard in self.shards:
            for values in shard.values:
                assert set(values.numbers) <= {0, 1}, f"shard {shard.number} has counted {values.numbers}"
        for worker in self.workers:
            worker.check()

    def check_pace(self, mine: RoundWorker) -> None:
        """Without a quorum no worker gets the values of a round in which another one is missing."""
        for worker in self.workers if not self.scope.quorum else ():
            there = worker.pushes >= mine.pushes or worker.over
            assert there, f"worker {mine.number} is in round {mine.pushes}, worker {worker.number} in {worker.pushes}"

    def check_end(self) -> None:
        """Nothing can happen any more."""
        waiting = [worker.number for worker in self.workers if not worker.over]
        assert not waiting, f"{waiting} wait for ever"
        for shard in self.shards:
            for values in shard.values:
                assert set(values.numbers) == {1}, f"shard {shard.number} has {values.numbers}"
        assert len({shard.version for shard in self.shards}) == 1, "shards have made other updates"

    def copy(self) -> "RoundsState":
        return clone(self, {id(each): each for each in (self.job, self.scope)})

    def key(self) -> object:
        parts = [
            [value for name, value in vars(each).items() if name not in ("net", "scope", "job")]
            for each in (*self.shards, *self.workers)
        ]
        return frozen([sorted(self.ways.items(), key=str), parts])
