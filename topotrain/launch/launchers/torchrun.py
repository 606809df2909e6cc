"""torchrun: runs the units as workers of torch.distributed.run, in the foreground.

torchrun ends all units when one fails. It restarts all units only if asked to (--pass=--max-restarts=1), because it
cannot restart one role alone. On several nodes the same command is run on each; the nodes meet at the first of --hosts.
"""

import os
import runpy
import sys
from collections.abc import Mapping
from urllib.parse import parse_qs, urlsplit

from topotrain.config.job import ConfigError
from topotrain.launch.agent.workspace import JOB_FILE
from topotrain.launch.launchers.foreground_tool import CommandTool
from topotrain.launch.launchers.submission import RENDEZVOUS_VARIABLE, Submission
from topotrain.launch.multinode.node_info import with_job

PORT = 29400


class Torchrun(CommandTool):
    """Starts all units with one torchrun."""

    def words(self, submission: Submission) -> list[str]:
        """Return the command, which is the same on every node. Raises ConfigError."""
        options = submission.options
        nodes = options.nodes or len(options.hosts) or 1
        per_node = submission.per_node(nodes)
        line = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={per_node}"]
        if nodes == 1:
            line += ["--standalone"]
        else:
            line += ["--rdzv-backend=c10d", f"--rdzv-endpoint={_endpoint(submission)}", f"--rdzv-id={submission.id}"]
        # A program between torchrun and the unit: only there is the number of the restart known.
        unit = [sys.executable, "-m", "topotrain.launch.launchers.torchrun"]
        return [*line, *options.extra, "--no-python", *unit, *options.unit_words, str(submission.folder / JOB_FILE)]

    def environ_here(self, submission: Submission, program: str) -> Mapping[str, str] | None:
        """Return the environment of the units of this node."""
        return {**os.environ, **submission.environ}


def _endpoint(submission: Submission) -> str:
    options = submission.options
    if not options.hosts:
        raise ConfigError("--hosts", "", "must begin with the node at which all meet, such as node1 or node1:29400")
    if not options.id:
        raise ConfigError("--id", "", "must be given for several nodes, the same on each")
    first = options.hosts[0]
    # An IPv6 address has colons of its own.
    host = f"[{first}]" if first.count(":") > 1 and not first.startswith("[") else first
    try:
        return host if urlsplit(f"//{host}").port else f"{host}:{PORT}"
    except ValueError:
        raise ConfigError("--hosts", first, "must be a host, such as node1, node1:29400 or [fd00::1]:29400") from None


_TOOL = Torchrun()
command, start = _TOOL.command, _TOOL.start


def rendezvous(environ: Mapping[str, str]) -> str:
    """Return the rendezvous of this attempt. Raises KeyError for a missing variable."""
    url, life = environ[RENDEZVOUS_VARIABLE], environ["TORCHELASTIC_RESTART_COUNT"]
    job = parse_qs(urlsplit(url).query)["job"][0]
    # A restart is a new job under a new name: its units must not read how the first attempt ended.
    return url if life == "0" else with_job(url, f"{job}.life-{life}")


def main(*words: str) -> None:
    """Continue as the unit in this process, which torchrun has started.

    words: of `topotrain unit`.
    """
    os.environ[RENDEZVOUS_VARIABLE] = rendezvous(os.environ)
    sys.argv[:] = ["topotrain", "unit", *words]
    # A new process would load Python, and the modules of this one, once more.
    runpy.run_module("topotrain", run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
