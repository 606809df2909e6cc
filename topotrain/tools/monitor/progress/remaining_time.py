"""The time that a job still takes, estimated from the shares of it that are done."""

LEAST_S = 2.0
"""Seconds of training before there is an estimate."""
_MOST = 256


class RemainingTime:
    """Estimates when a job ends. All times are seconds of one clock.

    The pace is that of the second half of the training so far. So the estimate forgets a slow beginning, and a single
    slow step moves it little.
    """

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []

    def update(self, now: float, share: float) -> None:
        """Note the share of the job that is done, from 0 to 1."""
        samples = self._samples
        if samples and share < samples[-1][1]:
            # The job goes on from a snapshot.
            samples.clear()
        # Between two leases the share stays the same, although the job makes steps.
        if not samples or share > samples[-1][1]:
            samples.append((now, share))
        if len(samples) > _MOST:
            # The first and the last one stay.
            del samples[1:-1:2]

    @property
    def end(self) -> float | None:
        """The time at which the job will end. None: not known yet."""
        if not self._samples or self._samples[-1][0] - self._samples[0][0] < LEAST_S:
            return None
        (first, _), (last, share) = self._samples[0], self._samples[-1]
        begin, before = max(sample for sample in self._samples if sample[0] <= (first + last) / 2)
        return last + (1.0 - share) * (last - begin) / (share - before)
