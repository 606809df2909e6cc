"""The servers next to a worker that was started by hand, in their own process.

This process ends with the worker's process, which holds the other end of its stdin.
"""

import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from topotrain.comm.store import StoreError, open_store
from topotrain.comm.store.discovery.static_addresses import StaticStore
from topotrain.comm.transport import TransportError
from topotrain.config import job_file
from topotrain.config.job import ConfigError
from topotrain.config.topology import Address, Role
from topotrain.core.client.client import JobError
from topotrain.launch import import_from_working_folder
from topotrain.launch.by_hand.manual_server import SharedSettings, serve, tell

_LOOK_S = 1.0


def main(_: Sequence[str]) -> int:
    """Read the servers' settings from stdin, and run them. Returns the exit code."""
    import_from_working_folder()
    # Ctrl-C on the terminal is for the worker, which ends this process when it has sent its reason.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Before stdin is read: the worker may have died in between, and then the parent is another process.
    worker = os.getppid()
    spec = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_worker, args=(worker,), name="worker's end", daemon=True).start()
    try:
        _serve(spec)
    except (JobError, ConfigError, StoreError, TransportError) as error:
        tell(f"error: {error}")
        return 1
    return 0


def _serve(spec: dict[str, Any]) -> None:
    secret = bytes.fromhex(spec["secret"])
    at = spec["store"]
    store = open_store(at, secret) if isinstance(at, str) else StaticStore(at["addresses"], at["shards"])
    servers = [Address(Role.SERVER, group, index) for group, index in spec["servers"]]
    words, compare, patience_s = spec["terms"]
    job = job_file.loads(spec["job"], "the job")
    module, _, function = spec["name"].partition(":")
    name = getattr(importlib.import_module(module), function)
    serve(job, servers, store, secret, spec["host"], terms=SharedSettings(words, compare, patience_s, name))


def _end_with_worker(worker: int) -> None:
    """End with the worker's process: at the end of stdin, or with a new parent."""
    gone = threading.Event()

    def read() -> None:
        sys.stdin.read()
        gone.set()

    threading.Thread(target=read, name="stdin", daemon=True).start()
    # Both: processes that the script has forked may hold the pipe open after the worker has ended.
    while not gone.wait(_LOOK_S):
        if os.getppid() != worker:
            break
    # Not `sys.exit`: the servers' threads wait for workers that will not come.
    os._exit(1)
