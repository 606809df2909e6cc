"""What the workers of a group must say alike when they commit a step."""

from collections.abc import Mapping

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


_MAY_DIFFER = frozenset(["hyper", "marks"])  # with backup workers, which are not always at the same batch


class StepError(Exception):
    """Workers of one group disagree about a step; the text names both."""


def agree(
    a: int,
    first: Commit,
    b: int,
    second: Commit,
    other_words: Mapping[str, str] | None = None,
    backup: bool = False,
) -> None:
    """Raise StepError, in these words, when two workers commit different things."""
    for name, words in (_MUST_AGREE | dict(other_words or {})).items():
        if getattr(first, name) != getattr(second, name) and not (backup and name in _MAY_DIFFER):
            raise StepError(
                f"workers {a} and {b} of a group disagree about {words} in step {first.step}: "
                f"{_short(getattr(first, name))} and {_short(getattr(second, name))}"
            )


def _short(value: object) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 200 else text[:200] + "…"
