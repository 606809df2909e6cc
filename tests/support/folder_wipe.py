"""A folder that is gone at one moment, whatever its users write into it meanwhile."""

import shutil
from pathlib import Path


def wipe(folder: Path) -> None:
    """Remove it with all that it holds."""
    gone = folder.with_name(f"{folder.name}.gone")
    folder.rename(gone)
    shutil.rmtree(gone)
