"""Texts of other processes, users and files, as they may be shown on a terminal."""


def printable(text: str, instead: str = "?", keep: str = "") -> str:
    """Return the text without characters that control a terminal. keep: those that stay."""
    return "".join(c if c.isprintable() or c in keep else instead for c in text)
