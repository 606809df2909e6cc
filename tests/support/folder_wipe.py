"""A folder that is gone at one moment, whatever its users write into it meanwhile."""

import shutil
import tempfile
from pathlib import Path


def wipe(folder: Path) -> None:
    """Remove a folder with all that it holds.

    It is moved away first. A user that had opened it may write there while it is deleted, so a rest may stay.
    """
    aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.wiped", dir=folder.parent))
    folder.rename(aside / "folder")
    shutil.rmtree(aside, ignore_errors=True)


def block(folder: Path) -> None:
    """Remove a folder, and put a file in its place, so that it cannot be made again."""
    while True:
        wipe(folder)
        try:
            folder.write_text("no folder")
            return
        except IsADirectoryError:  # a user made it again meanwhile
            continue
