"""The rule of `tests.soak.endurance`: which growth of a process counts."""

from tests.soak.endurance import LEAST, MEMORY, Found, Look, ProcessHistory, grown

MB = 1_000_000


def test_a_process_that_grows_in_a_straight_line_is_named() -> None:
    def found(step: int) -> list[str]:
        looks = [Look(100 * MB + at * step, 9, 9) for at in range(4 * LEAST)]
        return grown(Found("job", {7: ProcessHistory("server 0/0", looks)}))

    assert not found(0)
    assert not found(MEMORY // (2 * LEAST))
    assert "server 0/0 grew" in found(MEMORY // (2 * LEAST) + 1)[0]
