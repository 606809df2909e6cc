"""Every algorithm over a pretended network: the right sum, the bytes of the arithmetic, bits that no order changes."""

import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples

from topotrain.config.job import Algorithm
from topotrain.core.protocol import ProtocolError
from topotrain.core.server.ordered_sum import ScratchBuffers, canonical_mean
from topotrain.extensions.collectives.algorithms import (
    VALUES,
    CollectiveResult,
    CompleteSum,
    Contribution,
    Relay,
    SendPart,
    center,
    children,
    down,
    slots,
    up,
)
from topotrain.extensions.collectives.collective_messages import CollectivePart

ALL = tuple(Algorithm)
STARS = (Algorithm.kAuto, Algorithm.kNaive)
SIZES = range(1, 9)
each_algorithm = pytest.mark.parametrize("algorithm", ALL)


# --- the trees ---------------------------------------------------------------------------------------------------


@each_algorithm
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_reaches_the_center_on_both_trees(algorithm, size):
    for home in range(size):
        root = center(algorithm, home)
        for parents in (up(algorithm, size, home), down(algorithm, size, home)):
            assert len(parents) == size
            assert [rank for rank in range(size) if parents[rank] == rank] == [root]
            for rank in range(size):
                hops = 0
                while rank != root:
                    rank, hops = parents[rank], hops + 1
                assert hops < size


def test_the_trees_are_those_of_the_textbook():
    assert up(Algorithm.kRing, 4, 1) == (1, 1, 3, 0)
    assert down(Algorithm.kRing, 4, 1) == (3, 1, 1, 2)
    assert up(Algorithm.kTree, 7, 0) == down(Algorithm.kTree, 7, 0) == (0, 0, 0, 1, 1, 2, 2)
    assert up(Algorithm.kTree, 4, 2) == (2, 3, 2, 2)
    assert up(Algorithm.kNaive, 3, 2) == (0, 0, 0)
    assert up(Algorithm.kAuto, 3, 2) == (2, 2, 2)
    assert children((2, 2, 2), 2) == (0, 1)


def bytes_sent(algorithm, per_home, results=1):
    """Of each rank: every home's bytes go up once, and down once for each result."""
    sent = [0] * len(per_home)
    for home, nbytes in enumerate(per_home):
        above, sources = (way(algorithm, len(per_home), home) for way in (up, down))
        for rank in range(len(per_home)):
            sent[rank] += nbytes * (above[rank] != rank)
            sent[sources[rank]] += results * nbytes * (sources[rank] != rank)
    return sent


# --- a pretended network -----------------------------------------------------------------------------------------


@dataclass
class Setup:
    """What every rank has, for each reduction and bucket: (weights of its workers, their gradients or None)."""

    algorithm: Algorithm
    size: int
    homes: tuple[int, ...]  # of each bucket
    numel: tuple[int, ...]
    given: dict[tuple[int, int, int], tuple[list[float], list[torch.Tensor | None]]]  # (step, bucket, rank)
    steps: int

    def part(self, step, bucket, rank):
        """In-unit sum as the servers make it."""
        weights, grads = self.given[step, bucket, rank]
        bare = Contribution.of(weights, bytes([1 << rank if any(g is not None for g in grads) else 0]), None)
        terms = {n: (w, g) for n, (w, g) in enumerate(zip(weights, grads)) if w > 0 and g is not None}
        if not terms:
            return bare
        if bare.each:
            terms = {n: (1.0, g) for n, (_, g) in terms.items()}
        body = torch.full((self.numel[bucket],), float("nan"))
        tree = [[n] for n in terms]
        canonical_mean({n: (1.0, w * g) for n, (w, g) in terms.items()}, tree, body, ScratchBuffers(), divide=False)
        return replace(bare, body=body)

    def expected(self, step, bucket):
        parts, tree, n = {}, [], 0
        for rank in range(self.size):
            weights, grads = self.given[step, bucket, rank]
            tree.append(list(range(n, n + len(weights))))
            parts |= dict(enumerate(zip(weights, grads), n))
            n += len(weights)
        out = torch.empty(self.numel[bucket])
        canonical_mean(parts, tree, out, ScratchBuffers())
        return out

    def present(self, step, bucket):
        ranks = (r for r in range(self.size) if any(g is not None for g in self.given[step, bucket, r][1]))
        return sum(1 << rank for rank in ranks)


class RelayOf(Relay):
    """A relay with memory from a function."""

    def __init__(self, memory, *settings):
        super().__init__(*settings)
        self.memory = memory

    def buffer(self, slot, bucket):
        return self.memory(slot, bucket)


@dataclass
class Net:
    """Random order between pairs, first in first out within one; bodies are read when they arrive, not when sent."""

    setup: Setup
    random: random.Random
    viewable: bool
    doubled: bool = False
    sent: list[int] = field(default_factory=list)
    means: dict[tuple[int, int, int], torch.Tensor | None] = field(default_factory=dict)
    values: dict[tuple[int, int, int], torch.Tensor | None] = field(default_factory=dict)

    def __post_init__(self):
        s = self.setup
        self.views = {}
        self.buffers = [{} for _ in range(s.size)]
        self.ways = {(a, b): deque() for a in range(s.size) for b in range(s.size)}
        self.relays = [
            RelayOf(lambda slot, bucket, rank=rank: self.buffer(rank, slot, bucket), s.algorithm, s.size, rank, s.homes)
            for rank in range(s.size)
        ]
        self.sent = [0] * s.size

    def buffer(self, rank, slot, bucket):
        s = self.setup
        assert slot in slots(s.algorithm, s.size, rank, s.homes[bucket])
        fresh = torch.full((s.numel[bucket],), float("nan"))
        return self.buffers[rank].setdefault((slot, bucket), fresh)

    def run(self):
        s = self.setup
        # The next local part of a bucket is due when the values of the last step are there: nobody waits for all.
        due = [(rank, 0, bucket) for rank in range(s.size) for bucket in range(len(s.homes))]
        while due or any(self.ways.values()):
            ways = [way for way, queue in self.ways.items() if queue]
            at = self.random.randrange(len(due) + len(ways))
            if at < len(due):
                rank, step, bucket = due.pop(at)
                self.results_lie_still(step - 1, bucket, rank)
                part = s.part(step, bucket, rank)
                outs = self.relays[rank].local(step, 0, bucket, part)
            else:
                sender, rank = ways[at - len(due)]
                outs = self.deliver(sender, rank, self.ways[sender, rank].popleft())
            due += self.take(rank, outs)
        return self

    def results_lie_still(self, step, bucket, rank):
        """A view of the sender's memory holds what it held when it came, until this rank goes on."""
        for kept in (self.means, self.values):
            view = self.views.get((step, bucket, rank, kept is self.values))
            if view is not None:
                assert torch.equal(view, kept[step, bucket, rank])

    def deliver(self, sender, rank, hop):
        if hop.body is not None:
            target = self.relays[rank].place(sender, hop, self.viewable)
            if target is None:
                assert self.viewable
                hop = replace(hop, body=hop.body.view(torch.uint8))
            else:
                hop = replace(hop, body=target.copy_(hop.body))
        outs = self.relays[rank].arrive(sender, hop)
        if self.doubled:
            assert self.relays[rank].arrive(sender, hop) == []
        return outs

    def take(self, rank, outs):
        due = []
        for out in outs:
            match out:
                case SendPart(to=to, hop=hop):
                    self.sent[rank] += 0 if hop.body is None else hop.body.nbytes
                    self.ways[rank, to].append(hop)
                case CompleteSum(step=step, ordinal=ordinal, bucket=bucket, part=part):
                    due += self.total(rank, step, ordinal, bucket, part)
                case CollectiveResult(hop=hop):
                    due += self.told(rank, hop)
        return due

    def total(self, rank, step, ordinal, bucket, part):
        """At the center: the mean goes down, and new values right behind it."""
        assert rank == center(self.setup.algorithm, self.setup.homes[bucket])
        assert int.from_bytes(part.present, "little") == self.setup.present(step, bucket)
        relay, mean, values = self.relays[rank], part.body, self.buffer(rank, "values", bucket)
        if mean is not None:
            assert mean is self.buffer(rank, "mean", bucket)
            mean.div_(part.divisor)
        values.fill_(step) if mean is None else torch.add(mean, step, out=values)
        due = self.take(rank, relay.result(step, ordinal, bucket, part.present, mean))
        due += self.take(rank, relay.result(step, VALUES, bucket, b"", values, version=step + 1))
        due += self.told(rank, CollectivePart(step, ordinal, bucket, False, 0, 0, 0, part.present, 0, body=mean))
        return due + self.told(rank, CollectivePart(step, VALUES, bucket, False, 0, 0, 0, b"", step + 1, body=values))

    def told(self, rank, hop):
        body = None if hop.body is None else hop.body.view(torch.float32).clone()
        key = (hop.step, hop.bucket, rank)
        if hop.body is not None:
            self.views[(*key, hop.ordinal == VALUES)] = hop.body.view(torch.float32)
        if hop.ordinal != VALUES:
            assert key not in self.means
            assert int.from_bytes(hop.present, "little") == self.setup.present(hop.step, hop.bucket)
            self.means[key] = body
            return []
        assert hop.version == hop.step + 1 and key not in self.values
        self.values[key] = body
        return [(rank, hop.step + 1, hop.bucket)] if hop.step + 1 < self.setup.steps else []


@st.composite
def setups(draw, algorithm):
    size = draw(st.integers(1, 8))
    homes = tuple(draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4)))
    numel = tuple(draw(st.integers(1, 9)) for _ in homes)
    steps = draw(st.integers(1, 3))
    weights = draw(st.sampled_from([[1.0], [3.0], [2.0, 5.0, 0.0], [1.0, 1.0, 0.0], [0.3, 0.7]]))
    workers = [draw(st.sampled_from([1, 1, 1, 2])) for _ in range(size)]
    all_have = draw(st.booleans())
    chance = random.Random(draw(st.integers(0, 2**32)))
    given_ = {}
    for step in range(steps):
        for bucket in range(len(homes)):
            for rank in range(size):
                mine = [chance.choice(weights) for _ in range(workers[rank])]
                has = [all_have or chance.random() < 0.5 for _ in mine]
                make = torch.Generator().manual_seed(chance.randrange(2**31))
                grads = [torch.randn(numel[bucket], generator=make) if h else None for h in has]
                given_[step, bucket, rank] = (mine, grads)
    return Setup(algorithm, size, homes, numel, given_, steps)


def same(a, b):
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))


@each_algorithm
@given(st.data())
@settings(max_examples=examples(60))
def test_everybody_gets_the_mean_whatever_the_order_of_arrival(algorithm, data):
    setup = data.draw(setups(algorithm))
    seeds = data.draw(st.tuples(st.integers(0, 999), st.integers(0, 999)))
    net = Net(setup, random.Random(seeds[0]), viewable=True, doubled=True).run()
    other = Net(setup, random.Random(seeds[1]), viewable=False).run()
    ranks = range(setup.size)
    for step in range(setup.steps):
        for bucket in range(len(setup.homes)):
            keys = [(step, bucket, rank) for rank in ranks]
            first = net.means[keys[0]]
            assert all(same(net.means[key], first) and same(other.means[key], first) for key in keys)
            if not setup.present(step, bucket):
                assert first is None
                continue
            expected = setup.expected(step, bucket)
            torch.testing.assert_close(first, expected, rtol=1e-6, atol=1e-6)
            single = all(len(setup.given[key][0]) == 1 for key in keys)
            even = len({w for key in keys for w in setup.given[key][0] if w > 0}) <= 1
            if algorithm in STARS and (single or even):
                assert torch.equal(first, expected)
            assert all(same(net.values[key], first + step) and same(other.values[key], first + step) for key in keys)


@each_algorithm
@given(st.integers(2, 8), st.integers(1, 3), st.integers(0, 999), st.booleans())
@settings(max_examples=examples(30))
def test_the_bytes_are_those_of_the_arithmetic(algorithm, size, per_home, seed, viewable):
    homes = tuple(range(size)) * per_home
    numel = tuple(3 + home for home in homes)
    given_ = {(0, b, r): ([1.0], [torch.ones(numel[b])]) for b in range(len(homes)) for r in range(size)}
    net = Net(Setup(algorithm, size, homes, numel, given_, 1), random.Random(seed), viewable).run()
    # Means and new values both go down.
    assert net.sent == bytes_sent(algorithm, [4 * per_home * (3 + home) for home in range(size)], results=2)


def test_who_has_no_gradient_sends_no_bytes():
    grad = torch.arange(4.0)
    given_ = {(0, 0, rank): ([1.0], [grad if rank == 2 else None]) for rank in range(4)}
    net = Net(Setup(Algorithm.kRing, 4, (0,), (4,), given_, 1), random.Random(1), False).run()
    assert net.means[0, 0, 1].tolist() == (grad / 4).tolist()
    up_bytes = [0, 0, 16, 16]  # on the path 1, 2, 3, 0
    assert net.sent == [a + b for a, b in zip(up_bytes, [32, 32, 32, 0])]


# --- bad input ---------------------------------------------------------------------------------------------------


def relay(rank=1, algorithm=Algorithm.kRing):
    memory = {}
    return RelayOf(lambda slot, b: memory.setdefault((slot, b), torch.zeros(2)), algorithm, 4, rank, (3,) * 8)


def hop(step=0, ordinal=0, going_up=True, body=True):
    return CollectivePart(step, ordinal, 7, going_up, 1.0, 1, 1.0, b"\1", 0, body=torch.ones(2) if body else None)


def test_only_messages_of_neighbors_are_taken():
    for sender, message in ((2, hop()), (1, hop()), (3, hop()), (2, hop(going_up=False)), (3, hop(going_up=False))):
        for hear in (relay().arrive, lambda s, h: relay().place(s, h, True)):
            with pytest.raises(ProtocolError, match="is not the neighbor of rank 1"):
                hear(sender, message)
    assert relay().arrive(0, hop()) == []


def test_a_reduction_begins_when_the_last_one_is_over():
    one = relay()
    one.arrive(0, hop(step=4))
    with pytest.raises(ProtocolError, match=r"step 5, reduction 0, up of rank 0, but \(4, 0\) is still being added up"):
        one.place(0, hop(step=5), False)
    [out] = one.local(4, 0, 7, Contribution.of([1.0], b"\1", torch.ones(2)))
    assert (out.to, out.hop.body.tolist(), out.hop.count) == (2, [2.0, 2.0], 2)
    assert one.arrive(0, hop(step=5)) == []
    one.reset()
    assert one.arrive(0, hop(step=0)) == []


def test_a_buffer_in_use_is_not_received_into_twice():
    one = relay()
    assert one.place(0, hop(), False) is one.place(0, hop(), False)
    one.arrive(0, hop())
    with pytest.raises(ProtocolError, match="came twice"):
        one.place(0, hop(), False)
    assert one.place(0, hop(), True) is None
    told = hop(going_up=False)
    assert one.place(0, told, False) is not None
    assert [type(out) for out in one.arrive(0, told)] == [SendPart, CollectiveResult]
    assert one.arrive(0, told) == []
    with pytest.raises(ProtocolError, match="came twice"):
        one.place(0, told, False)


def test_only_the_center_has_results():
    with pytest.raises(ValueError, match="rank 1 is not the center of bucket 7"):
        relay().result(0, 0, 7, b"\1", torch.ones(2))


def test_weights():
    assert Contribution.of([2.0, 2.0, 0.0], b"", None) == Contribution(4.0, 2, 2.0, b"", None)
    assert Contribution.of([1.0, 2.0], b"", None) == Contribution(3.0, 2, 0.0, b"", None)
    assert Contribution.of([0.0], b"\1", torch.ones(1)) == Contribution(0, 0, 0.0, b"\1", None)
    assert Contribution.of([2.0, 2.0], b"", None).divisor == 2.0
    assert Contribution.of([1.0, 2.0], b"", None).divisor == 3.0
    assert Contribution.of([0.0], b"", None).divisor == 1.0
