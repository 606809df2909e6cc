"""Check folders before a job: writable, not in use, enough space, the same clock.

A check leaves no file and makes no folder: a folder that is missing is checked at its nearest parent.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from topotrain.launch.agent.file_locks import LockTaken, locked
from topotrain.tools.diagnostics.finding import Finding, failed, ok, warning

LITTLE_BYTES = 1_000_000_000
"""Free space below which a warning comes: a snapshot and the final parameters of a small model."""
CLOCK_S = 2.0
"""Seconds that the clock of a file system may differ from that of this machine."""
_OF_ONE_HOST = frozenset(["btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"])
_TICK_S = 0.05  # the kernel stamps files with a clock of coarse steps


def workspace_findings(workspace: Path) -> Iterator[Finding]:
    folder = nearest(workspace)
    try:
        difference = clock_difference(folder)
    except OSError as error:
        advice = "choose another cluster.workspace, or change the mode of this folder"
        yield failed("workspace", f"{folder} cannot be written ({error.strerror})", advice)
        return
    taken = _in_use(workspace)
    made = "can be written" if folder == workspace.absolute() else f"can be made in {folder}"
    yield failed("workspace", str(workspace), taken) if taken else ok("workspace", f"{workspace} {made}")
    yield space_finding(folder, shutil.disk_usage(folder).free)
    yield clock_finding("clock", folder, difference)


def nearest(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    path = path.absolute()
    # Not `Path.exists`, which raises for a folder that this user may not enter.
    return next(one for one in (path, *path.parents) if os.path.exists(one))


def clock_difference(folder: Path) -> float:
    """Return by how many seconds a new file's time is ahead of this machine's.

    0 within the steps of the clock. Raises OSError where no file can be written.
    """
    before = time.time()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".topotrain-doctor-") as file:
        file.write(b"1")
        file.flush()
        stamped, after = os.fstat(file.fileno()).st_mtime, time.time()
    if before - _TICK_S <= stamped <= after + _TICK_S:
        return 0.0
    return stamped - (before if stamped < before else after)


def clock_finding(name: str, folder: Path, difference: float) -> Finding:
    if abs(difference) <= CLOCK_S:
        return ok(name, f"files in {folder} have this machine's time")
    order = "ahead of" if difference > 0 else "behind"
    text = f"files in {folder} are {abs(difference):.1f} s {order} this machine's clock"
    return warning(name, text, "set the clocks by NTP; else the list of jobs and the logs have wrong times")


def space_finding(folder: Path, free: int) -> Finding:
    text = f"{free / 1e9:,.1f} GB are free in {folder}"
    if free >= LITTLE_BYTES:
        return ok("free space", text)
    advice = "the final parameters and up to three snapshots must fit; free some, or choose another cluster.workspace"
    return warning("free space", text, advice)


def sharing_finding(folder: Path, mounts: Path = Path("/proc/mounts")) -> Finding:
    """Return the finding about the folder that several hosts need as one."""
    longest, kind = 0, "an unknown file system"
    for _, mounted, named, *_ in map(str.split, mounts.read_text().splitlines()):
        # A later mount at the same place hides the earlier one.
        if folder.is_relative_to(mounted) and len(mounted) >= longest:
            longest, kind = len(mounted), named
    if kind not in _OF_ONE_HOST:
        return ok("shared folder", f"{folder} is on {kind}")
    advice = "use a folder that all hosts see; else the job cannot go on from its snapshots"
    return warning("shared folder", f"{folder} is on {kind}, of this machine alone", advice)


def _in_use(workspace: Path) -> str:
    """Return why another job excludes this one, or ""."""
    lock = workspace / "lock"
    # Opening it would make it.
    if not lock.is_file():
        return ""
    try:
        with locked(lock, fcntl.LOCK_EX):
            return ""
    except LockTaken as taken:
        return str(taken)
    except OSError as error:
        return f"{lock} cannot be locked ({error.strerror})"
