"""Jobs are recorded under one seed's network, and replayed under that of others: they end with the same bits."""

from dataclasses import replace

import pytest
import torch
from fault_schedule import Fault
from replayed_trials import Differs, FloatIslands, FloatTrial, Recorder, Replayer, same_bits
from seeded_runs import LAYOUTS
from seeds import SOAK, seeds, soaked

from topotrain.config.job import Job
from topotrain.extensions.decision_record.order_entries import OwnMessage, StepMade
from topotrain.tools.replay.decision_file import DecisionFile

pytestmark = pytest.mark.simulated

STEPPING = (
    "downpour",
    "downpour of pairs",
    "downpour on three shards",
    "hogwild",
    "hogwild of pairs",
    "hogwild of three",
    "bounded",
    "warming up",
    "encoded",
    "elastic averaging",
    "gossip",
    "outer optimizer",
    "quorum",
)
"""Layouts whose workers commit each step."""
ISLANDS = ("islands", "islands in step", "islands of a quorum", "islands that wait")
EACH = (*STEPPING, *ISLANDS)


def job_of(name: str) -> Job:
    job = LAYOUTS[name]
    # Rounds that stay open for more workers, which a timer ends.
    return replace(job, cluster=replace(job.cluster, slack=0.5)) if name == "islands of a quorum" else job


def run(name: str, seed: int, order: Recorder | Replayer | None = None, **more: object) -> FloatTrial:
    made = FloatIslands if name in ISLANDS else FloatTrial
    trial = made(job_of(name), seed, order, **more)  # type: ignore[arg-type]
    trial.run()
    assert trial.final, "worker 0/0 has come to its end"
    return trial


def recorded(name: str, seed: int, **more: object) -> tuple[DecisionFile, FloatTrial]:
    recorder = Recorder()
    trial = run(name, seed, recorder, **more)
    return recorder.record_of(job_of(name)), trial


LATER = ("downpour", "downpour of pairs", "hogwild", "hogwild of three", "bounded", "elastic averaging", "islands")
"""Layouts that differ little from another one, or of which workers are killed below."""


@pytest.mark.parametrize("name", soaked([name for name in EACH if name not in LATER], LATER))
def test_a_replay_under_another_network_has_the_same_bits(name: str) -> None:
    others, few = 0, range(6) if SOAK else [EACH.index(name) % 6]
    for seed in few:
        lease = seed % 3 > 0
        record, trial = recorded(name, seed, lease=lease)
        replayed = run(name, seed + 101, Replayer(record), lease=lease)
        assert same_bits(trial.final, replayed.final), f"seed {seed}"
        # Without the replay the network of the other seed leads to other bits.
        others += not same_bits(trial.final, run(name, seed + 101, lease=lease).final)
    ordered = name in ("islands in step", "islands that wait", "outer optimizer")
    assert others >= (0 if ordered else len(few) // 2), others


@pytest.mark.parametrize("name", soaked(["hogwild", "islands of a quorum"], ["downpour on three shards", "quorum"]))
def test_a_worker_that_was_killed_is_killed_again(name: str) -> None:
    deaths = others = 0
    few = seeds(6)[: 6 if SOAK else 2]
    for seed in few:
        faults = (Fault(1, at=0.02 + 0.004 * seed, away=0.05),)
        record, trial = recorded(name, seed, faults=faults, batches=18)
        replayed = run(name, seed + 101, Replayer(record), batches=18)
        assert same_bits(trial.final, replayed.final), f"seed {seed}"
        assert replayed.kills == trial.kills
        deaths += trial.kills
        others += not same_bits(trial.final, run(name, seed + 101, faults=faults, batches=18).final)
    assert deaths > 0.8 * len(few) and others >= len(few) // 2


def test_a_recording_is_a_few_bytes_for_each_step() -> None:
    record, _ = recorded("downpour", 3, batches=60)
    (server,) = record.servers
    steps = sum(isinstance(entry, StepMade) for entry in record.entries(server))
    assert steps == 120
    assert len(record.parts["server-0-0"]) / steps < 8


def test_the_ends_of_grace_windows_are_in_a_recording() -> None:
    found = 0
    for seed in range(4):
        record, _ = recorded("islands of a quorum", seed, batches=40)
        found += sum(isinstance(entry, OwnMessage) for entry in record.entries(record.servers[0]))
    assert found


# --- versions --------------------------------------------------------------------------------------------------------


def test_a_replay_stops_at_a_version_with_its_values() -> None:
    """Each version is replayed up to from another seed, and the last has the final values.

    Version 16 has a step of another group on each server: the first server to reach it answers the other group still.
    """
    record, trial = recorded("downpour of pairs", 1)
    last = record.last_version(0)
    seen: dict[int, list[torch.Tensor]] = {}
    for until, seed in ((16, 47), (16, 32), (17, 33), (last, 34)):
        replayer = Replayer(record, until)
        run("downpour of pairs", seed, replayer)
        values = [replayer.stopped[server] for server in record.servers]
        known = seen.setdefault(until, values)
        assert same_bits(known, values)
    assert not same_bits(seen[16], seen[17])
    final = [trial.server(0, shard).state.known for shard in range(2)]
    assert same_bits(seen[last], [torch.cat([m.values(b.id) for b in m.buckets]) for m in final])


# --- another program -------------------------------------------------------------------------------------------------


def test_a_script_that_computes_something_else_is_found_at_its_first_step() -> None:
    record, _ = recorded("downpour", 1)
    with pytest.raises(Differs, match=r"step 1 of worker \d/0: a gradient with check .. is recorded, .. came"):
        run("downpour", 7, Replayer(record), changed=1)


def test_a_script_that_reads_more_is_found_where_its_recording_ends() -> None:
    record, _ = recorded("downpour", 1, lease=False)
    # Of twelve batches in an epoch each worker reads four.
    pattern = r"step 5 of worker \d/0: the recording has a message AppliedBatchesRequest, and the commit of a step came"
    with pytest.raises(Differs, match=pattern):
        run("downpour", 7, Replayer(record), lease=False, batches=15)


def test_another_model_is_found() -> None:
    record, _ = recorded("downpour", 1, lease=False)
    with pytest.raises(Differs, match="of another model"):
        run("downpour", 7, Replayer(record), lease=False, lengths=(150, 150, 257))
