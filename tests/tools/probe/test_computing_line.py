"""The line through the times of two sizes of batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topotrain.tools.probe.measured_program import step_fields
from topotrain.tools.probe.step_recorder import StepTimes

seconds = st.floats(1e-6, 10.0)


def computing_line(whole_s: float, samples: int, part_s: float, fewer: int) -> tuple[float, float]:
    """The fixed seconds of a batch, and those of each sample."""
    times = [[StepTimes(size, 0.25 * s, 0.75 * s, 0.0, 0.0)] for size, s in ((samples, whole_s), (fewer, part_s))]
    batch = step_fields(*times)["batch"]
    return batch["fixed_s"], batch["per_sample_s"]


def test_a_line_through_two_batches() -> None:
    assert computing_line(0.010, 40, 0.004, 10) == pytest.approx((0.002, 0.0002))
    assert computing_line(0.010, 40, 0.004, 0) == (0.0, 0.0)  # steps without a batch are none of a smaller one


@given(seconds, seconds, st.integers(2, 4096), st.data())
def test_whatever_was_measured_the_larger_batch_is_on_the_line(
    whole: float, part: float, samples: int, data: st.DataObject
) -> None:
    fixed, per_sample = computing_line(whole, samples, part, data.draw(st.integers(1, samples - 1)))
    assert min(fixed, per_sample) >= 0
    assert fixed + per_sample * samples == pytest.approx(whole)
