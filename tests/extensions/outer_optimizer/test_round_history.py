"""What is known of the rounds of a job: how many, of which groups, and how old their pushes were."""

from hypothesis import given
from hypothesis import strategies as st

from topotrain.extensions.outer_optimizer.round_history import MOST_LISTED, Round, RoundHistory


def test_rounds_of_all_have_no_age() -> None:
    history = RoundHistory((0, 1), (0, 0))
    assert [history.add(number % 2, (0, 1)) for number in range(4)] == [
        Round(0, 0, (0, 1)),
        Round(1, 0, (0, 1)),
        Round(0, 1, (0, 1)),
        Round(1, 1, (0, 1)),
    ]
    assert history.members == {2: 4} and history.made == [2, 2]
    assert (history.ages, history.age_sum, history.age_max) == (8, 0, 0)


def test_a_late_group_is_as_old_as_the_rounds_that_it_has_missed() -> None:
    history = RoundHistory((0, 1, 2), (0,))
    for _ in range(3):
        history.add(0, (0, 1))
    history.add(0, (0, 2))
    assert history.age_max == 3, "its base were the first values"
    history.add(0, (0, 1))
    assert history.age_max == 3 and history.age_sum == 3 + 1
    assert history.members == {2: 5}


def test_a_group_that_came_later_has_no_age_at_first() -> None:
    history = RoundHistory((0, 1), (5,))
    history.add(0, (0,))
    history.forget(1)
    history.add(0, (0, 1))
    assert (history.ages, history.age_sum) == (2, 0)
    history.add(0, (0,))
    history.add(0, (1,))
    assert history.age_sum == 1 and history.made == [9]


def test_a_round_has_a_share_of_the_groups_that_there_are() -> None:
    history = RoundHistory(range(3), (0, 0))
    shares = [history.add(0, groups).share for groups in ((0,), (1,), (2,), (0, 1), (2,))]
    assert shares == [1 / 3, 1 / 3, 1 / 3, 2 / 3, 1 / 3], "one turn of all moves the values as far as a round of all"
    assert history.add(1, (0, 1, 2)).share == 1.0
    # Group 2 is slow.
    assert {history.add(0, (number % 2,)).share for number in range(20)} == {1 / 3}
    history.change(2, False)
    assert [history.add(0, groups).share for groups in ((1,), (0, 1))] == [1 / 2, 1.0]
    history.change(0, False)
    history.change(2, True)
    assert history.add(0, (1,)).share == 1 / 2
    assert history.add(0, (0,)).share == 1 / 3, "it came back before the start, without a decision"


@given(st.lists(st.tuples(st.integers(0, 2), st.sets(st.integers(0, 4), min_size=1)), max_size=150))
def test_each_round_is_counted_and_the_last_ones_are_listed(rounds: list[tuple[int, set[int]]]) -> None:
    history = RoundHistory(range(5), (0, 0, 0))
    made = [history.add(fragment, sorted(groups)) for fragment, groups in rounds]
    assert list(history.last) == made[-MOST_LISTED:]
    assert sum(history.members.values()) == len(rounds) == sum(history.made)
    assert history.ages == sum(len(groups) for _, groups in rounds)
    copy = RoundHistory((), (0,))
    copy.load_state_dict(history.state_dict())
    assert copy.state_dict() == history.state_dict()
