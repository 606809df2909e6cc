"""The choices of a worker between two rounds.

They depend on when messages have come.
"""


class ExchangeChoices:
    """Leaves each choice as it is.

    A recording writes it down, and a replay makes the recorded one.
    """

    def pushes(self, step: int, now: bool) -> bool:
        """Whether the worker pushes behind its own step (from 1).

        It is asked several times.
        """
        return now

    def takes(self, step: int, now: bool) -> bool:
        """Whether the worker takes new values behind its own step (from 1).

        If they are not here yet, the worker waits for them.
        """
        return now

    def fragment(self, step: int, now: int) -> int:
        """The fragment that is pushed behind this step."""
        return now

    def copies(self, now: int) -> int:
        """The step behind which the optimizer's state is copied for another group.

        now: the step behind which the other group asks.
        """
        return now

    def is_copied(self, step: int) -> bool:
        """Whether the state behind this step will be copied, as far as that is known."""
        return False
