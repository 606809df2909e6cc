"""The first difference between the records of a plain script and of a job, and its cause."""

import torch

from topotrain.tools.check.compared_records import Record, compare

NOTES = {"steps": 3, "draws": 0, "by_share": [], "reported": {"loss": 0.5}, "eps": 1e-7}


def record(changed=None, notes=(), steps=3):
    """Values before, gradients and values after each of three steps, and the values at the end."""
    values = {(step, kind, "w"): torch.full((4,), 1.0 + step) for step in range(steps) for kind in range(3)}
    values[steps, 2, "w"] = torch.full((4,), 9.0)
    for key, by in (changed or {}).items():
        values[key] = values[key] * (1 + by)
    return Record(values, {**NOTES, "steps": steps, **dict(notes)})


def compared(job, rounded=None, plain=None, visible=True):
    return compare(plain or record(), rounded or record(), job, 2, visible)


def test_equal_records():
    found = compared(record({(1, 2, "w"): 2e-6}))
    assert (found.what, found.steps, found.parameters) == ("", 3, 1)
    assert 1e-6 < found.largest < 3e-6


def test_each_kind_of_difference_has_its_cause():
    for changed, words in (
        ({(1, 0, "w"): 0.1}, "between two steps"),
        ({(1, 1, "w"): 0.1}, "no mean over samples"),
        ({(1, 1, "w"): -0.5}, "a sum over the batch"),
        ({(1, 2, "w"): 0.1}, "the gradients agree"),
        ({(3, 2, "w"): 0.1}, "after the last step"),
    ):
        found = compared(record(changed))
        assert found.step == next(iter(changed))[0] + 1
        assert words in found.cause, found


def test_what_rounding_changes_and_hidden_gradients_are_no_difference():
    later = {(2, kind, "w"): 1e-3 for kind in range(3)}
    assert compared(record(later)).what
    assert not compared(record(later), rounded=record(dict.fromkeys(later, 2e-4))).what
    assert not compared(record({(1, 1, "w"): 0.1}), visible=False).what


def test_steps_and_metrics_are_compared():
    shorter = record(steps=2)
    assert compared(shorter).what == "the number of steps"
    assert compared(record(notes={"reported": {"loss": 0.7}})).what == "the metric loss"
    assert (
        "a worker's share" in compared(record({(0, 1, "w"): 0.3}), plain=record(notes={"by_share": ["dropout"]})).cause
    )
    assert "each worker draws" in compared(record({(0, 1, "w"): 0.3}), plain=record(notes={"draws": 3})).cause
