"""Acts of the page: requests to the running job, as the commands send them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topotrain.comm.store import StoreError
from topotrain.config.job import ConfigError
from topotrain.launch.job_requests import JobRequest
from topotrain.launch.recovery.recovery_actions import (
    JOIN,
    LEAVE,
    SNAPSHOT,
    STOP,
    GroupRequest,
    ResizeRequest,
    StopJob,
    TakeSnapshot,
)
from topotrain.launch.store_requests import ask_anywhere

ACTS = (SNAPSHOT, LEAVE, JOIN, STOP)


@dataclass(frozen=True, slots=True)
class PageAct:
    """One request to the job of a workspace.

    environ: has the secret of the job's store, where the job runs elsewhere.
    """

    workspace: Path
    wish: JobRequest
    environ: Mapping[str, str]

    def carry_out(self) -> dict[str, str]:
        """Send the request and wait for its answer: {"done": text} or {"error": text}."""
        try:
            return {"done": str(ask_anywhere(self.workspace, self.wish, self.environ)["text"])}
        except (ConfigError, StoreError, OSError) as error:
            return {"error": str(error)}


def wish_of(data: Any) -> JobRequest:
    """Return the request that a page has sent. Raises ValueError with one line."""
    if not isinstance(data, dict):
        raise ValueError('an act is an object such as {"act": "snapshot"}')
    act = data.get("act")
    if act not in ACTS:
        raise ValueError(f"act: must be one of {', '.join(ACTS)}")
    if act == SNAPSHOT:
        return TakeSnapshot()
    if act == STOP:
        return StopJob()
    if "group" in data:
        return GroupRequest(act, _number(data, "group"))
    return ResizeRequest(act, _number(data, "workers") if "workers" in data else 1)


def _number(data: dict[str, Any], name: str) -> int:
    value = data[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise ValueError(f"{name}: must be a number from 0")
    return value
