"""The lease book, asked in every order: each batch is read once, everybody gets on, a group hears one story."""

import pytest

from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Fail, Message, ProtocolError
from topotrain.core.server.gradients.gradient_source import StepError
from topotrain.training.data.data_messages import DrawnBatches, DrawRequest, Lease, LeaseRelease, LeaseRequest
from topotrain.training.data.lease_queue import LONGEST, LeaseQueue


def worker(group: int, index: int = 0) -> Address:
    return Address(Role.WORKER, group, index)


def ask(book: LeaseQueue, who: Address, ordinal: int, *, total: int = 100, wait: bool = False, **more: int):
    fields = {"epoch": 0, "digest": 0, "passed": ordinal} | more
    return book.handle(who, LeaseRequest(ordinal=ordinal, total=total, wait=wait, **fields))


def only(replies: list[tuple[Address, Message]]) -> Lease:
    ((_, reply),) = replies
    assert isinstance(reply, Lease)
    return reply


def test_lengths_shrink_towards_the_end_and_a_slow_group_reads_fewer_batches():
    lengths, ordinals, due = [], [0, 0], [0, 0]
    book = LeaseQueue(2)
    while True:
        group = due.index(min(due))
        run = only(ask(book, worker(group), ordinals[group], total=1000))
        if run.last <= run.first:
            break
        assert run.first == sum(length for _, length in lengths)
        lengths.append((group, run.last - run.first))
        ordinals[group] += 1
        due[group] += (run.last - run.first) * (1 if group == 0 else 4)  # group 1 is four times slower
    shrinking = [length for _, length in lengths]
    assert shrinking == sorted(shrinking, reverse=True) and shrinking[0] == LONGEST and shrinking[-1] == 1
    assert sum(shrinking) == 1000 and sum(length for group, length in lengths if group) < 1000 / 4


def test_different_batch_lists_are_refused_naming_both_workers():
    book = LeaseQueue(2)
    ask(book, worker(0), 0, digest=5)
    ((who, reply),) = ask(book, worker(1), 0, digest=6)
    assert who == worker(1) and isinstance(reply, Fail)
    assert "worker 0/0" in reply.text and "worker 1/0" in reply.text and "seed" in reply.text


@pytest.mark.parametrize(
    ("second", "words"), [(3, "worker 0/0 left after 2 batches, worker 0/1 after 3"), (-1, "has read 4")]
)
def test_workers_of_a_group_must_leave_at_the_same_batch(second, words):
    book = LeaseQueue(1, 2)
    for index in (0, 1):
        ask(book, worker(0, index), 0, total=8)
    if second < 0:
        ask(book, worker(0, 1), 1, total=8)
        ((_, reply),) = book.handle(worker(0, 0), LeaseRelease(0, 0, 2))
    else:
        assert book.handle(worker(0, 0), LeaseRelease(0, 0, 2)) == []
        ((_, reply),) = book.handle(worker(0, 1), LeaseRelease(0, 0, second))
    assert isinstance(reply, Fail) and words in reply.text


def test_questions_that_no_worker_asks_are_refused():
    for fields in ({"ordinal": 1, "passed": 2}, {"ordinal": 5}, {"ordinal": 0, "total": -2}):
        with pytest.raises(ProtocolError):
            ask(LeaseQueue(1), worker(0), **fields)
    book = LeaseQueue(1)
    ask(book, worker(0), 0, total=8)
    for message in (LeaseRelease(0, 0, 5), LeaseRelease(0, 3, 0), LeaseRelease(0, -1, 0), Fail("?")):
        with pytest.raises(ProtocolError):
            book.handle(worker(0), message)


def test_draws_reach_every_other_worker_in_any_order_and_are_forgotten():
    book = LeaseQueue(1, 3)
    put = DrawnBatches(0, 0, True, (2,), (4, 5))
    assert book.handle(worker(0, 2), DrawRequest(0, 0)) == []
    assert book.handle(worker(0, 0), put) == [(worker(0, 2), put)]
    assert book.handle(worker(0, 0), put) == []  # said twice
    with pytest.raises(ProtocolError):
        book.handle(worker(0, 0), DrawnBatches(0, 0, True, (2,), (4, 6)))
    assert book.handle(worker(0, 2), DrawRequest(0, 0)) == [(worker(0, 2), put)]  # asked twice, counts once
    assert book.kept_chunks == 1
    assert book.handle(worker(0, 1), DrawRequest(0, 0)) == [(worker(0, 1), put)]
    assert book.kept_chunks == 0


# --- a group that is started again -------------------------------------------------------------------------------


def test_what_a_group_had_not_finished_is_free_again():
    book = LeaseQueue(2)
    first, second = only(ask(book, worker(0), 0)), only(ask(book, worker(0), 1))
    assert book.streams(0) == [first.lease, second.lease] and book.streams(1) == []
    applied = {first.lease: first.last - first.first, second.lease: 2}
    assert book.group_restarted(0, applied, False) == []
    theirs = only(ask(book, worker(1), 0))
    assert (theirs.first, theirs.last) == (second.first + 2, second.last), "what was given back is read first"
    assert only(ask(book, worker(0), 0)).first == second.last, "its leases count from 0 again"


def test_a_worker_that_waits_for_the_end_reads_what_the_dead_left_or_is_told_that_it_is_over():
    for applied, expected in ((0, (0, 1)), (1, (0, -1))):
        book = LeaseQueue(2)
        ask(book, worker(0), 0, total=1)
        assert ask(book, worker(1), 0, total=1, wait=True) == []
        reply = only(book.group_restarted(0, dict.fromkeys(book.streams(0), applied), False))
        assert (reply.first, reply.last) == expected
        if applied:
            assert only(ask(book, worker(0), 0, total=1)).last == -1, "it is over for those who come back, too"


def read_all(book: LeaseQueue, group: int, epoch: int, total: int, uncounted: int = -1) -> list[tuple[int, int]]:
    """The batches that a group alone reads of an epoch, to its end."""
    found, wait = [], False
    while True:
        replies = ask(book, worker(group), len(found), total=total, wait=wait, epoch=epoch, uncounted=uncounted)
        reply = only(replies)
        if reply.last < 0:
            return found
        wait = reply.first == reply.last
        found += [] if wait else [(reply.first, reply.last)]


def test_batches_that_do_not_count_yet_are_given_again_behind_the_end_of_their_epoch():
    book = LeaseQueue(2)
    assert read_all(book, 1, 0, 3) == [(0, 1), (1, 2), (2, 3)]
    assert read_all(book, 0, 0, 3) == [] and book.open_epochs == ()
    lease = only(ask(book, worker(1), 0, total=3, epoch=1, uncounted=0))
    counted = {stream: stream < 2 for stream in book.streams(1)}
    assert len(counted) == 4, "also of the epoch that is over"
    assert book.group_restarted(1, counted, False) == []
    # The other group has read the epoch. A message of it that comes late must not get what it would never read.
    assert only(ask(book, worker(0), 0, total=3, wait=True)).last == -1
    assert read_all(book, 1, 0, 3) == [(2, 3)] and book.open_epochs == (1,)
    again = only(ask(book, worker(1), 0, total=3, epoch=1, uncounted=0))
    assert (again.first, again.last) == (lease.first, lease.last)


def test_a_group_whose_batches_all_count_finds_an_epoch_over():
    """Another group has died, too, and has to read its own again."""
    book = LeaseQueue(2)
    first = only(ask(book, worker(0), 0, total=2))
    second = only(ask(book, worker(1), 0, total=2))
    for group in (0, 1):
        ask(book, worker(group), 1, total=2, wait=True)
    assert book.open_epochs == ()
    book.group_restarted(0, {first.lease: 0}, False)
    book.group_restarted(1, {second.lease: 1}, False)
    assert only(ask(book, worker(1), 0, total=2)).last == -1
    assert only(ask(book, worker(0), 0, total=2)).last == 1


def test_an_epoch_is_forgotten_when_no_worker_has_batches_of_it_that_may_not_count():
    book = LeaseQueue(1)
    for epoch in range(5):
        read_all(book, 0, epoch, 2, uncounted=0)
    assert {stream >> 32 for stream in book.streams(0)} == {0, 1, 2, 3, 4}
    read_all(book, 0, 5, 2, uncounted=5)
    assert {stream >> 32 for stream in book.streams(0)} == {4, 5}, "a fresh process may begin in the one before"


def test_a_worker_that_died_before_it_had_begun_an_epoch_is_told_that_the_one_before_is_over():
    book = LeaseQueue(1, 3)
    book.handle(worker(0), DrawnBatches(0, 0, True, (1,), (5,)))
    book.group_restarted(0, {}, False)
    assert book.handle(worker(0, 2), DrawRequest(0, 0)) == []  # nobody knows yet where worker (0,0) is
    put = DrawnBatches(1, 0, True, (1,), (6,))
    over = DrawnBatches(0, 0, True, (), ())
    assert book.handle(worker(0), put) == [(worker(0, 2), over)]
    assert book.handle(worker(0, 1), DrawRequest(0, 0)) == [(worker(0, 1), over)]
    for who in (1, 2):
        assert book.handle(worker(0, who), DrawRequest(1, 0)) == [(worker(0, who), put)]
    assert book.kept_chunks == 0


def test_where_workers_start_again_alone_a_draw_is_kept_until_all_are_past_it_by_an_epoch():
    book = LeaseQueue(1, 3, singly=True)
    puts = {epoch: DrawnBatches(epoch, 0, True, (1,), (epoch,)) for epoch in range(4)}
    for epoch in range(3):
        book.handle(worker(0), puts[epoch])
        for who in (1, 2):
            assert book.handle(worker(0, who), DrawRequest(epoch, 0)) == [(worker(0, who), puts[epoch])]
    assert book.handle(worker(0, 1), DrawRequest(1, 0)) == [(worker(0, 1), puts[1])], "its process is another"
    assert book.kept_chunks == 2, "nobody was in epoch 0 any more when all had asked for epoch 2"
    assert book.handle(worker(0), puts[2]) == [], "worker 0, too, may draw the same once more"
    with pytest.raises(ProtocolError, match="chunk 0 of epoch 2 came again with other batches"):
        book.handle(worker(0), DrawnBatches(2, 0, True, (1,), (9,)))


def test_who_waits_for_a_draw_hears_that_worker_0_has_ended_and_what_was_drawn_is_still_given():
    book = LeaseQueue(1, 3)
    put = DrawnBatches(0, 0, True, (2,), (4, 5))
    book.handle(worker(0), put)
    assert book.handle(worker(0, 1), DrawRequest(0, 0)) == [(worker(0, 1), put)]
    book.on_finish(worker(0), 7)
    # The slower one reads the last pass to its end.
    assert book.handle(worker(0, 2), DrawRequest(0, 0)) == [(worker(0, 2), put)]
    with pytest.raises(StepError, match="worker 0 ended its script after 7 steps while others of its group go on"):
        book.handle(worker(0, 1), DrawRequest(1, 0))
    # It waits already when worker 0 ends, and another worker's end is no reason.
    book = LeaseQueue(1, 3)
    assert book.handle(worker(0, 1), DrawRequest(0, 0)) == []
    book.on_finish(worker(0, 2), 7)
    with pytest.raises(StepError, match="after 0 steps"):
        book.on_finish(worker(0), 0)


def test_a_group_that_goes_by_the_length_gets_no_more_and_all_is_read():
    book = LeaseQueue(2, 1)

    def read(group: int, most: int) -> tuple[int, int]:
        batches = ordinal = 0
        while True:
            lease = only(ask(book, worker(group), ordinal, total=35, wait=False, most=most))
            if lease.last <= lease.first:
                return batches, ordinal
            batches, ordinal = batches + lease.last - lease.first, ordinal + 1

    # The fast group has its part and goes on to the next epoch, while the slow one has read nothing.
    batches, leases = read(0, 18)
    assert batches == 18
    assert only(ask(book, worker(0), leases, total=35, wait=True, most=18)).last == -1
    # A process that takes its place gets what the servers do not have.
    book.group_restarted(0, dict.fromkeys(book.streams(0), 1), False)
    assert read(0, 18)[0] == 18 - leases
    assert read(1, 18)[0] == 35 - 18
    # Where a group has ended, the others read what it has left.
    book = LeaseQueue(2, 1)
    leases = read(0, 18)[1]
    book.group_over(1)
    assert only(ask(book, worker(0), leases, total=35, wait=False, most=18)).first == 18
