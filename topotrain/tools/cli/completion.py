"""Words that a shell offers for the arguments of `topotrain`."""

import os
from pathlib import Path

JOB_ENDINGS = (".conf", ".yaml", ".yml")


def job_files(incomplete: str) -> list[str]:
    """Return the job files and folders that begin with a path."""
    return _paths(incomplete, JOB_ENDINGS)


def job_files_and_scripts(incomplete: str) -> list[str]:
    """Return the job files, scripts and folders that begin with a path."""
    return _paths(incomplete, (*JOB_ENDINGS, ".py"))


def _paths(incomplete: str, endings: tuple[str, ...]) -> list[str]:
    begun = incomplete.rpartition("/")[2]
    shown = incomplete.removesuffix(begun)
    try:
        with os.scandir(shown or ".") as entries:
            found = sorted(
                f"{shown}{entry.name}{'/' * entry.is_dir()}"
                for entry in entries
                if entry.name.startswith(begun)
                and (begun.startswith(".") or not entry.name.startswith("."))
                and (entry.is_dir() or Path(entry.name).suffix in endings)
            )
    except OSError:
        return []
    # The shell would end the word after a single folder.
    return _paths(found[0], endings) if len(found) == 1 and found[0].endswith("/") else found
