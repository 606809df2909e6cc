"""Kubernetes manifests of a job as data: a TrainJob of Kubeflow, or a JobSet.

A TrainJob (Kubeflow Trainer v2) comes with its own TrainingRuntime. This module is pure. There is one indexed Job per
role, in which a pod is a unit. A failed pod fails its Job, and so the whole JobSet.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from topotrain.config.topology import Topology, Unit

TRAINER_API, JOBSET_API = "trainer.kubeflow.org/v1alpha1", "jobset.x-k8s.io/v1alpha2"
MAIN, SERVERS = "node", "servers"
"""The names of the two Jobs. The first contains unit 0; Kubeflow requires that name for its container, too."""
CONF_FOLDER, CONF_FILE = "/etc/topotrain", "job.conf"
MEETING_S = 1800
"""Seconds until the last pod has started: images may have to be pulled."""
_SETUP_CODE = 2
Data = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ManifestConfig:
    """The settings of a job's manifests.

    conf: the text of the job file.
    rendezvous: the store's URL. "": it has a password, which is in the Secret instead.
    secrets: the values of the Secret to write. None: it is created separately.
    cpu, memory: quantities for each pod; "": as many CPUs as it has processes, and no memory limit.
    volumes: the PersistentVolumeClaim of each path.
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
    volumes: Mapping[str, str] = field(default_factory=dict)

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
            "spec": _jobset_spec(order),
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
        "command": [order.python, "-m", "topotrain", "unit", f"{CONF_FOLDER}/{CONF_FILE}"],
        "env": _variables(order, units[0].rank),
        "resources": _resources(order, units),
        "volumeMounts": [
            {"name": "conf", "mountPath": CONF_FOLDER, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            *({"name": volume, "mountPath": path} for volume, path, _ in claims),
        ],
    }
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [
            {"name": "conf", "configMap": {"name": f"{order.name}-conf"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # a pod has 64 MB otherwise
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
    processes = max(len(unit.workers) + bool(unit.servers) for unit in units)
    # A CPU for each process of the largest unit: all pods of a Job are alike.
    requests = {"cpu": order.cpu or str(processes)}
    limits: dict[str, str] = {}
    if order.memory:
        requests["memory"] = limits["memory"] = order.memory
    if order.gpu and any(unit.workers for unit in units):
        limits["nvidia.com/gpu"] = order.gpu
    return {"requests": requests, **({"limits": limits} if limits else {})}
