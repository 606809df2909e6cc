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
        """As the record describes them."""
        kinds = dict.fromkeys(self.names)
        words = [f"{self.names.count(kind)} × {kind} ({self.gibibytes:.0f} GiB)" for kind in kinds]
        return ", ".join([*words, f"CUDA {self.cuda}", f"NCCL {self.nccl or 'not there'}"]) if words else "no GPU"


def gpus_here() -> Gpus:
    """Those of the machine that this process runs on."""
    import torch
    from torch import distributed
    from torch.cuda import nccl

    if not torch.cuda.is_available():
        return Gpus(reason=f"torch {torch.__version__} sees no NVIDIA GPU on this machine")
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    for number in range(len(found)):
        torch.ones(8, device=torch.device("cuda", number)).sum().item()  # a GPU that is listed may still not compute
    version = ".".join(map(str, nccl.version())) if distributed.is_nccl_available() else ""  # type: ignore[no-untyped-call]
    least = min(one.total_memory for one in found) / 2**30
    return Gpus(tuple(one.name for one in found), least, torch.version.cuda or "", version)


def probe(limit_s: float = LIMIT_S, command: tuple[str, ...] = (sys.executable, "-m", "benchmarks.gpus")) -> Gpus:
    """As `gpus_here`, from another process. What goes wrong there is the reason that is returned."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.strip()]
        return Gpus(reason=lines[-1] if lines else f"asking for GPUs ended with exit code {error.returncode}")
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return Gpus(reason=f"the GPUs could not be asked: {error}")
    return Gpus(**{**found, "names": tuple(found["names"])})


if __name__ == "__main__":
    print(json.dumps(asdict(gpus_here())))
