"""JSON for browsers, which know neither NaN nor Infinity."""

import json
import math
from typing import Any


def page_json(data: Any) -> str:
    """Return data as JSON in ASCII; numbers that are not finite become null."""
    try:
        return json.dumps(data, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)


def embedded_json(data: Any) -> str:
    """Return data as JSON that can stand inside any element of a page."""
    text = page_json(data)
    # No text of a log or a script can end the element, or begin another one.
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return data
