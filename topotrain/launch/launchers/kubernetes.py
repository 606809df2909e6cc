"""Kubernetes: manifests for a job, written to a file or to stdout.

Nothing is submitted: `kubectl apply -f` does that. The manifests contain no secret unless --with-secret is given. The
program must be in the image.
"""

import os
import re
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from topotrain.comm.store.store_url import parse
from topotrain.config import job_file
from topotrain.config.job import ConfigError, Job
from topotrain.launch.launchers import kubernetes_manifests
from topotrain.launch.launchers.kubernetes_manifests import Data, ManifestConfig
from topotrain.launch.launchers.submission import LaunchOptions, LaunchResult, Submission, without_password

INSTALL = "pip install 'topotrain[yaml]'"
FORMATS: Mapping[str, Callable[[ManifestConfig], list[Data]]] = MappingProxyType(
    {"trainjob": kubernetes_manifests.trainjob, "jobset": kubernetes_manifests.jobset}
)
PORT, DOMAIN, NAMESPACE, PYTHON = 29400, "cluster.local", "default", "python"
_LEAST_MEMORY = 256 << 20
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
_PASSED: Mapping[str, tuple[str, re.Pattern[str]]] = MappingProxyType(
    {
        "cpu": ("cpu=4", _QUANTITY),
        "memory": ("memory=8Gi", _QUANTITY),
        "shm": ("shm=1Gi", _QUANTITY),
        "gpu": ("gpu=1", re.compile(r"[0-9]+")),
        "user": ("user=1000", re.compile(r"[1-9][0-9]{0,8}")),
        "ttl": ("ttl=86400", re.compile(r"[0-9]{1,9}")),
        "python": ("python=/opt/venv/bin/python", re.compile(r".+")),
        "domain": ("domain=cluster.local", re.compile(r"[a-z0-9.-]+")),
        "port": ("port=29400", re.compile(r"[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}")),
        "volume": ("volume=CLAIM:/path", re.compile(r"[a-z0-9.-]+:/.+")),
    }
)


def completed(job: Job, options: LaunchOptions) -> LaunchOptions:
    """Return the options with defaults for the job's name and its store."""
    base = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")[:30]
    # The name of a Kubernetes object begins with a letter.
    base = base if _LABEL.fullmatch(base) else "job"
    wanted = options.rendezvous or job.rendezvous
    if wanted:
        given = re.search(r"[?&]job=([^&]+)", wanted)
        return options if options.id or given else replace(options, id=f"{base}-{secrets.token_hex(4)}")
    name = options.id or f"{base}-{secrets.token_hex(4)}"
    words = passed(options.extra)
    # By default unit 0 serves the store, in the pod with this name.
    host = kubernetes_manifests.address(name, options.namespace or NAMESPACE, words.get("domain", DOMAIN))
    return replace(options, id=name, rendezvous=f"tcp://{host}:{words.get('port', PORT)}")


def passed(extra: Sequence[str]) -> dict[str, str]:
    """Return the values of --pass, all volumes as lines of one. Raises ConfigError."""
    found: dict[str, str] = {}
    for word in extra:
        name, _, value = word.partition("=")
        if name not in _PASSED or not _PASSED[name][1].fullmatch(value):
            examples = ", ".join(example for example, _ in _PASSED.values())
            raise ConfigError("--pass", word, f"must be such as {examples}")
        found[name] = f"{found[name]}\n{value}" if name == "volume" and name in found else value
    return found


def order(at: Submission) -> ManifestConfig:
    """Return the settings of the manifests. Raises ConfigError or StoreError."""
    options = at.options
    if not options.image:
        raise ConfigError("--image", "", "must be given: a container with Python, topotrain[tls] and the program in it")
    if options.format and options.format not in FORMATS:
        raise ConfigError("--format", options.format, "must be one of: " + ", ".join(FORMATS))
    namespace = options.namespace or NAMESPACE
    most = 63 - len(f"-{kubernetes_manifests.SERVERS}-0-{at.units}-xxxxx")  # the suffix in the name of a pod
    for option, name, longest in (("--id", at.id, most), ("--namespace", namespace, 63)):
        if not _LABEL.fullmatch(name) or len(name) > longest:
            raise ConfigError(option, name, f"must be at most {longest} of a-z, 0-9 and -, beginning with a letter")
    words = passed(options.extra)
    _check_sizes(words, options.format)
    parse(at.rendezvous)
    open_url = without_password(at.rendezvous) == at.rendezvous
    volumes = [volume.partition(":") for volume in words.get("volume", "").splitlines()]
    return ManifestConfig(
        at.id,
        namespace,
        options.image,
        words.get("python", PYTHON),
        # The ConfigMap takes the place of the folder that other launchers write.
        job_file.dumps(replace(at.job, rendezvous="")),  # each pod has it in a variable, possibly with a password
        at.rendezvous if open_url else "",
        at.topology,
        _secrets(at, open_url) if options.with_secret else None,
        options.max_restarts,
        words.get("cpu", ""),
        words.get("memory", ""),
        words.get("gpu", ""),
        words.get("shm", ""),
        {path: claim for claim, _, path in volumes},
        int(words.get("user", kubernetes_manifests.USER)),
        int(words.get("ttl", kubernetes_manifests.TTL_S)),
        options.unit_words,
    )


def _check_sizes(words: Mapping[str, str], form: str) -> None:
    """Raise ConfigError for sizes or a ttl that cannot be used."""
    memory, shm = (kubernetes_manifests.size(words.get(name, "0")) for name in ("memory", "shm"))
    if "memory" in words and memory < _LEAST_MEMORY:
        raise ConfigError(
            "--pass", f"memory={words['memory']}", "must be at least 256Mi: Python and torch need that much"
        )
    if "memory" in words and shm >= memory:
        accepted = f"must be less than memory={words['memory']}, of which /dev/shm is a part"
        raise ConfigError("--pass", f"shm={words['shm']}", accepted)
    if "ttl" in words and form != "jobset":
        accepted = "is for --format jobset: a TrainJob has no such field, and a JobSet that it has lost is made again"
        raise ConfigError("--pass", f"ttl={words['ttl']}", accepted)


def _secrets(at: Submission, open_url: bool) -> dict[str, str]:
    from topotrain.comm.security.secret import load_secret

    token = load_secret(os.environ).hex()
    return {"token": token, **({} if open_url else {"rendezvous": at.rendezvous})}


def command(at: Submission) -> str:
    """Return the manifests, after comments about the remaining steps."""
    made = order(at)
    return _head(made) + _yaml(FORMATS[at.options.format or "trainjob"](made))


def start(at: Submission) -> LaunchResult:
    """Write the manifests. Raises ConfigError."""
    text, file = command(at), at.options.output
    if not file:
        return LaunchResult(0, text=text)
    try:
        mode = 0o600 if at.options.with_secret else 0o644
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as out:
            if at.options.with_secret:  # the file may have existed with another mode
                os.fchmod(out.fileno(), mode)
            out.write(text)
    except OSError as error:
        raise ConfigError("--output", file, f"must be a file that can be written ({error.strerror})") from None
    return LaunchResult(0, {"output": str(Path(file).absolute())}, f"kubectl apply -f {shlex.quote(file)}\n")


def _head(made: ManifestConfig) -> str:
    """Return comments: how to create the Secret, and where the results are."""
    lines = ["kubectl apply -f THIS-FILE"]
    if made.secrets is None:
        keys = "--from-file=token=/dev/stdin"
        keys += "" if made.rendezvous else " --from-literal=rendezvous=URL-WITH-PASSWORD"
        lines = [
            f"First, once, create the Secret {made.secret} without writing it to a file:",
            "  python -c 'import secrets; print(secrets.token_hex(32), end=\"\")' |",
            f"    kubectl -n {made.namespace} create secret generic {made.secret} {keys}",
            "Then:",
            f"  {lines[0]}",
        ]
    if not made.volumes:
        lines += [
            "The workspace is inside the pods and is lost with them: --pass=volume=CLAIM:/path keeps files below /path."
        ]
    return "".join(f"# {line}\n" for line in lines)


def _yaml(documents: list[Data]) -> str:
    try:
        import yaml
    except ImportError:
        raise ConfigError("launcher", "kubernetes", f"writes YAML, and pyyaml is not installed: {INSTALL}") from None

    class Dumper(yaml.SafeDumper):
        """Indents lists, and writes texts of several lines as block scalars."""

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
            return super().increase_indent(flow, False)

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    whole: str = yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=1000)
    return whole
