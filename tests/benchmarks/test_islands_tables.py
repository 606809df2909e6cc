"""The tables of islands: their job files, and what is made of what jobs leave."""

import pytest

from benchmarks.islands import DECOUPLED, EXACT, LEDGER, LINK, MEAN, NESTEROV, STREAMING, StepTimes, islands, ring_s
from benchmarks.islands_loss import ALL, ALONE, STEPS, WAYS, Trained, rows_of
from benchmarks.models import CharacterModel, parameters
from benchmarks.programs.characters import HELD_OUT, LENGTH, deaths_of, text, windows
from benchmarks.sides import refusal


@pytest.mark.parametrize("name", WAYS)
def test_every_way_is_a_job_that_is_taken(name: str) -> None:
    assert refusal(WAYS[name].conf) == ""
    words = WAYS[name].arguments
    samples, batch = (int(words[words.index(word) + 1]) for word in ("--samples", "--batch"))
    # Each worker makes as many steps, with as many samples.
    assert samples // batch * (WAYS[name].workers // WAYS[name].groups) == STEPS * WAYS[name].workers


@pytest.mark.parametrize(
    "conf",
    [
        islands(f"{STREAMING} {NESTEROV} {LINK}"),
        islands(f"{DECOUPLED} {NESTEROV} {LINK}"),
        islands(EXACT, servers=1, top=f"{LEDGER} restarts: 3"),
        islands(f"{EXACT} replicas: 2", 4, 2, f"{LEDGER} snapshot_s: 2"),
        islands(f"sync_freq: 24 transport: kTcp {MEAN}", 4, 1, LEDGER),
    ],
)
def test_every_conf_is_taken(conf: str) -> None:
    assert refusal(conf) == ""


def test_gaps_are_to_allreduce() -> None:
    found = {
        ALL: [Trained(2.0, 8.0, 0), Trained(2.2, 8.0, 0)],
        ALONE: [Trained(2.4, 0.0, 0), Trained(2.6, 0.0, 0)],
        "diloco-10": [Trained(2.1, 1.0, 0), Trained(2.3, 2.0, 0)],
    }
    rows = {row.what: row for row in rows_of(found, {"ring": "it is broken"})}
    gap = rows["DiLoCo, sync_freq 10: gap to AllReduce"]
    assert gap.figure == pytest.approx(100 * (2.2 / 2.1 - 1)) and gap.met is False
    assert gap.low == pytest.approx(100 * (2.3 / 2.2 - 1)) and gap.high == pytest.approx(5.0)
    assert rows["DiLoCo, sync_freq 10"].note == "75% of what 4 workers bring; a worker sent 1.5 MB; 2 seeds"
    assert rows["Hogwild, kRingAverage, sync_freq 10"].note == "it is broken"


def test_the_times_of_steps() -> None:
    times = StepTimes({(0, 10): [0.0, 1.0, 2.0, 3.0, 4.0], (1, 11): [0.5, 1.0], (1, 12): [3.5, 4.0]}, [1.2], 0)
    assert times.steps == 9 and times.seconds == 4.0
    assert times.longest_gap == 1.0, "within one process"
    assert times.longest_pause == 2.5, "from the last step of a dead process to the first of the next one"
    calm = StepTimes({(0, 10): [0.0, 1.0, 2.0, 3.0], (1, 11): [0.5, 1.0, 1.5, 2.0, 2.5]}, [], 0)
    assert calm.rate == pytest.approx(3.0)
    assert calm.rates == [1.0, 2.0]


def test_the_ring_is_bound_by_bytes_and_by_the_delay() -> None:
    sent = 2 * 7 / 8 * 4 * parameters(CharacterModel()) * 8 / 1e8
    assert ring_s(8) == pytest.approx(sent + 14 * 0.05)


def test_the_text_is_divided() -> None:
    numbers, held, words = text()
    assert len(held) == pytest.approx(HELD_OUT * (len(numbers) + len(held)), abs=1)
    assert int(numbers.max()) < words
    inputs, targets = windows(numbers, numbers.new_tensor([5]))[0]
    assert len(inputs) == LENGTH and inputs[1:].equal(targets[:-1])
    assert deaths_of(["1:100", "3:300"]) == {(1, 100), (3, 300)}
