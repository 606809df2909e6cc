"""Kubernetes manifests of a job as data: a TrainJob of Kubeflow, or a JobSet.

A TrainJob (Kubeflow Trainer v2) comes with its own TrainingRuntime. This module is pure. There is one indexed Job per
role, in which a pod is a unit. A failed pod fails its Job, and so the whole JobSet.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from topotrain.config.topology import Topology, Unit

TRAINER_API, JOBSET_API = "trainer.kubeflow.org/v1alpha1", "jobset.x-k8s.io/v1alpha2"
MAIN, SERVERS = "node", "servers"
"""The names of the two Jobs. The first contains unit 0; Kubeflow requires that name for its container, too."""
CONF_FOLDER, CONF_FILE = "/etc/topotrain", "job.conf"
MEETING_S = 1800
"""Seconds until the last pod has started: images may have to be pulled."""
PROCESS_BYTES, LOADER_BYTES, LEAST_SHM_BYTES = 4 << 30, 512 << 20, 64 << 20
"""The default memory of a process, the default /dev/shm for each worker, and the least /dev/shm."""
TTL_S = 7 * 24 * 3600
"""Seconds for which a JobSet that has ended is kept, with the logs of its pods."""
USER = 1000
_SETUP_CODE = 2
_UNITS: Mapping[str, float] = MappingProxyType(
    {"m": 1e-3, "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
    | {unit: 1 << shift for unit, shift in (("Ki", 10), ("Mi", 20), ("Gi", 30), ("Ti", 40))}
)
Data = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ManifestConfig:
    """The settings of a job's manifests.

    conf: the text of the job file.
    rendezvous: the store's URL. "": it has a password, which is in the Secret instead.
    secrets: the values of the Secret to write. None: it is created separately.
    cpu, memory, shm: quantities for each pod; "": by its processes. /dev/shm is a part of the memory.
    volumes: the PersistentVolumeClaim of each path. user: the user ID of all processes, and the group of the volumes.
    ttl_s: seconds for which a JobSet that has ended is kept.
    unit_words: options for `topotrain unit`.
    """

    name: str
    namespace: str
    image: str
    python: str
    conf: str
    rendezvous: str
    topology: Topology
    secrets: Mapping[str, str] | None = field(default=None, repr=False)
    max_restarts: int = 0
    cpu: str = ""
    memory: str = ""
    gpu: str = ""
    shm: str = ""
    volumes: Mapping[str, str] = field(default_factory=dict)
    user: int = USER
    ttl_s: int = TTL_S
    unit_words: tuple[str, ...] = ()

    @property
    def secret(self) -> str:
        """The name of the Secret."""
        return f"{self.name}-secret"


def trainjob(order: ManifestConfig) -> list[Data]:
    """Return a TrainJob, its TrainingRuntime, and the objects that both need."""
    main = roles(order.topology)[0][1]
    runtime = {
        "apiVersion": TRAINER_API,
        "kind": "TrainingRuntime",
        "metadata": {**_metadata(order, order.name), "labels": {"trainer.kubeflow.org/framework": "topotrain"}},
        "spec": {"mlPolicy": {"numNodes": len(main)}, "template": {"spec": _jobset_spec(order)}},
    }
    asked = {
        "apiVersion": TRAINER_API,
        "kind": "TrainJob",
        "metadata": _metadata(order, order.name),
        "spec": {
            "runtimeRef": {"apiGroup": TRAINER_API.partition("/")[0], "kind": runtime["kind"], "name": order.name}
        },
    }
    return [*_needed(order), runtime, asked]


def jobset(order: ManifestConfig) -> list[Data]:
    """Return a JobSet and the objects that it needs."""
    return [
        *_needed(order),
        {
            "apiVersion": JOBSET_API,
            "kind": "JobSet",
            "metadata": _metadata(order, order.name),
            # Not in a TrainJob: its controller would make the JobSet again that has been deleted by its age.
            "spec": {**_jobset_spec(order), "ttlSecondsAfterFinished": order.ttl_s},
        },
    ]


def roles(topology: Topology) -> list[tuple[str, tuple[Unit, ...]]]:
    """Return the units of each Job: workers, then servers in units of their own."""
    if not topology.cluster.server_worker_separate:
        return [(MAIN, topology.units)]
    working = tuple(unit for unit in topology.units if unit.workers)
    # Ranks must be consecutive in each Job: the layout has the units of servers last.
    serving = topology.units[len(working) :]
    return [(MAIN, working), *([(SERVERS, serving)] if serving else [])]


def size(quantity: str) -> float:
    """Return the number of a quantity such as 512Mi."""
    number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", quantity).groups()  # type: ignore[union-attr]
    return float(number) * _UNITS[unit]


def address(name: str, namespace: str, domain: str) -> str:
    """Return the DNS name of the pod of unit 0."""
    # Its own hosts file has the name before the cluster's DNS does.
    return f"{name}-{MAIN}-0-0.{name}.{namespace}.svc.{domain}"


def _needed(order: ManifestConfig) -> list[Data]:
    conf = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(order, f"{order.name}-conf"),
        "data": {CONF_FILE: order.conf},
    }
    if order.secrets is None:
        return [conf]
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(order, order.secret),
        "type": "Opaque",
        "stringData": dict(order.secrets),
    }
    return [secret, conf]


def _metadata(order: ManifestConfig, name: str) -> Data:
    return {"name": name, "namespace": order.namespace}


def _jobset_spec(order: ManifestConfig) -> Data:
    """Return the JobSet's spec: all pods restart together, or none does."""
    policy: Data = {"maxRestarts": order.max_restarts}
    if order.max_restarts:
        # A wrong configuration would only repeat itself.
        policy["rules"] = [{"name": "badinput", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
    return {
        # Units look for unit 0 before its pod is ready.
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": policy,
        "replicatedJobs": [_replicated(order, name, units) for name, units in roles(order.topology)],
    }


def _replicated(order: ManifestConfig, name: str, units: tuple[Unit, ...]) -> Data:
    spec: Data = {
        "completionMode": "Indexed",
        "completions": len(units),
        "parallelism": len(units),
        # A single pod is not replaced, although a running job could accept a new unit.
        "backoffLimit": 0,
        "template": {"spec": _pod(order, name, units)},
    }
    if order.max_restarts:
        codes = {"containerName": name, "operator": "In", "values": [_SETUP_CODE]}
        spec["podFailurePolicy"] = {"rules": [{"action": "FailJob", "onExitCodes": codes}]}
    template: Data = {"spec": spec}
    if name == MAIN:  # Kubeflow finds the training pods by this label
        template = {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}, **template}
    return {"name": name, "replicas": 1, "template": template}


def _pod(order: ManifestConfig, name: str, units: tuple[Unit, ...]) -> Data:
    claims = [(f"claim-{k}", path, claim) for k, (path, claim) in enumerate(order.volumes.items())]
    container = {
        "name": name,
        "image": order.image,
        "command": [order.python, "-m", "topotrain", "unit", *order.unit_words, f"{CONF_FOLDER}/{CONF_FILE}"],
        "env": _variables(order, units[0].rank),
        "resources": _resources(order, units),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "conf", "mountPath": CONF_FOLDER, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            *({"name": volume, "mountPath": path} for volume, path, _ in claims),
        ],
    }
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {
            # A number: the kubelet cannot know that a user with a name is not root.
            "runAsNonRoot": True,
            "runAsUser": order.user,
            "runAsGroup": order.user,
            "fsGroup": order.user,
            # A large volume is not walked through before each start.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "conf", "configMap": {"name": f"{order.name}-conf"}},
            # A pod has 64 MB otherwise. It is for the loaders of torch: the job's own buffers have no file system.
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _shm(order, units)}},
            *({"name": volume, "persistentVolumeClaim": {"claimName": claim}} for volume, _, claim in claims),
        ],
    }


def _variables(order: ManifestConfig, first: int) -> list[Data]:
    """Return the variables of a unit."""
    where = {"value": order.rendezvous} if order.rendezvous else _from_secret(order, "rendezvous")
    return [
        {"name": "TOPOTRAIN_NPROCS", "value": str(len(order.topology.units))},
        # The indexed Job adds JOB_COMPLETION_INDEX, which counts each role from 0.
        {"name": "TOPOTRAIN_FIRST_RANK", "value": str(first)},
        {"name": "TOPOTRAIN_RENDEZVOUS", **where},
        {"name": "TOPOTRAIN_MEETING_S", "value": str(MEETING_S)},
        {"name": "TOPOTRAIN_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "TOPOTRAIN_TOKEN", **_from_secret(order, "token")},
    ]


def _from_secret(order: ManifestConfig, key: str) -> Data:
    return {"valueFrom": {"secretKeyRef": {"name": order.secret, "key": key}}}


def _resources(order: ManifestConfig, units: tuple[Unit, ...]) -> Data:
    # All pods of a Job are alike, so the largest unit counts. A process computes with one thread.
    count = max(map(_processes, units))
    memory = order.memory or _mebibytes(count * PROCESS_BYTES + size(_shm(order, units)))
    requests = {"cpu": order.cpu or str(count), "memory": memory}
    # Requests and limits are equal, so that a node that is full ends other pods first.
    limits = dict(requests)
    if order.gpu and any(unit.workers for unit in units):
        limits["nvidia.com/gpu"] = order.gpu
    return {"requests": requests, "limits": limits}


def _processes(unit: Unit) -> int:
    return len(unit.workers) + bool(unit.servers)


def _shm(order: ManifestConfig, units: tuple[Unit, ...]) -> str:
    """Return the size of /dev/shm, which counts in the pod's memory."""
    if order.shm:
        return order.shm
    wanted = max(LEAST_SHM_BYTES, LOADER_BYTES * max(len(unit.workers) for unit in units))
    # The processes need memory, too.
    return _mebibytes(min(wanted, size(order.memory) / 4) if order.memory else wanted)


def _mebibytes(nbytes: float) -> str:
    return f"{max(1, int(nbytes) >> 20)}Mi"
