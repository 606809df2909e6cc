"""What Kubernetes is told: checked against the published models, and each pod against what a unit has to know."""

import json
import stat
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from topotrain.comm.store import StoreError
from topotrain.config import job_file
from topotrain.config.job import ConfigError
from topotrain.config.topology import layout
from topotrain.launch.launchers import Launched, kubernetes_manifests, launch
from topotrain.launch.launchers.env_tables import start_of
from topotrain.launch.launchers.submission import LaunchOptions

SECRET = "5e" * 32
APART = "nworkers_per_group: 2 nservers_per_group: 2 server_worker_separate: true"
TOGETHER = "nworkers_per_group: 3 nservers_per_group: 3"
INSIDE = "nworkers_per_group: 4 nworkers_per_procs: 4"
EVERYTHING = ("cpu=2", "memory=8Gi", "gpu=1", "volume=data:/data", "volume=out:/out", "python=/venv/bin/python")
MODELS = {
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "JobSet": "JobsetV1alpha2JobSet",
    "ConfigMap": "IoK8sApiCoreV1ConfigMap",
    "Secret": "IoK8sApiCoreV1Secret",
}


def ask(cluster: str = APART, dry_run: bool = False, image: str = "runner/train:1", **options: Any) -> Launched:
    job = job_file.loads(f'name: "My job" program: "/app/train.py" args: "--lr=0.1" cluster {{ {cluster} }}')
    given = LaunchOptions(image=image, **options)
    return launch("kubernetes", job, layout(job.cluster), given, {}, dry_run)


def documents(text: str) -> dict[str, dict[str, Any]]:
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def jobs_of(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    spec = found["JobSet"]["spec"] if "JobSet" in found else found["TrainingRuntime"]["spec"]["template"]["spec"]
    return spec["replicatedJobs"]


def container_of(job: dict[str, Any]) -> dict[str, Any]:
    return job["template"]["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize("form", ["trainjob", "jobset"])
@pytest.mark.parametrize("options", [{}, {"extra": EVERYTHING, "max_restarts": 3, "with_secret": True}])
def test_the_manifests_keep_to_the_published_models(
    form: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A field that a model does not know is lost on the way through it."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="no kubeflow-trainer-api, which has the models")
    monkeypatch.setenv("TOPOTRAIN_TOKEN", SECRET)
    for document in yaml.safe_load_all(ask(format=form, **options).text):
        model = getattr(models, MODELS[document["kind"]])
        assert json.loads(model.from_dict(document).to_json()) == document
    broken = {**document, "spec": {**document["spec"], "replicatedJob": []}}
    assert json.loads(model.from_dict(broken).to_json()) != broken


@pytest.mark.parametrize(
    ("cluster", "counts"), [(APART, [("node", 2), ("servers", 2)]), (TOGETHER, [("node", 3)]), (INSIDE, [("node", 1)])]
)
def test_every_pod_is_one_unit(cluster: str, counts: list[tuple[str, int]]) -> None:
    jobs = jobs_of(documents(ask(cluster, id="j1").text))
    ranks = []
    for job in jobs:
        spec = job["template"]["spec"]
        assert (spec["completionMode"], spec["completions"]) == ("Indexed", spec["parallelism"])
        variables = {one["name"]: one.get("value", "from elsewhere") for one in container_of(job)["env"]}
        for index in range(spec["completions"]):
            start = start_of({**variables, "JOB_COMPLETION_INDEX": str(index)})
            assert start.launcher == "kubernetes"
            assert start.nprocs == sum(count for _, count in counts)
            assert start.rendezvous == "tcp://j1-node-0-0.j1.default.svc.cluster.local:29400?job=j1"
            assert start.patience > 60
            ranks.append(start.rank)
    assert [(job["name"], job["template"]["spec"]["completions"]) for job in jobs] == counts
    assert ranks == list(range(len(ranks)))


def test_a_trainjob_refers_to_the_runtime_beside_it() -> None:
    found = documents(ask(APART, namespace="team").text)
    runtime, asked = found["TrainingRuntime"], found["TrainJob"]
    assert asked["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] == asked["metadata"]["name"]
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 2}  # pods of the Job that Kubeflow knows as the trainer's
    assert [job["template"].get("metadata", {}).get("labels") is not None for job in jobs_of(found)] == [True, False]
    assert {document["metadata"]["namespace"] for document in found.values()} == {"team"}


def test_the_job_file_travels_whole_but_for_a_password() -> None:
    job = job_file.loads('program: "t.py" args: "--lr=0.1" rendezvous: "redis://me:hush@store/0"')
    text = launch("kubernetes", job, layout(job.cluster), LaunchOptions(image="x"), {}, False).text
    assert "hush" not in text and "--from-literal=rendezvous=" in text
    found = job_file.loads(documents(text)["ConfigMap"]["data"]["job.conf"])
    assert (found.program, found.args) == ("t.py", ("--lr=0.1",))


def test_who_starts_again() -> None:
    found = documents(ask(APART, format="jobset").text)
    assert found["JobSet"]["spec"]["failurePolicy"] == {"maxRestarts": 0}
    found = documents(ask(APART, format="jobset", max_restarts=2).text)
    policy = found["JobSet"]["spec"]["failurePolicy"]
    assert (policy["maxRestarts"], policy["rules"][0]["action"]) == (2, "FailJobSet")
    for job in jobs_of(found):  # no pod is replaced alone, and bad input ends all
        spec = job["template"]["spec"]
        assert spec["backoffLimit"] == 0
        assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2]
        assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"] == job["name"]


def test_what_a_pod_gets() -> None:
    words = ("--log", "jsonl")
    first, second = (container_of(each) for each in jobs_of(documents(ask(extra=EVERYTHING, unit_words=words).text)))
    assert first["command"] == ["/venv/bin/python", "-m", "topotrain", "unit", *words, "/etc/topotrain/job.conf"]
    assert first["resources"] == {
        "requests": {"cpu": "2", "memory": "8Gi"},
        "limits": {"cpu": "2", "memory": "8Gi", "nvidia.com/gpu": "1"},
    }
    assert "nvidia.com/gpu" not in second["resources"]["limits"]
    assert [mount["mountPath"] for mount in first["volumeMounts"]] == ["/etc/topotrain", "/dev/shm", "/data", "/out"]
    inside = container_of(jobs_of(documents(ask(INSIDE).text))[0])
    # four workers, and their servers; 4 GiB for each process, and 512 MiB in /dev/shm for each worker
    assert inside["resources"]["requests"] == {"cpu": "5", "memory": f"{5 * 4096 + 4 * 512}Mi"}
    assert inside["resources"]["limits"] == inside["resources"]["requests"]


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    return job["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("form", ["trainjob", "jobset"])
def test_no_pod_is_root_or_may_become_root(form: str) -> None:
    for user, extra in ((1000, ()), (4711, ("user=4711",))):
        for job in jobs_of(documents(ask(APART, format=form, extra=extra).text)):
            assert pod_of(job)["securityContext"] == {
                "runAsNonRoot": True,
                "runAsUser": user,
                "runAsGroup": user,
                "fsGroup": user,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            }
            context = container_of(job)["securityContext"]
            assert context == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@pytest.mark.parametrize(
    ("extra", "workers", "servers"),
    [
        ((), ("512Mi", "4608Mi"), ("64Mi", "4160Mi")),
        (("shm=2Gi",), ("2Gi", "6144Mi"), ("2Gi", "6144Mi")),
        (("memory=1Gi",), ("256Mi", "1Gi"), ("64Mi", "1Gi")),  # the processes need memory, too
        (("memory=8Gi", "shm=6Gi"), ("6Gi", "8Gi"), ("6Gi", "8Gi")),
    ],
)
def test_shared_memory_has_a_size_that_the_limit_includes(
    extra: tuple[str, ...], workers: tuple[str, str], servers: tuple[str, str]
) -> None:
    for job, expected in zip(jobs_of(documents(ask(APART, extra=extra).text)), (workers, servers)):
        shm = next(volume for volume in pod_of(job)["volumes"] if volume["name"] == "shm")
        assert shm["emptyDir"]["medium"] == "Memory"
        assert (shm["emptyDir"]["sizeLimit"], container_of(job)["resources"]["limits"]["memory"]) == expected


def test_only_a_jobset_is_deleted_by_its_age() -> None:
    for extra, seconds in (((), 7 * 24 * 3600), (("ttl=60",), 60)):
        found = documents(ask(format="jobset", extra=extra).text)
        assert found["JobSet"]["spec"]["ttlSecondsAfterFinished"] == seconds
    # the controller of a TrainJob would make its JobSet again (kubeflow/trainer, issue 3779)
    assert "ttlSecondsAfterFinished" not in ask(format="trainjob").text


def test_no_secret_is_written_unless_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPOTRAIN_TOKEN", SECRET)
    url = "redis://me:hush@store/0"
    for dry_run in (True, False):
        text = ask(rendezvous=url, id="j1", dry_run=dry_run).text
        assert "hush" not in text
        assert SECRET not in text
        assert "--from-file=token=/dev/stdin --from-literal=rendezvous=URL-WITH-PASSWORD" in text
    file = tmp_path / "j1.yaml"
    file.touch(0o644)
    done = ask(rendezvous=url, id="j1", with_secret=True, output=str(file))
    assert done.text == f"kubectl apply -f {file}\n"
    assert done.as_data()["output"] == str(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = documents(file.read_text())
    assert found["Secret"]["stringData"] == {"token": SECRET, "rendezvous": "redis://me:hush@store/0?job=j1"}
    for one in container_of(jobs_of(found)[0])["env"]:
        if one["name"] in ("TOPOTRAIN_TOKEN", "TOPOTRAIN_RENDEZVOUS"):
            assert one["valueFrom"]["secretKeyRef"]["name"] == found["Secret"]["metadata"]["name"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image": ""}, ["--image", "topotrain[tls]"]),
        ({"format": "pod"}, ["--format", "pod", "trainjob, jobset"]),
        ({"id": "big.one"}, ["--id", "big.one", "a-z"]),
        ({"id": "a" * 60}, ["--id", "at most"]),
        ({"namespace": "Team"}, ["--namespace", "Team"]),
        ({"extra": ("memory=lots",)}, ["--pass", "memory=lots", "memory=8Gi"]),
        ({"extra": ("disk=1",)}, ["--pass", "disk=1", "cpu=4"]),
        ({"extra": ("memory=100Mi",)}, ["--pass", "memory=100Mi", "256Mi"]),
        ({"extra": ("memory=1Gi", "shm=1024Mi")}, ["--pass", "shm=1024Mi", "memory=1Gi"]),
        ({"extra": ("user=0",)}, ["--pass", "user=0", "user=1000"]),
        ({"extra": ("ttl=60",)}, ["--pass", "ttl=60", "--format jobset"]),
        ({"extra": ("port=99999",)}, ["--pass", "port=99999", "port=29400"]),
        ({"nodes": 2}, ["--nodes", "kubernetes"]),
        ({"output": "/no/such/folder/x"}, ["--output", "/no/such/folder/x", "No such file"]),
    ],
)
def test_bad_input(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        ask(**options)
    for word in words:
        assert word in str(refused.value)


def test_without_a_rendezvous_or_pyyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="unknown kind 'reddis'"):
        ask(rendezvous="reddis://store")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=r"pip install 'topotrain\[yaml\]'"):
        ask()


ROOT = Path(__file__).parents[3]


def container_file() -> list[tuple[str, str]]:
    """The instructions of the container file, and their words."""
    lines = [line for line in (ROOT / "Containerfile").read_text().splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    found = [line.partition(" ")[::2] for line in whole.splitlines() if line.strip()]
    return [(instruction, " ".join(words.split())) for instruction, words in found]


def test_the_container_file_copies_what_is_there_and_what_the_context_lets_through() -> None:
    sources = [w.split()[:-1] for name, w in container_file() if name == "COPY" and not w.startswith("--from")]
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    needed = {source for words in sources for source in words}
    assert {"topotrain", "pyproject.toml", "constraints.txt"} <= needed
    for source in needed:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in allowed, source
    assert "*" in allowed
    # what the build of the package reads
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"]} <= needed
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in constraints if line.startswith("torch==")], "the file rewrites this line"


def test_the_container_file_runs_as_the_user_of_the_manifests() -> None:
    instructions = container_file()
    users = [words for name, words in instructions if name == "USER"]
    assert users == [f"{kubernetes_manifests.USER}:{kubernetes_manifests.USER}"]
    assert instructions.index(("USER", users[0])) > max(k for k, (name, _) in enumerate(instructions) if name == "RUN")
    made = next(words for name, words in instructions if name == "RUN" and "useradd" in words)
    assert f"--uid {kubernetes_manifests.USER} " in made
    # `python` of the manifests is that of the virtual environment
    path = next(words for name, words in instructions if name == "ENV")
    assert path.startswith("PATH=/opt/venv/bin:")
    assert ("COPY", "--from=build /opt/venv /opt/venv") in instructions
