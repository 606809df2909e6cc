"""The GPUs of this machine, asked in a process of their own: a driver that hangs or crashes ends only that one."""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass

from benchmarks.record import ROOT

LIMIT_S = 90.0


@dataclass(frozen=True, slots=True)
class Gpus:
    """The NVIDIA GPUs that torch sees.

    Without one `reason` says why. `gibibytes` is the memory of the smallest. `nccl` is its version, or empty.
    """

    names: tuple[str, ...] = ()
    gibibytes: float = 0.0
    cuda: str = ""
    nccl: str = ""
    reason: str = ""

    @property
    def count(self) -> int:
        return len(self.names)

    def __str__(self) -> str:
        """As a page describes them."""
        kinds = dict.fromkeys(self.names)
        words = [f"{self.names.count(kind)} × {kind} ({self.gibibytes:.0f} GiB)" for kind in kinds]
        return ", ".join([*words, f"CUDA {self.cuda}", f"NCCL {self.nccl or 'not there'}"]) if words else "no GPU"


def gpus_here() -> Gpus:
    """Those of the machine that this process runs on."""
    import torch
    from torch import distributed
    from torch.cuda import nccl

    if not torch.version.cuda:
        return Gpus(reason=f"torch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        return Gpus(cuda=torch.version.cuda, reason="torch sees no NVIDIA GPU on this machine")
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    for number in range(len(found)):
        torch.ones(8, device=torch.device("cuda", number)).sum().item()  # a GPU that is listed may still not compute
    there = distributed.is_nccl_available()
    version = ".".join(map(str, nccl.version())) if there else ""  # type: ignore[no-untyped-call]
    least = min(one.total_memory for one in found) / 2**30
    return Gpus(tuple(one.name for one in found), least, torch.version.cuda, version)


def probe(limit_s: float = LIMIT_S, command: tuple[str, ...] = (sys.executable, "-m", "benchmarks.gpus")) -> Gpus:
    """As `gpus_here`, from another process. What goes wrong there is the reason that is returned."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return Gpus(reason=f"the GPUs did not answer within {limit_s:g} s")
    except OSError as error:
        return Gpus(reason=f"the GPUs could not be asked: {error}")
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        return Gpus(reason=lines[-1] if lines else f"asking for GPUs ended with exit code {done.returncode}")
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return Gpus(reason=f"asking for GPUs answered {done.stdout[-100:]!r}")
    return Gpus(**{**found, "names": tuple(found["names"])})


if __name__ == "__main__":
    print(json.dumps(asdict(gpus_here())))
