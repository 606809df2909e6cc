"""Dividing a DataLoader: every sample once, in the plain loader's order, whatever kind of loader the script has."""

import gc
import os
import random
import threading
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from divided_loaders import KINDS, LeaseServer, LoaderClient, Numbers, Stream, flat
from hypothesis import given, settings
from hypothesis import strategies as st
from process_pool import Forked
from seeds import examples
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)

from topotrain.config.job import ConfigError
from topotrain.config.topology import Address, Role
from topotrain.training.data.distributed_loader import STATIC, DataPlan, ShardedLoader
from topotrain.training.data.map_dataset import LeaseIterator
from topotrain.training.data.sampling import CHUNK, cut, draw_epoch, pack, received
from topotrain.training.data.split_loader import SplitLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@dataclass
class Job:
    """A job in one process: `make()` is the script's loader, built once per worker as a script does."""

    make: Callable[[], DataLoader[Any]]
    workers: int = 1
    groups: int = 1
    mode: str = "broadcast"
    shares: tuple[float, ...] = ()
    per_worker: bool = False
    min_share: int = 1
    seed: int = 3

    def __post_init__(self) -> None:
        self.lease_server = LeaseServer(self.groups, self.workers)
        self.clients = {who: LoaderClient(self.lease_server, who) for who in self.lease_server.workers}

    def loader(self, who: Address) -> ShardedLoader:
        plan = DataPlan(
            who.group,
            self.groups,
            who.index,
            self.workers,
            self.shares,
            self.mode,
            self.per_worker,
            self.seed,
            self.min_share,
            (who.group, who.index) == (0, 0),
        )
        return ShardedLoader(self.make(), plan, self.clients[who], self.clients[who])

    def read(self, epochs: int = 1, leave: Callable[[Address], int | None] = lambda who: None):
        """{worker: [epoch's list of (weight, batch)]}; threads only where groups wait for each other."""
        result: dict[Address, Any] = {}
        start = threading.Lock()  # the generators are global: real workers are processes

        def script(who: Address) -> None:
            try:
                loader, passes = self.loader(who), []
                for _ in range(epochs):
                    passes.append(batches := [])
                    with start:
                        live = iter(loader)
                    for batch in live:
                        batches.append((self.clients[who].drawn_[-1][2], batch))
                        if len(batches) == leave(who):
                            break
                    live.close()
                result[who] = passes
            except BaseException as error:
                result[who] = error
            finally:
                self.lease_server.end(who)

        if self.mode == "lease" and len(self.clients) > 1:
            threads = [threading.Thread(target=script, args=(who,)) for who in self.clients]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        else:
            for who in self.clients:
                script(who)
                if isinstance(result[who], BaseException):
                    break
        for outcome in result.values():
            if isinstance(outcome, BaseException):
                raise outcome
        return result

    def samples(self, epoch: int = 0, **how: Any) -> list[int]:
        """The samples that counted in one epoch, in no order."""
        read = self.read(epochs=epoch + 1, **how)
        batches = [batch for passes in read.values() for weight, batch in passes[epoch] if weight]
        return sorted(int(sample) for batch in batches for sample in batch)


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_every_sample_once_per_epoch(data):
    workers, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    mode = data.draw(st.sampled_from(["broadcast", "static", "lease"]))
    groups = 1 if mode == "broadcast" else data.draw(st.integers(1, 3))
    per_worker, drop = data.draw(st.booleans()), data.draw(st.booleans())
    n = data.draw(st.integers(size * (workers if per_worker else 1), 60 + 9 * workers))
    claims = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=workers, max_size=workers).filter(any)
    shares = tuple(data.draw(claims)) if data.draw(st.booleans()) else ()
    stream = data.draw(st.booleans())

    def make() -> DataLoader[Any]:
        dataset = Stream(n, shuffle=mode != "lease" and workers > 1) if stream else Numbers(n)
        return DataLoader(dataset, size, shuffle=None if stream else True, drop_last=drop)

    job = Job(make, workers, groups, mode, shares, per_worker, data.draw(st.integers(1, 2)))
    read = job.read(epochs=2)
    for epoch in (0, 1):
        batches = [batch.tolist() for passes in read.values() for weight, batch in passes[epoch] if weight]
        samples = sorted(chain.from_iterable(batches))
        assert len(samples) == len(set(samples)) == (n // size * size if drop else n)
        for group in range(groups):  # as many batches for every worker of a group, and none empty
            passes = [read[who][epoch] for who in job.clients if who.group == group]
            assert len({len(p) for p in passes}) == 1
            assert all(len(batch) for p in passes for _, batch in p)
    for client in job.clients.values():
        assert all(weight == samples for _, _, weight, samples in client.drawn_)
        streams: dict[int, list[int]] = {}
        for number, seq, _, _ in client.drawn_:
            streams.setdefault(number, []).append(seq)
        assert all(seqs == list(range(len(seqs))) for seqs in streams.values())
        assert bool(streams) <= all(bool(number & STATIC) == (mode != "lease") for number in streams)
        assert client.left == []
    assert job.lease_server.book.open_epochs == () and job.lease_server.book.kept_chunks == 0


# --- the plain loader's order ------------------------------------------------------------------------------------


ALONE = [kind for kind in KINDS if kind != "stream in processes"]
WHOLE = ("keys", "stream of items", "processes", "persistent")
"""Kinds that one worker alone shows."""


@pytest.mark.parametrize("kind", ALONE)
def test_one_worker_alone_reads_what_the_plain_loader_reads_bit_for_bit(kind):
    def rng() -> tuple[Any, ...]:
        return torch.rand(2).tolist(), random.random(), float(numpy.random.rand())

    def throw(seed: int, loader: Any) -> tuple[Any, ...]:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        seen = []
        for _ in range(2):
            for batch in loader:
                seen.append((flat(batch), rng()))
        next(iter(loader))  # left early: the generator must still be the plain loader's
        return seen, rng()

    make = KINDS[kind]
    job = Job(make)
    assert throw(1, make()) == throw(1, job.loader(Address(Role.WORKER, 0, 0)))
    (client,) = job.clients.values()
    assert client.left == [(2, 1)]
    assert len(job.loader(client.who)) == len(make()) if "stream" not in kind else True


@pytest.mark.parametrize("kind", [kind for kind in ALONE if kind not in WHOLE])
def test_the_workers_shares_put_together_are_the_plain_loaders_batches(kind):
    plain = Job(KINDS[kind])
    torch.manual_seed(7)
    expected = [flat(batch) for _, batch in plain.read()[plain.lease_server.workers[0]][0]]
    job = Job(KINDS[kind], workers=3)
    torch.manual_seed(7)
    read = [passes[0] for passes in job.read().values()]
    together = [[i for weight, batch in step if weight for i in flat(batch)] for step in zip(*read, strict=True)]
    if "stream" in kind:  # its random numbers come from the job's seed
        together, expected = [sorted(chain(*together))], [sorted(chain(*expected))]
    assert together == expected


def test_a_sampler_of_the_scripts_own_is_asked_when_the_plain_loader_would_ask_it():
    told: list[str] = []

    class Curious:
        def __iter__(self) -> Iterator[list[int]]:
            for i in range(3):
                told.append(f"drew {i}")
                yield [i, i + 3]

    job = Job(lambda: DataLoader(Numbers(6), batch_sampler=Curious()), workers=2)
    for batch in job.loader(job.lease_server.workers[0]):
        told.append(f"step {int(batch[0])}")
    assert told == ["drew 0", "step 0", "drew 1", "step 1", "drew 2", "step 2"]
    assert [int(b[0]) for b in job.loader(job.lease_server.workers[1])] == [3, 4, 5]


def test_a_batch_longer_than_a_chunk_arrives_whole():
    batches = [list(range(3 * CHUNK)), [], [7], list(range(CHUNK)), 5]
    chunks = list(pack(batches, True))
    assert all(len(sizes) + len(indices) <= CHUNK for sizes, indices, _ in chunks)
    assert list(received(iter(chunks))) == batches
    n = 2 * CHUNK + 5
    job = Job(lambda: DataLoader(range(n), n, collate_fn=torch.tensor), workers=2)
    assert job.samples() == list(range(n))


# --- shares ------------------------------------------------------------------------------------------------------


@given(st.integers(0, 200), st.integers(1, 9), st.integers(1, 3), st.data())
def test_shares_cover_the_batch_in_order(samples, workers, min_share, data):
    claims = data.draw(st.just(()) | st.tuples(*[st.floats(0.1, 10)] * workers))
    bounds = cut(samples, workers, claims, min_share)
    taken = [(lo, hi) for lo, hi in bounds if hi > lo]
    assert [i for lo, hi in taken for i in range(lo, hi)] == list(range(samples))
    assert len(taken) <= 1 or all(hi - lo >= min_share for lo, hi in taken)
    if not claims and samples >= workers * min_share:
        assert bounds == tuple((samples * r // workers, samples * (r + 1) // workers) for r in range(workers))


def test_shares_follow_their_claims():
    assert cut(10, 3, (0.7, 0.2, 0.1)) == ((0, 7), (7, 9), (9, 10))
    assert cut(10, 3, (0.7, 0.2, 0.1), 2) == ((0, 7), (7, 10), (0, 0))
    # Three quarters as a float are a little less.
    assert cut(4, 3, (0.3, 0.3, 0.2)) == ((0, 1), (1, 3), (3, 4))
    assert cut(3, 4) == ((0, 1), (1, 2), (2, 3), (0, 0))
    assert cut(3, 2, (), 2) == ((0, 3), (0, 0))


@pytest.mark.parametrize(
    ("samples", "size", "how", "expected"),
    [
        # A worker without a share repeats samples at weight 0.
        (
            7,
            5,
            {"min_share": 2},
            [[(2, [0, 1]), (2, [5, 6])], [(3, [2, 3, 4]), (0, [5, 6])], [(0, [0, 1]), (0, [5, 6])]],
        ),
        # A batch of each worker's own.
        (
            11,
            2,
            {"per_worker": True},
            [[(2, [0, 1]), (2, [6, 7])], [(2, [2, 3]), (2, [8, 9])], [(2, [4, 5]), (1, [10])]],
        ),
    ],
)
def test_who_reads_which_sample(samples, size, how, expected):
    job = Job(lambda: DataLoader(Numbers(samples), size), workers=3, **how)
    assert [[(weight, batch.tolist()) for weight, batch in passes[0]] for passes in job.read().values()] == expected
    assert len(job.loader(job.lease_server.workers[0])) == 2


# --- kinds of data -----------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "x y")


class Ready(Dataset[Any]):
    """Items that are batches already."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> Any:
        x = torch.arange(5) + 10 * i
        return {
            "pair": Pair(x, [x.numpy() + 100, torch.tensor(1.5)]),
            "names": [f"n{j}" for j in range(5)],
            "who": UserDict(x=x),
            "note": "all",
        }


def test_items_that_are_batches_are_sliced_after_loading():
    job = Job(lambda: DataLoader(Ready(), batch_size=None), workers=2)
    read = job.read()
    one, two = (read[who][0][1] for who in job.lease_server.workers)
    assert (one[0], two[0]) == (2, 3)
    assert one[1]["pair"].x.tolist() == [10, 11] and two[1]["pair"].x.tolist() == [12, 13, 14]
    assert two[1]["pair"].y[0].tolist() == [112, 113, 114] and float(two[1]["pair"].y[1]) == 1.5
    assert two[1]["names"] == ["n2", "n3", "n4"] and two[1]["note"] == "all"
    assert two[1]["who"]["x"].tolist() == [12, 13, 14]


def test_bulk_samplers_and_tuples_are_index_lists():
    bulk = lambda: DataLoader(torch.arange(10), None, sampler=BatchSampler(SequentialSampler(range(10)), 4, False))  # noqa: E731
    read = Job(bulk, workers=2).read()
    assert [[b.tolist() for _, b in p[0]] for p in read.values()] == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]
    for mode, groups in (("broadcast", 1), ("lease", 2)):
        tuples = lambda: DataLoader(Numbers(5), batch_sampler=[(0, 1, 2), (3, 4)])  # noqa: E731
        assert Job(tuples, 2, groups, mode).samples() == list(range(5))


def test_a_part_of_a_stream_that_was_left_is_read_again_or_reported():
    class Once(IterableDataset[int]):
        def __init__(self) -> None:
            self.rest = list(range(40))

        def __iter__(self) -> Iterator[int]:
            rest, self.rest = self.rest, []
            return iter(rest)

    for make, lost in ((lambda: DataLoader(Stream(40), 2), 0), (lambda: DataLoader(Once(), 2), 3)):
        job = Job(make, groups=2, mode="lease")
        one, two = (job.loader(who) for who in job.lease_server.workers)
        # Group 0 begins, group 1 reads batch 4 of its lease 4..8 and leaves, group 0 finds 5..8 behind it.
        live, other = iter(one), iter(two)
        first = [next(live) for _ in range(2)]
        assert next(other).tolist() == [8, 9]
        rest = [next(live) for _ in range(6)]
        other.close()
        samples = sorted(i for batch in [*first, *rest, *live] for i in batch.tolist())
        assert samples == [i for i in range(40) if i not in (8, 9) and not (lost and 10 <= i < 16)]
        assert job.clients[job.lease_server.workers[0]].lost_ == lost
        assert job.clients[job.lease_server.workers[1]].left == [(0, 1)]


# --- leases ------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(1, 2), st.integers(2, 3), st.integers(1, 8), st.booleans())
def test_what_a_group_leaves_is_read_by_another(workers, groups, leave, stream):
    make = lambda: DataLoader(Stream(50) if stream else Numbers(50), 2)  # noqa: E731
    job = Job(make, workers, groups, mode="lease")
    assert job.samples(epoch=1, leave=lambda who: leave if who.group else None) == list(range(50))


def test_an_iterator_that_is_dropped_closed_or_replaced_gives_its_leases_back():
    job = Job(lambda: DataLoader(Numbers(8), 1), groups=2, mode="lease")
    who = job.lease_server.workers[1]
    loader, client = job.loader(who), job.clients[who]
    live = iter(loader)
    next(live)
    second = iter(loader)
    assert client.left == [(0, 1)] and list(live) == []
    next(second)
    loader.close()
    loader.close()
    assert client.left == [(0, 1), (1, 1)]
    next(iter(loader))
    gc.collect()
    assert client.left[-1] == (2, 1)
    assert [len(list(job.loader(job.lease_server.workers[0]))) for _ in range(1)] == [7]


def test_a_batch_that_fails_to_load_is_skipped_as_the_plain_loader_skips_it():
    class Holed(Numbers):
        def __getitem__(self, i: int) -> torch.Tensor:
            if i == 2:
                raise ValueError("no sample 2")
            return super().__getitem__(i)

    for make in (lambda: DataLoader(Holed(3), 1), lambda: DataLoader(Holed(3), 1, num_workers=1)):
        job = Job(make, mode="lease")
        live, got = iter(job.loader(job.lease_server.workers[0])), []
        for _ in range(3):
            try:
                got.append(int(next(live)))
            except ValueError:
                got.append(-1)
        assert sorted(got) == [-1, 0, 1]
        assert list(live) == []
        (client,) = job.clients.values()
        assert len(client.drawn_) == 2


def test_an_epochs_list_depends_on_seed_and_epoch_only_and_moves_no_generator():
    def rng() -> tuple[Any, ...]:
        return (
            torch.get_rng_state().tolist(),
            random.getstate(),
            str(numpy.random.get_state()),
            mine.get_state().tolist(),
        )

    class Shuffled(Sampler[int]):
        """A sampler that throws every die there is."""

        def __iter__(self) -> Iterator[int]:
            return iter([int(torch.randint(9, ())), int(numpy.random.randint(9)), random.randrange(9), self.epoch])

        def __len__(self) -> int:
            return 4

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    mine = torch.Generator().manual_seed(1)
    for how in ({"sampler": Shuffled()}, {"shuffle": True, "generator": mine}, {"shuffle": True}):
        loader, before = DataLoader(Numbers(9), **how), rng()
        first = draw_epoch(loader, 1, 0)
        assert draw_epoch(loader, 1, 0) == first
        assert draw_epoch(loader, 1, 1) != first != draw_epoch(loader, 2, 0)
        assert rng() == before


# --- the loader's own words --------------------------------------------------------------------------------------


def test_the_rest_is_the_scripts_own_loader():
    job = Job(lambda: DataLoader(Numbers(21), 2, shuffle=True), groups=2, mode="static")
    one, two = (job.loader(who) for who in job.lease_server.workers)
    assert (one.batch_size, len(one.dataset), type(one.sampler)) == (2, 21, RandomSampler)
    assert (len(one), len(two)) == (6, 5)
    assert len(list(one)) == 6 and len(list(two)) == 5
    nominal = Job(lambda: DataLoader(Numbers(21), 2), groups=2, mode="lease")
    assert [len(nominal.loader(who)) for who in nominal.lease_server.workers] == [6, 6]
    with pytest.raises(AttributeError):
        one.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("make", "how", "said"),
    [
        (lambda: DataLoader(Numbers(0)), {}, r"len\(loader.dataset\) = 0"),
        (lambda: DataLoader(Numbers(5), 8), {}, "loader.batch_size = 8: .* fit in the 5 samples"),
        (lambda: DataLoader(Numbers(5), 8, drop_last=True), {}, "loader.batch_size = 8"),
        (lambda: DataLoader(Numbers(5), 3), {"workers": 2, "per_worker": True}, "each of 2 workers"),
        (lambda: DataLoader(Numbers(5), batch_sampler=[]), {}, r"len\(loader\) = 0"),
        (lambda: DataLoader(Numbers(5), sampler=DistributedSampler(Numbers(5), 2, 0)), {}, "num_replicas = 2"),
        (lambda: [1, 2], {}, "loader = 'list': must be a torch"),
        (lambda: DataLoader(Numbers(5), num_workers=1, in_order=False), {}, r"loader\.in_order = false"),
        (lambda: DataLoader({"a": 1, "b": 2}, sampler=["a", "b"]), {"workers": 2}, "whole numbers"),
        (
            lambda: DataLoader([{"a": torch.ones(2), "b": torch.ones(3)}], batch_size=None),
            {"workers": 2},
            "leading dimension",
        ),
    ],
)
def test_bad_input_is_refused_in_the_terms_of_the_user(make, how, said):
    with pytest.raises(ConfigError, match=said):
        Job(make, **how).read()


READS = """
import gc, threading, time
from topotrain.training.rng_state import put_back, seed_torch, stand
before, reads = stand(), threading.Thread(target=lambda: [stand() for _ in range(8)])
gc.callbacks.append(lambda *_: threading.current_thread() is reads and time.sleep(0.001))
gc.set_threshold(1)
reads.start()
while reads.is_alive(): put_back(before), seed_torch(1)
"""


@pytest.mark.journey
def test_threads_that_read_and_set_generators_end(warm_at: str, tmp_path: Path) -> None:
    assert Forked(warm_at, ["-c", READS], tmp_path, os.environ).communicate(300) == ("", None)


# --- several loaders -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "two", "divided", "cycled"),  # samples and batch size of each loader
    [
        ((24, 6), (36, 12), True, False),
        ((24, 6), (40, 12), False, True),
        ((26, 6), (36, 12), False, False),
        ((26, 5), (40, 8), False, True),
    ],
)
def test_batches_of_two_loaders_meet_as_in_the_plain_script(one, two, divided, cycled):
    def loaders() -> list[DataLoader[Any]]:
        return [DataLoader(Numbers(n), size, shuffle=True) for n, size in (one, two)]

    def pairs(read: Any, client: Any) -> list[Any]:
        found = []
        for _ in range(1 if cycled else 2):
            # As `cycle` does it, the pass over the second loader begins first.
            second = iter(read[1]) if cycled else read[1]
            for a, b in zip(read[0], second):
                found.append((flat(a), flat(b)))
                client.own_steps = len(found)
        return found

    torch.manual_seed(7)
    job, read = Job(lambda: loaders()[0], workers=3), []
    expected = pairs(loaders(), job)
    for who, client in job.clients.items():
        torch.manual_seed(7)
        first = job.loader(who)
        read.append(pairs([first, first.beside(loaders()[1])], client))
        assert divided or {weight for _, _, weight, _ in client.drawn_} == {1.0}
    for step, whole in enumerate(expected):
        for at, batch in enumerate(whole):
            shares = [pairs[step][at] for pairs in read]
            assert list(chain(*shares)) == batch if divided else shares == [batch] * 3
    counted = sum(samples for client in job.clients.values() for *_, samples in client.drawn_)
    assert counted >= sum(len(a) + len(b) for a, b in expected)
    assert job.lease_server.book.kept_chunks == 0


def test_a_step_has_no_divided_batch_beside_one_of_other_shares():
    def two(data: Any = Numbers, **how: Any) -> tuple[Any, ShardedLoader, ShardedLoader]:
        (who, client), *_ = (job := Job(lambda: DataLoader(data(8), 4, **how), workers=3)).clients.items()
        return client, (one := job.loader(who)), one.beside(DataLoader(Numbers(9), 5))

    refused = pytest.raises(ConfigError, match=r"loader.batch_size = \d: must be a multiple of 3, .* divided already")
    client, one, other = two()
    next(iter(one))
    with refused:
        next(iter(other))
    client, one, other = two()
    # Validation: without gradients, to its end, or left later.
    with torch.no_grad():
        next(iter(other))
    assert [len(flat(batch)) for batch in one] == [1, 1]
    assert [len(flat(batch)) for _, batch in zip(range(2), other)] == [1, 1]
    train = iter(one)
    assert len(flat(next(train))) == 1
    with torch.no_grad():
        assert [len(flat(batch)) for batch in other] == [1, 1]
    assert [weight for _, _, weight, _ in client.drawn_][-3:] == [1.0, None, None]
    client.own_steps += 1
    assert [len(flat(batch)) for batch in other] == [1, 1]
    late = iter(other)
    assert len(flat(next(late))) == 1
    with refused:
        next(train)
    # A stream is cut where it is loaded.
    for processes in (0, 1):
        client, stream, other = two(Stream, num_workers=processes)
        train, late = iter(stream), iter(other)
        assert len(flat(next(train))) == (1 if processes else 4)
        with refused if processes else nullcontext():
            assert len(flat(next(late))) == 5


def test_a_draw_that_an_open_pass_still_needs_is_kept():
    job = Job(lambda: DataLoader(Numbers(9000), 1), workers=2)
    plan = job.loader(job.lease_server.workers[0])._plan
    for index, client in enumerate(job.clients.values()):
        mine = replace(plan, index=index, is_main=not index, repeats=True)
        long = ShardedLoader(DataLoader(Numbers(9000), 2), mine, client, client)
        short = long.beside(DataLoader(Numbers(4), 2))
        read = []
        live = iter(long)
        for _ in range(5):
            read += [flat(next(live)), *map(flat, short)]
        read += map(flat, live)
        assert len(read) == 4500 + 5 * 2


def test_groups_that_lease_read_one_loader_at_a_time():
    job = Job(lambda: DataLoader(Numbers(20), 2), groups=2, mode="lease")
    one = job.loader(job.lease_server.workers[0])
    two = one.beside(DataLoader(Numbers(20), 2))
    live = iter(one)
    with pytest.raises(ConfigError, match="shard = 'kLease': must be kStatic: the script reads two loaders at once"):
        iter(two)
    live.close()
    assert sum(1 for _ in two) == 10


# --- data that is divided already ----------------------------------------------------------------------------------


class EachOther(Sampler[int]):
    """A sampler that knows a rank; `order` is a generator of its own."""

    def __init__(self, rank: int) -> None:
        self.rank, self.order = rank, numpy.random.default_rng(1)

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        return iter(int(i) * 2 + self.rank for i in self.order.permutation(6))


class Part(IterableDataset[torch.Tensor]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(self.rank, 12, 2).split(1))


class Noisy(Numbers):
    """Random numbers in the data, of the dataset's own generator."""

    order = numpy.random.default_rng()

    def __getitem__(self, i: int) -> torch.Tensor:
        return super().__getitem__(i) + torch.tensor(self.order.random())


DIVIDED: dict[str, tuple[Callable[[int], DataLoader[Any]], str]] = {
    "subset": (lambda rank: DataLoader(Subset(Numbers(12), range(rank, 12, 2)), 3), "other content"),
    "length": (lambda rank: DataLoader(Numbers(6 + rank), 3), "7 samples on worker"),
    "sampler": (lambda rank: DataLoader(Numbers(12), 3, sampler=EachOther(rank)), "other indices"),
    "stream": (lambda rank: DataLoader(Part(rank), 3), "other content"),
    "stream of batches": (lambda rank: DataLoader(Part(rank), batch_size=None), "other content"),
}


@pytest.mark.parametrize(
    ("kind", "groups", "mode"),
    [(kind, *shape) for kind, shape in zip(DIVIDED, [(2, "lease"), (2, "static"), (1, "broadcast")] * 2)],
)
def test_data_that_is_divided_already_is_named(kind, groups, mode):
    make, said = DIVIDED[kind]
    ranks = iter((0, 1, 0, 1))
    job = Job(lambda: make(next(ranks)), workers=2 // groups, groups=groups, mode=mode)
    with pytest.raises(AssertionError, match=rf"other data on each worker \({said}.* tt.as_is\(loader\)"):
        list(map(next, map(iter, map(job.loader, job.clients))))


def test_equal_indices_in_other_batches_are_other_data():
    cuts = iter([[(0, 1), (2,), (3, 4)], [(0, 1), (2, 3), (4,)]])
    job = Job(lambda: DataLoader(Numbers(5), batch_sampler=next(cuts)), groups=2, mode="lease")
    first, second = (iter(job.loader(who)) for who in job.lease_server.workers)
    next(first)
    with pytest.raises(AssertionError, match="worker 1/0 and worker 0/0 would read different batches in epoch 0"):
        next(second)


def test_comparing_data_leaves_the_scripts_order_and_its_random_numbers():
    plain = list(DataLoader(Numbers(12), 3, sampler=EachOther(0)))
    job = Job(lambda: DataLoader(Noisy(12), 3, sampler=EachOther(0)), workers=2)
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    read = job.read()
    torch.manual_seed(1)
    assert torch.rand(1) == expected
    together = zip(*(passes[0] for passes in read.values()), strict=True)
    found = [torch.cat([share for _, share in step]).floor().long() for step in together]
    assert all(map(torch.equal, found, plain))


def test_workers_that_read_loaders_in_another_order_are_named():
    job = Job(lambda: DataLoader(Numbers(12), 3), workers=2)
    first, second = (job.loader(who) for who in job.lease_server.workers)
    iter(first).close()
    with pytest.raises(AssertionError, match=r"pass 0 over .* is one over loader 1 on worker 0/1"):
        iter(second.beside(DataLoader(Numbers(12), 3)))


# --- a loader to evaluate with ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["in order", "shuffled", "batch sampler", "stream", "stream, subclass", "subclass"])
def test_a_split_loader_has_every_sample_once_and_moves_random_numbers_as_the_plain_one(kind):
    if kind == "stream":
        torch.manual_seed(1)  # its own order is random, and not the same on all workers
        make = lambda: DataLoader(Stream(11), 4)  # noqa: E731
    else:
        make = KINDS[kind]
    torch.manual_seed(7)
    plain = [flat(batch) for batch in make()]
    after = torch.rand(1)
    read = []
    for index in range(3):
        torch.manual_seed(7)
        part = SplitLoader(make(), DataPlan(0, 1, index, 3, (), "static", False, 3, 1, False))
        mine = [flat(batch) for batch in part]
        assert torch.equal(torch.rand(1), after) and all(mine)
        assert "stream" in kind or len(part) == len(mine)
        read += chain(*mine)
    if kind == "shuffled":  # the last samples of the job's order are dropped, and not those of the script's
        assert len(set(read)) == 8
    else:
        assert sorted(read) == sorted(chain(*plain))


# --- a worker that comes back -------------------------------------------------------------------------------------


def test_a_worker_that_comes_back_goes_by_all_leases_that_its_group_has_read():
    class Client(LoaderClient):
        """The group has read all of a lease for each batch, but not the last one."""

        def lease(self, epoch, ordinal, total, *_):
            return (ordinal, ordinal, ordinal + 1) if ordinal < total else (0, 0, -1)

        def applied(self, stream):
            return int(stream < 2998)

    client = Client(LeaseServer(1, 1), Address(Role.WORKER, 0, 0))
    leases = LeaseIterator(client, 0, 3000, 0, skips=True)
    assert leases.ask(wait=True) and (leases.at, leases.passed) == (2998, 2998)
    assert leases.take().number == 2998
    assert leases.ask(wait=True) and leases.take().number == 2999 and not leases.ask(wait=True)


def test_workers_without_a_claim_share_a_batch_when_the_others_are_gone():
    plan = DataPlan(0, 1, 2, 3, (1.0, 0.0, 0.0), "broadcast", False, 0, 1, False)
    assert plan.bounds(8) == (0, 0) and plan.among((1, 2)).bounds(8) == (4, 8)
