"""`plan` of a model that is split over a group: shapes from the loader, the cut graph as text, data and picture."""

import json
import resource
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from topotrain.config.job import Cluster, ConfigError, Job, Link, Partition, Placement, Schedule, TransportChoice
from topotrain.config.job_file import load_with_warnings
from topotrain.config.topology import layout
from topotrain.parallel.api.dry_run import PreparedArguments
from topotrain.parallel.api.example_inputs import inputs_of, parse_inputs
from topotrain.parallel.api.split_costs import (
    PlacementRequest,
    call_of,
    check_memory,
    costs_of,
    needs_of,
)
from topotrain.parallel.auto_placement.placement_search import placed, speeds_of
from topotrain.parallel.capture.capture_model import capture
from topotrain.parallel.estimate import memory_check
from topotrain.parallel.estimate.process_memory import ProcessNeed
from topotrain.parallel.placement.assign_modules import assignments
from topotrain.tools.cli import app
from topotrain.tools.plan.model_cut import ModelCut, cut_of

TCP = TransportChoice.kTcp


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.layers = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.relu(self.conv(x)).flatten(1)
        return self.head(self.layers(y))  # type: ignore[no-any-return]


def loader(batch: int = 32) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.rand(40, 1, 8, 8), torch.zeros(40, dtype=torch.int64)), batch, shuffle=True)


def hybrid(workers: int = 2, **more: Any) -> Job:
    """Krizhevsky (2014): convolutions by samples, fully connected layers by features."""
    blocks = (Partition(match="layers", partition_dim=1), Partition(match="head", partition_dim=-1, location=1))
    return Job(cluster=Cluster(nworkers_per_group=workers), partition=blocks, **more)


def auto(**more: Any) -> Job:
    return Job(cluster=Cluster(nworkers_per_group=2), placement=Placement.kAuto, **more)


def cut(job: Job, said: Sequence[str] = (), measured: bool = False) -> ModelCut:
    found = cut_of(job, Net(), loader(), said, measured)
    assert found is not None
    return found


# --- what the forward is called with --------------------------------------------------------------------------------


class Named(nn.Module):
    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None, labels: Any = None) -> torch.Tensor:
        return ids


class Counted(TensorDataset):
    asked = 0

    def __getitem__(self, index: int) -> Any:
        Counted.asked += 1
        return torch.rand(3), index


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([torch.zeros(3)] * 9)


def test_shapes_come_from_one_sample_and_the_script_draws_what_it_would_have_drawn() -> None:
    model, state = nn.Linear(3, 1), torch.get_rng_state()
    found = inputs_of(model, DataLoader(Counted(torch.zeros(100)), 25, shuffle=True))
    assert ([tuple(value.shape) for value in found.args], found.samples, Counted.asked) == ([(25, 3)], 25, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert found.text() == "25x3 float32 (from the loader's first batch)"
    rows = [{"ids": torch.zeros(5), "labels": torch.zeros(5), "other": 1}] * 4
    found = inputs_of(Named(), DataLoader(rows, 2))  # type: ignore[arg-type]
    assert (found.args, sorted(found.kwargs)) == ((), ["ids", "labels"])
    # As many parts as the forward needs, or all where it computes the loss.
    data = DataLoader(TensorDataset(torch.zeros(4, 5), torch.ones(4, 5)), 2)
    assert [len(inputs_of(Named(), data, everything=all_parts).args) for all_parts in (False, True)] == [1, 2]
    assert inputs_of(nn.Linear(3, 1), DataLoader(Stream(), 4)).args[0].shape == (4, 3)
    listed = DataLoader(TensorDataset(torch.zeros(9, 3)), batch_sampler=[[1, 2, 3], [4]])
    assert inputs_of(nn.Linear(3, 1), listed).args[0].shape == (3, 3)


def test_shapes_that_the_user_says_where_they_are_not_known() -> None:
    for given in (None, [1, 2], DataLoader(["text"], 1)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="--input 32x1x8x8"):
            inputs_of(nn.Linear(3, 1), given)
    found = parse_inputs(["4x3", "mask=4x2:bool", "4x7:int64"])
    assert [(tuple(t.shape), t.dtype) for t in found.args] == [((4, 3), torch.float32), ((4, 7), torch.int64)]
    assert (found.kwargs["mask"].dtype, found.samples) == (torch.bool, 4)
    for said, words in (
        (["4xx3"], "4xx3.*sizes with the samples first"),
        (["4x3:float31"], "float31.*dtype"),
        (["4x0"], "at least 1"),
        (["4x3", "5x3"], "same number of samples"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse_inputs(said)


# --- the plan --------------------------------------------------------------------------------------------------------


def test_the_hybrid_job() -> None:
    for job in (Job(cluster=Cluster(nworkers_per_group=2)), Job(placement=Placement.kAuto)):
        assert cut_of(job, Net(), None) is None, "it splits nothing"
    found = cut(hybrid(microbatches=2))
    text, data = found.plan.explain(), found.plan.as_data()
    assert json.loads(json.dumps(data)) == data
    for words in ("2 workers", "32 samples per step (16, 16, in 2 micro-batches)", "features (dim 1)", "worker 1"):
        assert words in text
    assert "32x1x8x8 float32" in text
    assert max(map(len, text.splitlines())) <= 120
    gathered = next(edge for edge in data["edges"] if edge["target"]["where"] == "whole" and edge["shape"] == [32, 512])
    assert gathered["forward"] == gathered["backward"] == 2 * 16 * 512 * 4
    memory = data["memory"]
    assert sum(edge["forward"] for edge in data["edges"]) == sum(each["sent"][0] for each in memory)
    # Memory goes by owners.
    own = [owned(found, worker) for worker in (0, 1)]
    assert own == [each["parameters"] for each in memory] == [each["trained"] for each in memory]
    assert own[1] - own[0] == sum(4 * p.count for p in found.parameters if p.name.startswith("head."))


def owned(found: ModelCut, worker: int) -> int:
    """The bytes of the parameters that a worker has."""
    return sum(4 * p.count for p in found.parameters if not p.owners or worker in p.owners)


def places(found: ModelCut) -> dict[str, Any]:
    return {step["target"]: step["layout"] for step in found.plan.as_data()["steps"] if step["kind"] == "module"}


def test_auto_places_what_the_user_has_not_placed() -> None:
    head = Partition(match="head", partition_dim=-1, location=0)
    found = cut(auto(partition=(head,)))
    assert places(found)["head"] == {"where": "at", "worker": 0}
    assert {place["where"] for place in places(found).values()} == {"at"}
    assert {place["worker"] for place in places(found).values()} == {0, 1}
    assert "placement kAuto: 4 modules" in found.plan.explain()
    assert cut(auto(partition=(head,))).plan.explain() == found.plan.explain()
    # A module that a block leaves with the samples stays there.
    where = places(cut(auto(partition=(Partition(match="conv"),))))
    assert (where["conv"]["where"], where["layers.0"]["where"]) == ("batch", "at")


def test_what_was_measured_is_shown_as_blocks_that_give_the_same(tmp_path: Path) -> None:
    model, data = Net(), loader()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = cut_of(auto(), model, data, measured=True)
    assert found is not None
    text = found.plan.conf
    assert text.count("partition {") == 4
    assert text in found.plan.explain()
    # Measuring leaves the model alone.
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    (tmp_path / "job.conf").write_text(f'name: "mine"\ncluster {{ nworkers_per_group: 2 }}\n{text}\n')
    again = cut_of(load_with_warnings(str(tmp_path / "job.conf"))[0], model, data)
    assert again is not None
    assert again.plan.as_data()["steps"] == found.plan.as_data()["steps"]


def test_shares_of_the_batch() -> None:
    given = parse_inputs(["10x1x8x8"])
    assert call_of(hybrid(3), Net(), given).shares == (3, 3, 4)
    assert call_of(hybrid(2, per_worker_batch=True), Net(), given).shares == (10, 10)
    assert sum(call_of(hybrid(2), nn.BatchNorm2d(1), parse_inputs(["3x1x8x8"])).shares) >= 3
    # A pretended link counts.
    speeds = speeds_of(Cluster(link=Link(bandwidth=100.0, delay=20.0)))
    assert speeds.transfer(12_500_000) == pytest.approx(1.02, rel=1e-2)


def test_a_model_that_returns_its_loss_reads_all_of_a_batch() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            out = self.two(self.one(x))
            return out if y is None else nn.functional.cross_entropy(out, y)

    data = DataLoader(TensorDataset(torch.zeros(9, 6), torch.zeros(9, dtype=torch.int64)), 8)
    found = cut_of(auto(microbatches=4, schedule=Schedule.k1F1B), Loss(), data)
    assert found is not None
    assert "8x6 float32, 8 int64" in found.plan.inputs


# --- room ------------------------------------------------------------------------------------------------------------


def machine(monkeypatch: pytest.MonkeyPatch, memory: float) -> None:
    monkeypatch.setattr(memory_check, "_numbers", lambda file: {"MemTotal": int(memory)})
    monkeypatch.setattr(memory_check, "_group", lambda: None)


def asked(job: Job, state_factor: float = 0.0, model: nn.Module | None = None, **more: Any) -> PlacementRequest:
    model = model or Net()
    captured = capture(model)
    found = assignments(model, job, job.cluster.nworkers_per_group, captured)
    return PlacementRequest(job, layout(job.cluster, **more), model, captured, found, None, state_factor)


def needed(job: Job, state_factor: float = 0.0, **more: Any) -> dict[str, ProcessNeed]:
    given = asked(job, state_factor, **more)
    call = call_of(job, given.model, inputs_of(given.model, loader()))
    costs = costs_of(replace(given, call=call), given.found)
    return {need.who: need for need in needs_of(given, given.found, costs)}


def test_a_process_holds_what_its_residents_hold_and_a_snapshot_copies_it() -> None:
    """Over TCP: values, gradients, and on servers what is pushed, by whoever has it, and the optimizer's state."""
    job = replace(hybrid(), cluster=Cluster(nworkers_per_group=2, nservers_per_group=2, transport=TCP))
    found, whole = needed(job, 2.0), cut(job)
    sizes = sum(4 * p.count for p in whole.parameters)
    for worker in (0, 1):
        need, own = found[f"worker 0/{worker}"], owned(whole, worker)
        assert (need.values, need.gradients, need.state, need.shared) == (own, own, 0, 0)
        assert need.activations > 0
    servers = [found["server 0/0"], found["server 0/1"]]
    pushed = sum(4 * p.count * (len(p.owners) or 2) for p in whole.parameters)
    found_sizes = [sum(getattr(server, name) for server in servers) for name in ("values", "state", "exchange")]
    assert found_sizes == [sizes, 2 * sizes, pushed]
    none, often = (
        needed(replace(job, snapshot_s=0, **more), 2.0)["server 0/0"] for more in ({}, {"checkpoint_freq": 10})
    )
    server = servers[0]
    assert server.snapshot == often.snapshot == server.values + server.state
    assert (none.snapshot, server.total - none.total) == (0, server.snapshot)


def test_on_one_host_the_values_lie_once_in_shared_memory() -> None:
    job = replace(hybrid(), cluster=Cluster(nworkers_per_group=2, nservers_per_group=2))
    found, whole = needed(job), cut(job)
    assert set(found) == {"worker 0/0 + server 0/0", "worker 0/1 + server 0/1"}
    values = sum(4 * p.count for p in whole.parameters)
    assert sum(need.shared - need.passed for need in found.values()) == values + owned(whole, 0) + owned(whole, 1)
    assert [need.passed for need in found.values()] == [sum(whole.plan.bill.sent(worker)) for worker in (0, 1)]
    one, other = found.values()
    assert (one.seen, other.seen) == (other.shared, one.shared)
    # A separate server does not map what workers pass each other.
    found = needed(replace(hybrid(), cluster=Cluster(nworkers_per_group=2, server_worker_separate=True)))
    one, other, server = (found[who] for who in ("worker 0/0", "worker 0/1", "server 0/0"))
    assert one.passed > 0
    assert one.seen == one.gradients + other.passed  # and the values, as much as gradients
    assert server.seen == one.shared - one.passed + other.shared - other.passed


def test_schedules_keep_more_or_less() -> None:
    blocks = (
        Partition(match="conv", partition_dim=-1, location=0),
        Partition(match="layers|head", partition_dim=-1, location=1),
    )
    whole, parts, interleaved = (
        needed(Job(cluster=Cluster(nworkers_per_group=2, transport=TCP), partition=blocks, **more))
        for more in ({}, {"microbatches": 4}, {"microbatches": 4, "schedule": Schedule.k1F1B})
    )
    first, last = "worker 0/0", "worker 0/1"
    assert interleaved[last].activations < interleaved[first].activations < parts[first].activations
    assert parts[first].activations <= whole[first].activations
    trained = whole[last].gradients
    assert interleaved[last].exchange > parts[last].exchange > whole[last].exchange + trained // 2


def test_what_cannot_fit_is_said_by_the_plan_and_refused_by_the_job_host_by_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, 200_000_000)
    plan = cut(hybrid()).plan
    total = plan.as_data()["hosts"][0]["total"]
    words = ("does not fit", "3 processes would need", "85% of its memory is 170.0 MB", "would help")
    for part in ("warning: memory = 'host 0'", *words, f"{total / 1e6:,.1f} MB"):
        assert part in plan.explain()
    with pytest.raises(ConfigError, match="does not fit"):
        check_memory(asked(hybrid()), loader(), 0)
    cluster, hosts = Cluster(nworkers_per_group=2, server_worker_separate=True, transport=TCP), (0, 1, 1)
    found = needed(replace(hybrid(), cluster=cluster), hosts=hosts)
    assert {need.who: need.host for need in found.values()} == {"worker 0/0": 0, "worker 0/1": 1, "server 0/0": 1}
    one, two = (
        memory_check.on_host([need for need in found.values() if need.host == host], memory_check.ITSELF)
        for host in (0, 1)
    )
    assert two > one
    machine(monkeypatch, one / memory_check.SAFE + 1000)
    given = asked(replace(hybrid(), cluster=cluster), hosts=hosts)
    for batches in (loader(), None, [1, 2]):  # without a loader that tells activations are left out
        check_memory(given, batches, 0)
    with pytest.raises(ConfigError, match=r"host 1.*2 processes"):
        check_memory(given, loader(), 1)


class Uneven(nn.Module):
    """Four layers that are large and soon done, and a small one that takes most of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Sequential(*(nn.Linear(600, 600, bias=False) for _ in range(4)))
        self.slow = nn.Conv1d(16, 16, 513, padding=256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.slow(self.large(x)[:, None, :].expand(-1, 16, -1))  # type: ignore[no-any-return]


def test_what_is_quickest_and_too_large_gives_way_to_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(auto(snapshot_s=0), cluster=Cluster(nworkers_per_group=2, transport=TCP))

    def places_of() -> tuple[list[int], str]:
        found = cut_of(job, Uneven(), None, ["2x600"])
        assert found is not None
        return [place["worker"] for place in places(found).values()], found.plan.chosen

    assert places_of()[0] == [0, 0, 0, 0, 1]
    monkeypatch.setattr(memory_check, "_STACK", 0)
    # Values and gradients of three layers, and two to come.
    bounds = {resource.RLIMIT_DATA: memory_check.LIMITED + 13_000_000}
    monkeypatch.setattr(memory_check, "_limit", bounds.get)
    found, words = places_of()
    assert found == [0, 0, 0, 1, 1]
    allowed = f"RLIMIT_DATA allows {bounds[resource.RLIMIT_DATA] / 1e6:.1f} MB"
    for part in ("because it fits", "the fastest placement, stages of about", "worker 0/0", allowed):
        assert part in words
    bounds[resource.RLIMIT_DATA] = memory_check.LIMITED + 4_000_000
    with pytest.raises(ConfigError, match=r"server 0/0.*does not fit.*RLIMIT_DATA allows 214\.0 MB.*would help"):
        places_of()


def test_hosts_that_are_too_small_share_more_evenly() -> None:
    """Workers on two hosts, and a server on a third."""
    cluster = Cluster(nworkers_per_group=2, server_worker_separate=True, transport=TCP)
    given = asked(replace(auto(snapshot_s=0), cluster=cluster), model=Uneven(), hosts=(0, 1, 2))
    given = replace(given, call=call_of(given.job, given.model, parse_inputs(["2x600"])))
    room = memory_check.ITSELF + 13_000_000
    for limits, last, tight in (
        (memory_check.MemoryLimits(), 0, ""),
        (memory_check.MemoryLimits(machine=room, words="all of it"), 1, "host 0: its 1 processes would need"),
    ):
        found, chosen = placed(given, limits)
        assert [found[f"large.{n}"].location for n in range(4)] == [0, 0, 0, last]
        assert tight in chosen.tight if tight else not chosen.tight
    with pytest.raises(ConfigError, match="host 0"):
        placed(given, memory_check.MemoryLimits(machine=memory_check.ITSELF))


# --- the command -----------------------------------------------------------------------------------------------------


def ask(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        app.main(argv)
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "auto.conf").write_text('name: "mine"\ncluster { nworkers_per_group: 2 }\nplacement: kAuto\n')
    (tmp_path / "plain.conf").write_text('name: "mine"\ncluster { nworkers_per_group: 2 }\n')

    def look(program: str, args: Sequence[str]) -> PreparedArguments:
        model = Net()
        return PreparedArguments(
            model, (torch.optim.Adam(model.parameters()),), None if list(args) == ["--bare"] else loader()
        )

    monkeypatch.setitem(sys.modules, "topotrain.parallel.api.dry_run", SimpleNamespace(look=look))
    return tmp_path


def test_plan_shows_the_cut(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    code, out, err = ask(capsys, "plan", "auto.conf", "--plot", "cut.png", "train.py")
    assert (code, err) == (0, "")
    assert "server 0/0" in out
    assert "transfers per step" in out
    made = (folder / "cut.png").stat()
    assert made.st_size > 1000 and made.st_mode == (folder / "auto.conf").stat().st_mode, "as the umask gives"
    code, out, err = ask(capsys, "plan", "auto.conf", "--json", "--input", "6x1x8x8", "train.py", "--bare")
    assert (code, err) == (0, "")
    assert json.loads(out)["cut"]["samples"] == [3, 3]


def test_a_full_disk_costs_the_picture_and_not_the_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    (folder / "cut.png").symlink_to("/dev/full")
    code, out, err = ask(capsys, "plan", "auto.conf", "--plot", "cut.png", "train.py")
    assert (code, err) == (1, "topotrain: error: cut.png: cannot be written (No space left on device)\n")
    assert "transfers per step" in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["auto.conf", "train.py", "--bare"], "--input 32x1x8x8"),
        (["auto.conf", "--input", "6x1"], "give a PROGRAM"),
        (["plain.conf", "--input", "6x1", "train.py"], "splits none"),
        (["auto.conf", "--plot", "train.py/x.png", "train.py"], "cannot be written"),
        (["auto.conf", "--plot", "graph", "train.py"], "--plot graph: must end with .png, .pdf, .svg"),
        (["auto.conf", "--plot", "graph.xyz", "train.py"], "--plot graph.xyz: must end with .png, .pdf, .svg"),
    ],
)
def test_plan_refuses(folder: Path, capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    code, out, err = ask(capsys, "plan", *argv)
    assert (code, out) == (2, "")
    assert words in err
    assert "Traceback" not in err
