"""Every spelling of a job gives the same Job, and job.proto, the dataclasses and the documented reference agree."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_tables import with_tables
from seeds import examples

from topotrain.config import job as words
from topotrain.config.combinations import contributed
from topotrain.config.field_checks import rule_of
from topotrain.config.job import (
    Cluster,
    ConfigError,
    FixedStep,
    Job,
    LRGen,
    Updater,
)
from topotrain.config.job_file import dumps, dumps_cluster, load, load_with_warnings, loads
from topotrain.config.proto_schema import FILE, new, repeated, schema

ROOT = Path(__file__).parents[2]
PROTO = schema()

SINGA_JOB = """
name: "digits-mlp"  # a job in SINGA's words, with what only SINGA has
train_steps: 1000
test_steps: 10
test_freq: 60
disp_freq: 10
gpu: 0
gpu: 1
checkpoint_path: "a/step1-worker0"
checkpoint_path: "a/step2-worker0"
train_one_batch {
  alg: kBP
}
updater{
  type: kSGD
  learning_rate{
    type : kStep
    base_lr: 0.1
    step_conf <
      change_freq: 60
      gamma: 0.997
    >
  }
}
num_openblas_threads: 2
neuralnet {
  layer {
    name: "data {"  # } not a brace
    type: kRecordInput
    store_conf { backend: "kvfile" path: 'it\\'s.bin' shape: [28, 28] }
    include: kTrain
    [singa.ext] { anything: -1.5e3 }
  }
  layer { name: "fc1" user_type: "kMine" param { name: "w1" init { type: kUniform low:-0.05 } } }
}
cluster { nworkers_per_group: 2 workspace: "examples/digits" start_port: 7000 share_memory: false poll_time: 50 }
"""


def test_a_whole_singa_job_parses_with_one_warning(tmp_path: Path) -> None:
    path = tmp_path / "job.conf"
    path.write_text(SINGA_JOB)
    job, told = load_with_warnings(path)
    assert len(told) == 1
    assert "neuralnet" in told[0]
    assert "num_openblas_threads" in told[0]
    assert job.cluster == Cluster(
        nworkers_per_group=2, workspace="examples/digits", start_port=7000, share_memory=False, poll_time=50
    )
    assert job.updater is not None and job.updater.learning_rate is not None
    assert job.updater.learning_rate.base_lr == 0.1  # not the nearest 32-bit number
    assert (job.name, job.train_steps, job.test_freq, job.disp_freq, job.gpu) == ("digits-mlp", 1000, 60, 10, (0, 1))
    assert job.checkpoint_path == ("a/step1-worker0", "a/step2-worker0")


DIVIDED = """
neuralnet {
  layer { name: "data" type: kRecordInput partition_dim: 0 }
  layer { name: "fc1" innerproduct_conf { num_output: 64 } partition_dim: 1  # partition_dim: 0
  }
  layer < name: 'fc2' param { name: "w" } partition_dim: -1 >
  layer { name: "loss" srclayers: "partition_dim: 1" }
}
cluster { nworkers_per_group: 2 nservers_per_group: 1 }
"""


def divided_told(tmp_path: Path, text: str, name: str = "job.conf") -> list[str]:
    path = tmp_path / name
    path.write_text(text)
    return [line for line in load_with_warnings(path)[1] if "data-parallel" in line]


def test_layers_that_singa_divides_are_named(tmp_path: Path) -> None:
    (said,) = divided_told(tmp_path, DIVIDED)
    assert "fc1 (partition_dim: 1, by features), fc2 (partition_dim: -1, as whole layers). Every worker" in said
    assert "among the 2 workers" in said
    assert said.endswith('partition { match: "^fc1$" partition_dim: 1 }')
    assert load(tmp_path / "job.conf", ['partition={ match: "fc1" partition_dim: 1 }']).splits
    whole = DIVIDED.replace("neuralnet {", "neuralnet { partition_dim: 1")
    (said,) = divided_told(tmp_path, whole)
    assert "fc1 (" in said and "loss (partition_dim: 1, by features)" in said and "data (" not in said
    for text in (DIVIDED.replace("per_group: 2", "per_group: 1"), SINGA_JOB):
        assert not divided_told(tmp_path, text)
    assert not divided_told(tmp_path, DIVIDED + 'partition { match: "^fc1$" partition_dim: 1 }')
    text = "cluster: {nworkers_per_group: 2}\nneuralnet: {layer: [{name: a}, {name: fc1, partition_dim: 1}, 3]}"
    assert "not done here: fc1 (partition_dim: 1, by features)." in divided_told(tmp_path, text, "job.yaml")[0]


def test_a_cluster_alone_and_an_empty_text_are_jobs(tmp_path: Path) -> None:
    assert loads("cluster { nworkers_per_group: 3 }") == Job(cluster=Cluster(nworkers_per_group=3))
    assert loads("") == Job()
    path = tmp_path / "job.conf"
    path.write_text('program: "a.py" args: "1" cluster { nserver_groups: 0 nworker_groups: 2 }')
    job, told = load_with_warnings(path)
    assert (job.program, job.args) == ("a.py", ("1",))
    assert ["never exchange values" in line for line in told] == [True]
    given = load(path, ["cluster.nserver_groups=1"], "b.py", ["2", "3"])
    assert (given.program, given.args, given.cluster.nserver_groups) == ("b.py", ("2", "3"), 1)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("cluster {\n  nworker_group: 3\n}", "j.conf:2:3: cluster.nworker_group: ClusterProto has no such field"),
        ("neuralnet {\n a: 1 }\ntrain_stebs: 3", "j.conf:3:1: train_stebs: JobProto has no such field; did you mean"),
        ("updater {\n\n momentun: 3 }", "j.conf:3:2: updater.momentun: UpdaterProto has no such field"),
        ("nworker_groups: 3", "j.conf:1:1: nworker_groups: JobProto has no such field; it is a field of ClusterProto"),
        ("cluster { zzz: 3 }", "no such field; known are nworker_groups, nserver_groups"),
        ("cluster {\n  nworker_groups: 0 }", "j.conf:2:3: cluster.nworker_groups = 0: must be a whole number >= 1"),
        ("cluster {\n  nworker_groups: x }", "j.conf:2:19: cluster.nworker_groups: Couldn't parse integer: x"),
        ("\nupdater { type: kAdm }", "j.conf:2:17: updater.type = 'kAdm': must be one of kSGD, kAdaGrad"),
        ("updater {\n rmsprop_conf { } }", "j.conf:2:2: updater.rmsprop_conf.rho: is required"),
        ("seed: 1\nseed: 2", 'j.conf:2:7: seed: Message type "JobProto" should not have multiple "seed" fields'),
        ("cluster { }\ncluster { }", 'should not have multiple "cluster" fields'),
        ("cluster {\n nworker_groups: 1\n", "j.conf:1:9: unbalanced braces: the { of cluster is never closed"),
        ("cluster { }\n }", "j.conf:2:2: unbalanced braces: } closes nothing"),
        ("cluster {\n >", "j.conf:2:2: unbalanced braces: > closes the { of 1:9"),
        ('name: "a\nb"', 'j.conf:1:7: a text that is opened by " and not closed on its line'),
        ("updater { type: kSGD delta: 1e-8 : }", "j.conf:1:34: updater.delta: "),
        ("cluster { outer { momentum: -1 } }", "j.conf:1:19: cluster.outer.momentum = -1.0: must be a number >= 0"),
        ("cluster { outer { learning_rate { base_lr: -1 } } }", "j.conf:1:35: cluster.outer.learning_rate.base_lr ="),
        ("cluster { outer { } }", "j.conf:1:11: cluster.outer.type = kUserUpdater: must be one of kSGD, kAdaGrad"),
    ],
)  # fmt: skip
def test_errors_point_at_line_and_column(text: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loads(text, "j.conf")
    assert error in str(caught.value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("cluster.nworker_groups=3", Job(cluster=Cluster(nworker_groups=3, workspace="w"))),
        ("cluster.workspace=a b", Job(cluster=Cluster(workspace="a b"))),
        ("cluster.workspace=a=b", Job(cluster=Cluster(workspace="a=b"))),
        ('cluster.workspace="a\\"b"', Job(cluster=Cluster(workspace='a"b'))),
        ("cluster.workspace=", Job(cluster=Cluster())),
        ("import=my.rules", Job(import_="my.rules", cluster=Cluster(workspace="w"))),
        ('args=["a", "b"]', Job(args=("a", "b"), cluster=Cluster(workspace="w"))),
        (
            "updater.learning_rate.base_lr=0.5",
            Job(updater=Updater(learning_rate=LRGen(base_lr=0.5)), cluster=Cluster(workspace="w")),
        ),
    ],
)
def test_overrides(override: str, expected: Job) -> None:
    assert loads('args: "old" cluster { workspace: "w" }' if "args" in override else 'cluster { workspace: "w" }',
                 overrides=[override]) == expected  # fmt: skip


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("seed", "override 'seed': must be FIELD=VALUE"),
        ("cluster.nworker_group=3", "cluster.nworker_group: ClusterProto has no such field; did you mean"),
        ("cluster=3", "override 'cluster=3': cluster:"),
        ("cluster.nworker_groups=a", "cluster.nworker_groups: Couldn't parse integer: a"),
        ("cluster.nworker_groups=0", "override 'cluster.nworker_groups=0': cluster.nworker_groups = 0: must be"),
        ("cluster.nworker_groups=1 nserver_groups: 0", "must be one value"),
        ("seed.x=1", "seed: has no single fields inside"),
        ("updater.param.match=a", "updater.param: has no single fields inside"),
    ],
)
def test_overrides_that_cannot_be(override: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loads("", "j.conf", [override])
    assert error in str(caught.value)


def test_yaml_gives_the_same_job_and_errors_with_a_place(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "job.yaml"
    path.write_text(
        "cluster: {nworkers_per_group: 2, shares: [1, 2]}\nseed:\nneuralnet: {layer: [{anything: 1}]}\n"
        "updater:\n  learning_rate: {type: kFixed, base_lr: 1e-3}\n  param: [{match: b, lr_scale: 2}]\n"
    )
    text = (
        "cluster { nworkers_per_group: 2 shares: 1 shares: 2 } "
        "updater { learning_rate { type: kFixed base_lr: 1e-3 } param { match: 'b' lr_scale: 2 } }"
    )
    assert load(path) == loads(text)
    for wrong, error in [
        ("cluster:\n  nworker_group: 2\n", "job.yaml:2:3: cluster.nworker_group: ClusterProto has no such field"),
        ("cluster:\n  nworker_groups: 0\n", "job.yaml:2:3: cluster.nworker_groups = 0: must be"),
        ("seed: 1\nseed: 2\n", "job.yaml:2:1: seed: is given twice"),
        ("cluster: [\n", "not valid YAML:"),
        ("- 1\n", "must be a mapping"),
        ("cluster: 3\n", "cluster = 3: must be a mapping"),
        ("clutser: {}\n", "clutser: JobProto has no such field; did you mean cluster"),
        ("cluster: {nworker_groups: true}\n", "cluster.nworker_groups = true: must be a whole number"),
        ("cluster: {shares: [x]}\n", "cluster.shares = 'x': must be a number"),
        ("updater: {rmsprop_conf: {}}\n", "updater.rmsprop_conf.rho: is required"),
    ]:
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=re.escape(error)):
            load(path)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x]\n"
        + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefghijklmnopqrs", "bcdefghijklmnopqrst")),
        "a: &a [*a]\n",
        "a: &a\n  b: *a\n",
        "a: " + "[" * 5000,
    ],
)
def test_aliases_and_depths_of_yaml_are_bounded(text: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"job\.yaml.*(values, aliases included|nested too deep)"):
        load(path)


def test_without_pyyaml_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = tmp_path / "job.yml"
    path.write_text("seed: 1\n")
    with pytest.raises(ConfigError, match=r'pip install "topotrain\[yaml\]"'):
        load(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "none.conf")
    with pytest.raises(ConfigError, match=r"must end in \.conf, \.yaml or \.yml"):
        load(tmp_path / "job.json")
    (tmp_path / "job.conf").write_bytes(b"name: '\xff'")
    with pytest.raises(ConfigError, match="must be UTF-8 text, and is not from byte 7 on"):
        load(tmp_path / "job.conf")


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Whatever a field of this type accepts, by trial against its own rule."""

    def accepted(value: Any) -> bool:
        try:
            rule_of(kind)("f", value)
        except ConfigError:
            return False
        return True

    if dataclasses.is_dataclass(kind):
        return blocks(kind)
    args, origin = get_args(kind), get_origin(kind)
    if type(None) in args:
        return st.none() | values(args[0])
    if origin is tuple:
        few = st.lists(values(args[0]), max_size=3)
        return few.map(lambda found: tuple(value for value in found if value is not None))
    base = args[0] if origin is Annotated else kind
    plain = {
        int: st.integers(0, 9),
        float: st.floats(0, 1, exclude_max=True) | st.floats(1e-12, 0.9) | st.floats(1, 9),
        str: st.text(max_size=9),
        bool: st.booleans(),
    }
    found = plain[base] if base in plain else st.sampled_from(list(base))
    return found.map(lambda value: value if accepted(value) else None)


def blocks(cls: Any) -> st.SearchStrategy[Any]:
    """Blocks of this kind, or None; a field whose value cannot be is left out."""
    needed = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]

    def build(drawn: dict[str, Any]) -> Any:
        given = {name: value for name, value in drawn.items() if value is not None}
        if any(name not in given for name in needed):
            return None
        try:
            return cls(**given)
        except ConfigError:  # fields that exclude each other
            return None if cls is FixedStep else cls(**{name: given[name] for name in needed})

    return st.fixed_dictionaries({f.name: values(f.type) for f in dataclasses.fields(cls)}).map(build)


@pytest.mark.filterwarnings("ignore:Possible :FutureWarning")  # of re, for a pattern such as "[["
@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(blocks(Job))
def test_what_is_written_is_read_again(job: Job) -> None:
    assert loads(dumps(job)) == job


def test_a_written_job_is_short_and_readable() -> None:
    assert "ü" in dumps(Job(name="ü"))
    assert dumps(Job(cluster=Cluster(nworkers_per_group=3))) == "cluster {\n  nworkers_per_group: 3\n}\n"


def test_a_block_alone_is_a_text_without_a_job_that_would_accept_it() -> None:
    """Such a block needs other values of `grads` and `reduce` than the defaults."""
    block = "cluster {\n  nworkers_per_group: 3\n  server_worker_separate: true\n  backup: 1\n}\n"
    job = loads(f"{block} grads: kHidden per_worker_batch: true")
    assert dumps_cluster(job.cluster) == block
    with pytest.raises(ConfigError):
        dumps(Job(cluster=job.cluster))


# ---- job.proto, the dataclasses and the documents agree --------------------------------------------------------------


def test_a_default_in_job_proto_is_the_dataclass_default() -> None:
    for message in PROTO.message_type:
        if not message.field:
            continue
        cls = getattr(words, message.name.removesuffix("Proto"))
        fields = {f.name.rstrip("_"): f for f in dataclasses.fields(cls)}
        only_singa = {"neuralnet", "train_one_batch", "reset_param_version", "num_openblas_threads", "step", "id"}
        described = {f.name for f in message.field} - (only_singa if message.name == "JobProto" else set())
        assert described == fields.keys(), message.name
        empty = new(message.name)
        for field in empty.DESCRIPTOR.fields:
            if field.name not in described or repeated(field) or field.message_type is not None:
                continue
            default = fields[field.name].default
            if default in (dataclasses.MISSING, None):
                assert not field.has_default_value, field.full_name
            elif field.enum_type is not None:
                assert field.enum_type.values_by_number[field.default_value].name == default.value
            else:
                assert field.default_value == default, field.full_name


def test_an_enum_in_job_proto_has_the_values_of_its_class() -> None:
    nested = [(m.name if e.name == "Kind" else e.name, e) for m in PROTO.message_type for e in m.enum_type]
    for name, enum in [*((e.name, e) for e in PROTO.enum_type), *nested]:
        assert {v.name for v in enum.value} == {m.value for m in getattr(words, name)}, name


def test_singas_numbers_stay() -> None:
    numbers = {message.name: {f.name: f.number for f in message.field} for message in PROTO.message_type}
    singa = {name: number for name, number in numbers["ClusterProto"].items() if number < 101}
    assert singa == {
        "nworker_groups": 1,
        "nserver_groups": 2,
        "nworkers_per_group": 3,
        "nservers_per_group": 4,
        "nworkers_per_procs": 5,
        "nservers_per_procs": 6,
        "workspace": 10,
        "server_worker_separate": 20,
        "sync_freq": 21,
        "start_port": 60,
        "share_memory": 62,
        "poll_time": 81,
    }
    assert all(len(set(fields.values())) == len(fields) for fields in numbers.values())


def test_the_reference_has_every_message_a_meaning_of_each_field_and_the_refused_combinations() -> None:
    """Its tables are made of job.proto and of the rules."""
    text = with_tables((ROOT / "docs" / "configuration.md").read_text(encoding="utf-8"))
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| [^|]+? \| (.{4,}) \|$", text, re.MULTILINE)
    fields = [(str(field.number), field.name) for message in PROTO.message_type for field in message.field]
    assert sorted((number, name) for number, name, _ in rows) == sorted(fields)
    refused = re.findall(
        r"^\| `([\w.]+)` \| (.+) \|$", text.split("## Values that exclude each other\n")[1], re.MULTILINE
    )
    assert refused == [(row.field, row.accepted) for row in (*words.COMBINATIONS, *contributed())]


# ---- how it is loaded ------------------------------------------------------------------------------------------------


@pytest.mark.journey
def test_reading_a_job_needs_no_torch_and_no_public_pool() -> None:
    code = (
        "import sys; from topotrain.config import job_file; job_file.loads('cluster { nworker_groups: 2 }');"
        "print([m for m in ('torch', 'numpy', 'yaml') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("topotrain.JobProto")


@pytest.mark.journey
def test_the_compiled_form_of_job_proto_is_that_of_its_text(tmp_path: Path) -> None:
    compiled = tmp_path / "job.binpb"
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{FILE.parent}",
        f"--descriptor_set_out={compiled}",
        FILE.name,
    ]
    subprocess.run(command, check=True, timeout=300)
    found = descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes())
    assert list(found.file) == [schema()], "job.proto has changed: run `make proto`"
