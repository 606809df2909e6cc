"""The fields in which the commits of a step must agree."""

from collections.abc import Collection, Mapping

from topotrain.core.protocol import Commit

_MUST_AGREE = {
    "backwards": "the number of backwards",
    "hyper": "the optimizer's hyper-parameters",
    "inv_scale": "the loss scale",
    "edited": "which gradients the script changed",
    "dropped": "which gradients the script set to None",
    "clip_norm": "the gradient clipping",
    "marks": "the batches of the step",
}


class StepError(Exception):
    """Workers of one group disagree about a step; the text names both."""


def agree(
    a: int,
    first: Commit,
    b: int,
    second: Commit,
    other_words: Mapping[str, str],
    may_differ: Collection[str],
) -> None:
    """Raise StepError when two workers commit different things.

    Args:
        a, first, b, second: the workers and their commits.
        other_words: names of fields in the error, where they differ from the usual ones.
        may_differ: fields in which the commits may differ.
    """
    for name, words in (_MUST_AGREE | dict(other_words)).items():
        if name not in may_differ and getattr(first, name) != getattr(second, name):
            raise StepError(
                f"workers {a} and {b} of a group disagree about {words} in step {first.step}: "
                f"{_short(getattr(first, name))} and {_short(getattr(second, name))}"
            )


def _short(value: object) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 200 else text[:200] + "…"
