"""Which groups may leave a job and come to it. What is decided: policy.txt."""

from dataclasses import replace

import pytest

from topotrain.config.job import Apply, Cluster, ConfigError, Grads, Job, OnFailure, Shard
from topotrain.config.topology import layout
from topotrain.extensions.elastic.eligibility import absent_groups, leave_refusal

CLUSTER = Cluster(nworker_groups=3, server_worker_separate=True)
JOB = Job(cluster=CLUSTER, on_failure=OnFailure.kContinue, restarts=1)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (Job(cluster=Cluster(nworkers_per_group=2, server_worker_separate=True)), "leave WORKSPACE --workers 1"),
        (replace(JOB, on_failure=OnFailure.kStop), "kContinue is needed"),
        (replace(JOB, shard=Shard.kStatic), "shard: kStatic"),
        (replace(JOB, apply=Apply.kOnArrival, grads=Grads.kHidden), "kOnArrival"),
        (Job(cluster=Cluster(nworker_groups=2, nserver_groups=2)), "servers of its own"),
        (Job(cluster=Cluster(nworker_groups=2, nworkers_per_group=2, nserver_groups=0)), ""),
        (JOB, ""),
    ],
    ids=["synchronous", "kStop", "static", "on arrival", "hogwild", "no servers", "downpour"],
)
def test_layouts_that_cannot_do_it_say_why(job: Job, words: str) -> None:
    why = leave_refusal(replace(job, cluster=job.cluster), layout(job.cluster), job.cluster.nworker_groups - 1)
    assert (words in why) if words else (why == "" or job.cluster.nserver_groups == 0)


def test_a_job_may_begin_with_some_of_its_groups() -> None:
    job = replace(JOB, start_groups=1)
    assert absent_groups(job, layout(CLUSTER)) == {1, 2}
    for wrong in (replace(JOB, start_groups=4), replace(job, shard=Shard.kStatic)):
        with pytest.raises(ConfigError, match="start_groups"):
            absent_groups(wrong, layout(CLUSTER))
