"""Outer optimizers that are not torch's: delayed Nesterov momentum, and learning rates that change."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from in_process_job import mlp, run_local, vectors
from island_jobs import OUTER, adamw, assert_same_bits, building, job, script

from topotrain.config.job import ChangeMethod, ConfigError, LRGen, Merge, Updater, UpdaterType
from topotrain.core.optim.adapter import describe_all
from topotrain.extensions.checkpointing.shard_snapshot import check_same
from topotrain.extensions.outer_optimizer.inner_optimizer import InnerOptimizer
from topotrain.extensions.outer_optimizer.outer_rounds import OuterRounds
from topotrain.extensions.outer_optimizer.outer_schedule import OuterSchedule
from topotrain.training.parameters.flat_parameters import describe_model

# --- delayed momentum ------------------------------------------------------------------------------------------------


def steps_of(server: Any) -> set[float]:
    """How many steps the optimizer of each tensor has made."""
    return {float(v) for unit in server.model.units for _, name, v in unit.update.state() if name == "step"}


def test_fragments_count_for_themselves() -> None:
    """Of 8 exchanges each of 2 fragments has 4, and at the end one fragment has steps that are left."""
    batches, cluster = vectors(3 * 16), {"fragments": 2, "outer": "delay 2"}
    one, many = (run_local(job(nservers_per_group=n, **cluster), building(), script(batches, 3)) for n in (1, 3))
    assert_same_bits(many.values, one.values)
    assert steps_of(one.servers[0]) == {4.0}, "steps that are left are no step of the optimizer"


def test_with_a_quorum_every_arrival_counts() -> None:
    found = run_local(job(outer="delay 3", quorum=1), building(), script(vectors(3 * 16), 3))
    (server,) = found.servers
    (made,), version = steps_of(server), server.state.version
    assert version - 3 <= made <= version, "what a group has left at its end is no step of the optimizer"
    assert all(bool(v.isfinite().all()) for v in found.values.values())


def goes_on(before: Any, now: Any) -> None:
    """Raise what a job raises that goes on from a snapshot of another one."""

    def described(made: Any) -> tuple[Any, str]:
        model = mlp()
        inner = InnerOptimizer(adamw(model.parameters()), made.cluster, model.named_parameters())
        parts = describe_model(model, (), inner.optimizers)
        return parts.parameters, replace(describe_all(inner.optimizers, parts.tensors), outer=True).to_text()

    old, text = described(before)
    parameters, now_text = described(now)
    check_same(parameters, now_text, SimpleNamespace(parameters=old, optimizer=text, number=7))  # type: ignore[arg-type]


def test_which_outer_optimizer_may_follow_in_a_snapshot() -> None:
    goes_on(job(outer="delay 2"), job(outer="delay 4"))
    goes_on(job(), job(merge=Merge.kRadial))
    goes_on(job(merge=Merge.kRadial), job())
    with pytest.raises(ConfigError, match=r"resume = 'topotrain:DelayedNesterov': must be torch\.optim\.SGD"):
        goes_on(job(), job(outer="delay 2"))


# --- schedules -------------------------------------------------------------------------------------------------------

STEP, _ = OUTER["step"]


def nesterov(schedule: LRGen) -> Updater:
    return Updater(type=UpdaterType.kNesterov, momentum=0.9, learning_rate=schedule)


def test_rates_of_parameters_are_scaled() -> None:
    """`lr_scale` of the block's `param` holds in each round, and for the fragment of the round alone."""
    optimizers = [["torch.optim.SGD", 2], ["torch.optim.SGD", 1]]
    spec = json.dumps({"optimizers": optimizers, "groups": [{}, {}, {}], "assignment": [0, 1, 2]})
    hyper = json.dumps([{"lr": 0.7, "lr_scale": 1.0}, {"lr": 1.4, "lr_scale": 2.0}, {"lr": 0.7, "lr_scale": 1.0}])
    schedule = OuterSchedule(STEP)
    for fragment, number, wanted in ((0, 2, [0.7 * 0.3, 0.7 * 0.3 * 2.0, 0.7]), (1, 4, [0.7, 1.4, 0.7 * 0.3**2])):
        settings = json.loads(schedule.settings(hyper.encode(), spec, fragment, number))
        assert [group["lr"] for group in settings] == wanted


def test_a_resumed_job_goes_on_at_its_round() -> None:
    server: Any = SimpleNamespace(groups=(0, 1), state=SimpleNamespace(known=SimpleNamespace(schema=None)))
    made = job(2, 3, "step", fragments=3)
    resumed = OuterRounds(server, made, None, (4, 4, 3))
    assert resumed.facts() == {"rounds": [4, 4, 3]}
    assert resumed.history.add(2, (0, 1)).number == 3
    assert resumed.facts() == {"rounds": [4, 4, 4]}
    assert OuterRounds(server, made, None, (4, 4)).facts() == {"rounds": [0, 0, 0]}, "of another number of fragments"
    copy = OuterRounds(server, made)
    copy.load_state_dict(resumed.state_dict())
    assert copy.facts() == resumed.facts()


@pytest.mark.parametrize("kind", [kind for kind in ChangeMethod if kind not in (ChangeMethod.kFixed,)])
def test_a_schedule_needs_its_block(kind: ChangeMethod) -> None:
    made = job(1, 3)
    with pytest.raises(ConfigError, match=r"cluster\.outer\.learning_rate\.") as refused:
        replace(made, cluster=replace(made.cluster, outer=nesterov(LRGen(type=kind, base_lr=0.7))))
    if kind is ChangeMethod.kUserChange:
        assert "learning_rate.type = kUserChange: must be one of kFixed, kLinear" in str(refused.value)
    else:
        assert f"is required by {kind.value}, such as" in str(refused.value)
