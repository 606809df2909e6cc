"""Texts of other processes, users and files, as they may be shown on a terminal."""


def printable(text: str, instead: str = "?", keep: str = "") -> str:
    """Replace the characters that control a terminal, but for those in `keep`."""
    return "".join(c if c.isprintable() or c in keep else instead for c in text)
