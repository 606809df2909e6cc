"""Describe this installation and this machine for a bug report.

* Nothing here raises for a fact that cannot be found: the report says so in its place.
* No secret is in the report: a variable that may hold one is shown as set, never with its value. The part of a URL that
  names a user is replaced, and so is a query of unknown parameters.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from topotrain.comm.security.secret import FILE_VARIABLE, VARIABLE
from topotrain.comm.store.store_url import QUERY
from topotrain.config.plain_text import printable
from topotrain.parallel.estimate.memory_check import memory_limits

LIBRARIES = (
    *("numpy", "protobuf", "rich", "typer", "safetensors"),
    *("matplotlib", "pyyaml", "redis", "cryptography", "submitit", "accelerate", "transformers"),
    *("pytorch-lightning", "ray", "scikit-learn"),
    *("prometheus-client", "tensorboard", "plotly"),
)
"""The packages that topotrain uses besides torch; all behind the first line are optional."""
SHARED_MEMORY = Path("/dev/shm")
UNKNOWN = "unknown"
MISSING = "not installed"
_PACKAGE = Path(__file__).parents[2]
_GIT_S = 10.0
_GB = 1e9


def environment_report(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the report as plain data, by section."""
    return {
        "topotrain": {"version": own_version(), "commit": commit(_PACKAGE.parent), "folder": str(_PACKAGE)},
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
        },
        "torch": torch_facts(),
        "libraries": {name: installed(name) for name in LIBRARIES},
        "system": _system(),
        "cpu": {"model": processor_name(), "count": os.cpu_count(), "usable": len(os.sched_getaffinity(0))},
        "memory": _memory(),
        "variables": shown_variables(environ),
    }


def own_version() -> str:
    # Not from the package's metadata, which may belong to another installation than this checkout.
    return str(getattr(sys.modules[_PACKAGE.name], "__version__", UNKNOWN))


def commit(folder: Path) -> str | None:
    """Return the commit of a checkout, with a mark for changed files; None elsewhere."""
    # A worktree has a file of this name. Without either, a repository further up is not of this package.
    if not (folder / ".git").exists():
        return None
    found = _git(folder, "rev-parse", "HEAD")
    if found is None:
        return UNKNOWN
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return found + (" with changes" if changes else "")


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def torch_facts() -> dict[str, Any]:
    """Return the version of torch, how it was built, and its GPUs."""
    try:
        import torch
    # A library that torch needs may be missing, and that is what a report should say.
    except (ImportError, OSError) as error:
        return {"version": installed("torch"), "error": f"cannot be imported: {error}"}
    text = torch.__config__.show()
    found = re.search(r"BLAS_INFO=(\w+)", text)
    return {
        "version": str(torch.__version__),
        "built_for": _built_for(torch.version.cuda, torch.version.hip),
        "blas": found[1] if found else UNKNOWN,
        "cpu_instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "collectives": [name for name in ("gloo", "nccl", "mpi") if re.search(rf"USE_{name.upper()}=(ON|1)", text)],
        "gpus": _gpus(torch.cuda),
    }


def _built_for(cuda: str | None, hip: str | None) -> str:
    if cuda:
        return f"CUDA {cuda}"
    return f"ROCm {hip}" if hip else "CPU only"


def _gpus(cuda: Any) -> list[dict[str, Any]]:
    try:
        known = [cuda.get_device_properties(number) for number in range(cuda.device_count())]
    except (RuntimeError, AssertionError) as error:  # a driver that does not fit, or a busy GPU
        return [{"error": str(error).splitlines()[0]}]
    return [
        {"name": one.name, "memory_bytes": one.total_memory, "capability": f"{one.major}.{one.minor}"} for one in known
    ]


def _system() -> dict[str, Any]:
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", UNKNOWN)
    except OSError:
        name = platform.system()
    libc = " ".join(platform.libc_ver()).strip()
    return {"name": name, "kernel": platform.release(), "machine": platform.machine(), "libc": libc or UNKNOWN}


def processor_name() -> str:
    # Some architectures have no such line.
    found = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or UNKNOWN


def _memory() -> dict[str, Any]:
    sizes = {
        name: 1024 * int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB", _text(Path("/proc/meminfo")), re.M)
    }
    limits = memory_limits()
    return {
        "total_bytes": sizes.get("MemTotal"),
        "available_bytes": sizes.get("MemAvailable"),
        "limit_of_a_process_bytes": limits.data if limits.addresses is None else limits.addresses,
        "usable_for_a_job_bytes": limits.machine,
        "shared_memory": shared_memory(),
    }


def shared_memory(folder: Path = SHARED_MEMORY) -> dict[str, int] | None:
    """Return the size of the file system of shared memory, or None without one."""
    try:
        found = shutil.disk_usage(folder)
    except OSError:
        return None
    return {"size_bytes": found.total, "free_bytes": found.free}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _git(folder: Path, *words: str) -> str | None:
    try:
        command = ["git", "-C", str(folder), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# ---- text ------------------------------------------------------------------------------------------------------------


def report_text(report: Mapping[str, Any]) -> str:
    rows = list(_rows(report))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {printable(value)}" for name, value in rows)


def _rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    own, python, torch, system = (report[name] for name in ("topotrain", "python", "torch", "system"))
    yield "topotrain", own["version"] + (f", commit {own['commit']}" if own["commit"] else "")
    yield "folder", own["folder"]
    yield "Python", f"{python['version']} ({python['implementation']}), {python['executable']}"
    yield from _torch_rows(torch)
    for name, version in report["libraries"].items():
        yield name, version or MISSING
    yield "system", f"{system['name']}, kernel {system['kernel']}, {system['machine']}, {system['libc']}"
    cpu, memory = report["cpu"], report["memory"]
    yield "CPU", f"{cpu['model']}, {cpu['count']} processors, {cpu['usable']} usable here"
    yield "memory", f"{_gb(memory['total_bytes'])}, {_gb(memory['available_bytes'])} available"
    shm = memory["shared_memory"]
    yield str(SHARED_MEMORY), f"{_gb(shm['size_bytes'])}, {_gb(shm['free_bytes'])} free" if shm else "does not exist"
    yield from report["variables"].items()


def _torch_rows(torch: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "error" in torch:
        yield "torch", f"{torch['version'] or MISSING}: {torch['error']}"
        return
    yield "torch", f"{torch['version']}, built for {torch['built_for']}, BLAS {torch['blas']}"
    threads = f"{torch['threads']} threads, {torch['interop_threads']} between operations"
    yield "torch computes with", f"{threads}, {torch['cpu_instructions']}"
    yield "torch collectives", ", ".join(torch["collectives"]) or "none"
    if not torch["gpus"]:
        yield "GPUs", "none that torch sees"
    for number, one in enumerate(torch["gpus"]):
        known = f"{one['name']}, {_gb(one['memory_bytes'])}, capability {one['capability']}" if "name" in one else ""
        yield f"GPU {number}", known or f"cannot be used: {one['error']}"


def _gb(size: int | None) -> str:
    return UNKNOWN if size is None else f"{size / _GB:,.1f} GB"


SET, NOT_SET = "set", "not set"
_PREFIXES = ("TOPOTRAIN_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "TORCH", "PYTORCH_", "NCCL_", "GLOO_")
_NAMES = frozenset(
    [
        *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
        *("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
        *("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_CPUS_PER_TASK"),
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "JOB_COMPLETION_INDEX"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHASHSEED", "PYTHONPATH", "TMPDIR", "VIRTUAL_ENV", "CONDA_PREFIX"),
    ]
)
# By name, because a library may read its own secrets from a variable with one of the prefixes.
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|KEY", re.IGNORECASE)
_HIDDEN = "(hidden)"
_KNOWN_QUERY = frozenset().union(*QUERY.values(), {"job"})


def shown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to show, by name; the job's secret is always listed."""
    relevant = (name for name in environ if name in _NAMES or name.startswith(_PREFIXES))
    found = {name: _shown(name, environ[name]) for name in relevant}
    return dict(sorted({VARIABLE: NOT_SET, **found}.items()))


def _shown(name: str, value: str) -> str:
    # The file variable holds a path, which is no secret; a path that is a URL is cleaned as any other value.
    if name != FILE_VARIABLE and _SECRET.search(name):
        return SET if value else NOT_SET
    return without_user(value)


def without_user(text: str) -> str:
    """Return a value without the user, the password and unknown parameters of a URL."""
    # The last @, and not the first: a password may contain one.
    before, at, rest = text.rpartition("@")
    if at:
        scheme, found, _ = before.partition("://")
        text = f"{scheme}://(user is {SET})@{rest}" if found else f"{_HIDDEN}@{rest}"
    address, mark, query = text.partition("?")
    if not mark or "://" not in address:
        return text
    known = all(name in _KNOWN_QUERY for name, _ in parse_qsl(query, keep_blank_values=True))
    return text if known else f"{address}?{_HIDDEN}"
