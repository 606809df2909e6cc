"""Amounts in options of the command line: times, sizes, and links."""

import math
import re

from topotrain.config.job import ConfigError, Link

_NUMBER = r"(\d+\.?\d*|\.\d+)"
_TIMES = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "y": 365.25 * 86400.0, "": 1.0}
_TIME = re.compile(rf"{_NUMBER}(ms|s|min|h|d|y|)")
_SIZES = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE = re.compile(rf"{_NUMBER}([kmgt]i?b)")
_LINK_FIELDS = {
    "bandwidth": {"kbit": 0.001, "mbit": 1.0, "gbit": 1000.0},
    "delay": {"us": 0.001, "ms": 1.0, "s": 1000.0},
    "jitter": {"us": 0.001, "ms": 1.0, "s": 1000.0},
    "loss": {"": 1.0, "%": 0.01},
}
MOST_DELAY_S = 3600.0
"""Of a link, one way; of its jitter, too."""
_MBIT = (1e-6, 1e9)
"""Mbit/s of a link: a bit in a second, and a million gigabits."""
_LINK_BOUNDS = {
    "bandwidth": (*_MBIT, "must be 1 bit/s to 1,000,000 Gbit/s"),
    "delay": (0.0, MOST_DELAY_S * 1000, f"must be at most {MOST_DELAY_S:g} s"),
    "jitter": (0.0, MOST_DELAY_S * 1000, f"must be at most {MOST_DELAY_S:g} s"),
}
_LINK_PART = re.compile(rf"(?:([a-z]+)=)?{_NUMBER}([a-z%]*)")


def seconds(option: str, text: str) -> float:
    """Return the seconds of "500ms", "18", "5min", "12h", "30d" or "1y".

    Raises ConfigError for anything else, and for 0.
    """
    found = _TIME.fullmatch(text.strip())
    length = float(found[1]) * _TIMES[found[2]] if found else 0.0
    if not 0 < length < math.inf:
        raise ConfigError(option, text, "must be a time above 0, such as 500ms, 18, 5min, 12h, 30d or 1y")
    return length


def nbytes(option: str, text: str) -> int:
    """Return the bytes of "16GB" or "512MiB".

    Raises ConfigError for anything else, and for 0.
    """
    found = _SIZE.fullmatch(text.strip().lower())
    size = float(found[1]) * _SIZES[found[2]] if found else 0.0
    if not 1 <= size < math.inf:
        raise ConfigError(option, text, "must be a size above 0, such as 512MB, 16GB or 16GiB")
    return int(size)


def link(option: str, text: str) -> Link:
    """Parse a link such as "100mbit,20ms" or "1gbit,jitter=5ms". Raises ConfigError."""
    values: dict[str, float] = {}
    for part in text.lower().replace(" ", "").split(","):
        found = _LINK_PART.fullmatch(part)
        name, amount, unit = found.groups() if found else ("", "", "")
        # Bandwidths and delays have different units, so their names may be left out.
        name = name or next((field for field in ("bandwidth", "delay") if unit in _LINK_FIELDS[field]), "")
        if unit not in _LINK_FIELDS.get(name, {}):
            accepted = "must be such as 100mbit, 1gbit, 20ms, jitter=5ms or loss=0.01, separated by commas"
            raise ConfigError(option, text, f"{part!r} is not a part of a link: {accepted}")
        if name in values:
            raise ConfigError(option, text, f"{name} is given twice")
        values[name] = float(amount) * _LINK_FIELDS[name][unit]
        least, most, accepted = _LINK_BOUNDS.get(name, (0.0, math.inf, ""))
        if not least <= values[name] <= most:
            raise ConfigError(option, text, f"{name} {accepted}")
    try:
        return Link(**values)
    except ConfigError as error:
        # The user has given an option, and no field of a job.
        raise ConfigError(option, text, f"{error.field.rpartition('.')[2]} {error.accepted}") from None
