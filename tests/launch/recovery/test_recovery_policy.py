"""What is decided when processes die, without any: events and times go in, decisions come out (policy.txt)."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topotrain.config import job_file
from topotrain.config.topology import Address, Role, Topology, layout
from topotrain.core import events as e
from topotrain.launch.recovery import recovery_actions as a
from topotrain.launch.recovery.recovery_policy import RecoveryPolicy, recovery
from topotrain.launch.recovery.restarts import WINDOW_S

TEXT = Path(__file__).with_name("policy.txt").read_text().partition("\n\n")[2]
"""Of each paragraph with a title, what stands behind `->` on a line is what follows from it."""
BEGAN = 100.0


class Story:
    """A policy all of whose processes are up, and what it decides line by line."""

    def __init__(self, conf: str) -> None:
        """conf: the job file, behind the word "units" if its units were started one by one."""
        apart, conf = conf.startswith("units "), conf.removeprefix("units ")
        self.job = job_file.loads(conf, "policy.txt")
        topology = self.use(layout(self.job.cluster))
        near = frozenset(map(str, topology.units[0].workers)) if apart else None
        made = recovery(self.job, topology, BEGAN, near)
        assert made is not None
        self.policy: RecoveryPolicy = made
        for who in self.residents:
            if who not in made.missing:
                made.on_event(e.Started(who, 7), BEGAN)
        self.known = self.state()

    def use(self, topology: Topology) -> Topology:
        self.residents = [str(who) for unit in topology.units for who in (*unit.workers, *unit.servers)]
        return topology

    def state(self) -> dict[str, object]:
        made = self.policy
        return {
            "due": made.due,
            "complete": made.complete,
            "suspicious": made.suspicious,
            "wants steps": made.wants_steps,
            "missing": sorted(made.missing),
        }

    def tell(self, line: str) -> str:
        """A line's left side; what follows from it."""
        time, verb, *words = line.split()
        found = [self.said(action) for action in self.actions(float(time), verb, words)]
        state = self.state()
        found += [f"{name}: {value}" for name, value in state.items() if value != self.known[name]]
        self.known = state
        return "; ".join(word for word in found if word)

    def actions(self, now: float, verb: str, words: list[str]) -> Iterator[object]:
        made = self.policy
        match verb:
            case "poll":
                yield from made.poll(now)
            case "again":
                made.begin_attempt()
            case "where":
                yield "{} in unit {}".format(*made.location_of(Address(Role.SERVER, int(words[0]), int(words[1]))))
            case "unit":
                failed = e.Failed(f"unit {words[0]}", "died", f"unit {words[0]} vanished", "")
                yield from made.on_unit_lost(int(words[0]), failed, now)
            case "resize":
                yield from made.on_resize_request(a.ResizeRequest(words[0], int(words[1]), 5.0), now)
            case "resized":
                made.begin_resized(self.job, self.use(layout(self.job.cluster)))
            case "stop":
                yield from made.on_stop_request()
            case "leave" | "join":
                yield from made.on_group_request(a.GroupRequest(verb, int(words[0]), 3.0))
            case _:
                for event in self.events(verb, words):
                    answer = made.on_event(event, now)
                    if event not in answer and not isinstance(event, e.Lost):
                        yield "kept"
                    for action in answer:
                        if isinstance(action, a.RestartResized):
                            self.job = action.job
                        if action != event:
                            yield action

    def events(self, verb: str, words: list[str]) -> Iterator[e.Event]:
        """`verb` of all named processes; "everybody" are all of the job, and "group 1" its workers."""
        match verb:
            case "saved":
                yield e.Saved("server 0/0", 4, 70, "p", words[0])
            case "unsaved":
                yield e.Unsaved("server 0/0", " ".join(words))
            case "bounded":
                yield e.Bounded("worker 0/0", int(words[0]), " ".join(words[1:]))
        names, rest = [], list(words)
        while rest and rest[0] in ("worker", "server", "unit", "group", "everybody", "workers", "forkserver"):
            kind = rest.pop(0)
            if kind in ("everybody", "workers"):
                names += [who for who in self.residents if kind == "everybody" or who.startswith("worker")]
            elif kind == "group":
                number = rest.pop(0)
                names += [who for who in self.residents if who.startswith(f"worker {number}/")]
            else:
                names.append(kind if kind == "forkserver" else f"{kind} {rest.pop(0)}")
        text = " ".join(rest)
        for who in names:
            match verb:
                case "lost":
                    yield e.Lost(who, 7, f"{who} was killed", "last words")
                case "refused":  # as a unit reports a fork that the system has refused
                    yield e.Lost(who, 0, f"{who}: no fork", "")
                    yield e.Exited(who, 0, 1)
                case "started":
                    yield e.Started(who, 8)
                case "exited":
                    yield e.Exited(who, 7, int(text or 0))
                case "step":
                    yield e.StepDone(who, 1.0, 1, 8, None, 0.0, 0, 0, 0)
                case "finished":
                    yield e.Finished(who, 1, 8, 0.0, 0, 0, 0)
                case "failed":
                    yield e.Failed(who, rest[0], " ".join(rest[1:]), "")
                case "frozen":
                    yield e.Frozen(who, 7)
                case "thawed":
                    yield e.Thawed(who, 7)
                case "repeatable":
                    yield e.Repeatable(who, text)
                case "repeated":
                    yield e.Repeated(who, 4, float(text))
                case "bound":
                    yield e.Unrepeatable(who, " ".join(rest[1:]), rest[0] == "job")
                case "agrees":
                    yield e.Agreed(who, int(rest[1]), rest[0], " ".join(rest[2:]))
                case "covered":
                    yield e.Covered(who, int(text))
                case "differs":
                    yield e.Differs(who, int(text))
                case "missed":
                    yield e.Missed(who)
                case _:
                    raise AssertionError(verb)

    def said(self, action: object) -> str:
        match action:
            case str():
                return action
            case e.Incident(what=what, action=done):
                return f"incident: {what}, {done}"
            case e.Failed(who=who, kind=kind, text=text):
                return f"failed: {who} {kind} {text}"
            case e.Left(group=group, how=how, at_s=at_s):
                return f"group {group} {how} at {at_s:.1f} s"
            case e.Joined(group=group, incarnation=number, at_s=at_s):
                return f"group {group} joins as {number} at {at_s:.1f} s"
            case e.Recovered(number=number, waited_s=waited, others_s=others):
                return f"recovered from {number} in {waited:.1f} s, others {others:.2f} s"
            case a.RestartGroup(group=group, incarnation=number, worker=worker, told=told):
                only = f" {worker} of" if worker else ""
                return f"restart{only} group {group} as {number}" + ", told" * told
            case a.RestartJob():
                return "restart all"
            case a.FailJob(failures=failures):
                return "end: " + ", ".join(f"{failed.who} {failed.kind}: {failed.text}" for failed in failures)
            case a.EndProcess(who=who):
                return f"kill {who}"
            case a.AskServers(wish=wish, group=group, incarnation=number):
                return f"ask servers to {wish} group {group} as {number}"
            case a.ReportGone(group=group, incarnation=number):
                return f"group {group} before {number} is gone"
            case a.AnswerRequest(verb=verb, group=group, text=text, error=error):
                return f"answer {verb} {group}: {error or text}"
            case a.ResizeRefused(error=error):
                return f"refuse: {error}"
            case a.RestartResized(text=text):
                return f"resize: {text}"
            case a.PlaceReplica(process=process, number=number, seats=seats, unit=unit):
                return f"place {process} as {number} in unit {unit} {seats}"
            case _:
                return str(action)


def stories() -> Iterator[object]:
    conf = ""
    for text in TEXT.strip().split("\n\n"):
        if text.startswith("# "):
            conf = text[2:]
        else:
            title, *lines = text.split("\n")
            yield pytest.param(conf, lines, id=title[3:])


@pytest.mark.parametrize(("conf", "lines"), list(stories()))
def test_what_follows(conf: str, lines: list[str]) -> None:
    story = Story(conf)
    told = [line.partition(" ->")[0] for line in lines]
    assert [f"{line} -> {story.tell(line)}".rstrip() for line in told] == lines


LIMIT = 2
WHO = ("worker 0/0", "worker 0/1", "worker 1/0", "worker 1/1", "server 0/0")
MOMENTS = st.tuples(
    st.sampled_from(
        ("lost", "exited", "started", "step", "finished", "frozen", "thawed", "refused", "repeatable", "peer")
    ),
    st.sampled_from(WHO),
    st.sampled_from((0.0, 0.3, 2.5, 70.0)),
)


@given(st.lists(MOMENTS, max_size=40))
def test_whatever_happens_no_restart_is_too_many_or_after_the_end(
    moments: list[tuple[str, str, float]],
) -> None:
    story = Story(
        f"restarts: {LIMIT} cluster {{ nworker_groups: 2 nworkers_per_group: 2 server_worker_separate: true }}"
    )
    made, now = story.policy, BEGAN
    restarts: dict[int | str, list[float]] = {}
    incarnations = {0: 0, 1: 0}
    over = False
    for verb, who, later in moments:
        now += later
        words = [*who.split(), "peer", "lost"] if verb == "peer" else who.split()
        found = [*story.actions(now, "failed" if verb == "peer" else verb, words), *made.poll(now)]
        assert made.due is None or made.due > now
        for action in found:
            match action:
                case a.RestartGroup(group=group, incarnation=number):
                    assert not over and number == incarnations[group] + 1
                    incarnations[group] = number
                    restarts.setdefault(group, []).append(now)
                case a.RestartJob():
                    assert not over
                    restarts.setdefault("job", []).append(now)
                    incarnations = {0: 0, 1: 0}
                    made.begin_attempt()
                    list(story.actions(now, "started", ["everybody"]))
                case a.FailJob():
                    over = True
        over = over or made.complete
    for times in restarts.values():
        assert all(later - first > WINDOW_S for first, later in zip(times, times[LIMIT:], strict=False))
