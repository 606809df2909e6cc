"""Select the environment variables that a bug report shows, without secrets.

* A variable that may hold a secret is shown as set, never with its value.
* The part of a URL that names a user is replaced, and so is a query of unknown parameters.
"""

import re
from collections.abc import Mapping
from urllib.parse import parse_qsl

from topotrain.comm.security.secret import FILE_VARIABLE, VARIABLE
from topotrain.comm.store.store_url import QUERY

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
