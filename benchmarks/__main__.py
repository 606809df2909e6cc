"""Several tables in turn, each in a process of its own: `python -m benchmarks [TABLE ...]`."""

import argparse
import subprocess
import sys

from benchmarks.record import ROOT, environment, say

USUAL = ("starts", "memory", "compression", "splitting", "downpour", "straggler", "slow_link", "training_step")
"""The tables that are measured without a name: some 20 minutes on 2 cores."""
TABLES = (
    *USUAL,
    "collectives",
    "two_hosts",
    "two_slow_hosts",
    "survivors",
    "asynchrony",
    "islands",
    "predictions",
    "gpu_training",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure topotrain beside its peers.")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}; without: the first eight")
    names = parser.parse_args().tables or USUAL
    if unknown := [name for name in names if name not in TABLES]:
        parser.error(f"{unknown[0]}: must be one of {', '.join(TABLES)}")
    failed = []
    for number, name in enumerate(names, 1):
        say(f"[{number}/{len(names)}] {name}")
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        if subprocess.run(command, cwd=ROOT, env=environment(), check=False).returncode:
            failed.append(name)
    raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
