"""`tt.data_parallel` in one process: Caffe2's words around an ordinary loop, what is refused, and how shards meet."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from redis_server import PASSWORD
from redis_server import redis_urls as redis_urls  # a fixture
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt
from topotrain.comm.store import StoreError, open_store
from topotrain.comm.store.discovery import rank_claims
from topotrain.comm.store.discovery.rank_claims import RankClaim, RankTaken
from topotrain.compat.caffe2.shard_rendezvous import ShardStart
from topotrain.config.job import ConfigError
from topotrain.training import context as process

dpm = tt.data_parallel


def data() -> TensorDataset:
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(dim=1))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 3)


def forward(model: dpm.Model, loss_scale: float) -> list[torch.Tensor]:
    x, labels = model.batch
    scores = model(x)
    model.blobs["accuracy"] = (scores.argmax(dim=1) == labels).float().mean()
    loss = nn.functional.cross_entropy(scores, labels)
    return [loss * loss_scale * 0.75, loss * loss_scale * 0.25]


def sgd(model: dpm.Model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.25)


def net(**given: object) -> dpm.Net:
    words = {
        "model": build(),
        "input_builder_fun": lambda model: DataLoader(data(), batch_size=8),
        "forward_pass_builder_fun": forward,
        "optimizer_builder_fun": sgd,
        "devices": [0],
        "cpu_device": True,
    }
    return dpm.Parallelize(**{**words, **given})


# --- an ordinary process -----------------------------------------------------------------------------------------


def test_without_a_rendezvous_it_is_the_usual_loop():
    made = net(optimize_gradient_memory=True)
    dpm.RunInitNet(made)
    first = dpm.RunNet(made, 1)
    dpm.RunNet(made, 6)
    plain = build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.25)
    batches = [batch for _ in range(3) for batch in DataLoader(data(), batch_size=8)][:7]  # 3 in each pass
    losses = []
    for x, labels in batches:
        optimizer.zero_grad()
        losses.append(nn.functional.cross_entropy(plain(x), labels))
        losses[-1].backward()
        optimizer.step()
    assert first == pytest.approx(losses[0].item(), rel=1e-6)
    torch.testing.assert_close(made.model.module.weight, plain.weight, rtol=1e-5, atol=1e-6)
    assert process.current() is None
    made.finalize()
    with pytest.raises(ConfigError, match="has been finalized"):
        made.run()


def test_a_net_without_an_optimizer_only_looks():
    module = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))
    made = net(model=module, optimizer_builder_fun=None)
    before = module[0].weight.clone()
    assert made.run(3) == made.run(3)  # three batches are the whole data; nothing is dropped while testing
    assert torch.equal(module[0].weight, before) and module[0].weight.grad is None
    assert module.training


def test_a_function_that_returns_nothing_sets_the_batch_itself():
    x, labels = data().tensors
    calls = []

    def add_input(model: dpm.Model) -> None:
        calls.append(len(calls))
        model.batch = x[len(calls) - 1 :][:4], labels[len(calls) - 1 :][:4]

    made = net(input_builder_fun=add_input)
    seen = []
    made._forward = lambda model, scale: seen.append(model.batch[0][0]) or forward(model, scale)
    made.run(3)
    assert torch.equal(torch.stack(seen), x[:3]) and calls == [0, 1, 2]


def test_blobs_and_learning_rates_have_names():
    made = net()
    made.run()
    assert dpm.GetLearningRateBlobNames(made) == ["optimizer/0/lr"]
    assert dpm.FetchBlob(made, "optimizer/0/lr") == 0.25
    assert 0 <= float(dpm.FetchBlob(made, "accuracy")) <= 1
    with pytest.raises(ConfigError, match="must be one of accuracy, optimizer/0/lr"):
        dpm.FetchBlob(made, "acuracy")


def test_a_checkpoint_is_loaded_before_the_net_runs():
    made = net(param_update_builder_fun=None, use_nccl=False, combine_spatial_bn=True)
    dpm.RunInitNet(made)
    dpm.FinalizeAfterCheckpoint(made)
    made.run()
    with pytest.raises(ConfigError, match="must come before the first RunNet"):
        dpm.FinalizeAfterCheckpoint(made)


def test_exit_nets_run_once(tmp_path: Path):
    said: list[str] = []
    rendezvous = {"kv_handler": dpm.FileStoreHandler(tmp_path / "s"), "shard_id": 0, "num_shards": 1}
    made = net(rendezvous={**rendezvous, "exit_nets": [lambda: said.append("a"), lambda: said.append("b")]})
    made.finalize()
    made.finalize()
    assert said == ["a", "b"]


def test_a_start_that_failed_can_be_tried_again(tmp_path: Path):
    (tmp_path / "open").mkdir(mode=0o755)
    handler = dpm.FileStoreHandler(tmp_path / "open")
    made = net(rendezvous={"kv_handler": handler, "shard_id": 0, "num_shards": 1})
    for _ in range(2):
        with pytest.raises(StoreError, match="must belong to this user with mode 0700"):
            made.run()
    made.finalize()


# --- what is refused ---------------------------------------------------------------------------------------------

STORE = dpm.FileStoreHandler("nowhere")
MEET = {"kv_handler": STORE, "shard_id": 0, "num_shards": 2, "engine": "GLOO", "exit_nets": None}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rendezvous": {**MEET, "shard_id": 2}}, "from 0 to num_shards - 1 = 1"),
        ({"rendezvous": {**MEET, "shard_id": "1"}}, "shard_id'] = '1': must be a whole number"),
        ({"rendezvous": {**MEET, "num_shards": 0}}, "must be a whole number >= 1"),
        ({"rendezvous": {**MEET, "engine": "MPI"}}, "must be GLOO or NCCL"),
        ({"rendezvous": {**MEET, "engine": "NCCL"}}, "needs an NVIDIA GPU|needs cpu_device=False"),
        ({"rendezvous": {**MEET, "kv_handler": "store_handler"}}, "must be a FileStoreHandler"),
        ({"rendezvous": {**MEET, "kv_handle": STORE}}, "its keys must be among kv_handler, shard_id"),
        ({"rendezvous": {**MEET, "exit_nets": ["net"]}}, "list of functions"),
        ({"rendezvous": {**MEET, "transport": "ibverbs"}}, 'must be "tcp"'),
        ({"rendezvous": {**MEET, "interface": "nosuch0"}}, "here are lo"),
        ({"rendezvous": MEET, "optimizer_builder_fun": None}, "in this process alone"),
        ({"rendezvous": [MEET]}, "must be a dictionary"),
        ({"devices": [0, 1]}, "start a process for each"),
        ({"devices": []}, "must be a list with the number of one device"),
        ({"devices": 0}, "must be a list with the number of one device"),
        ({"model": "resnet"}, "must be a torch.nn.Module"),
        ({"barrier_net_timeout_sec": "long"}, "must be a number of seconds above 0"),
        ({"workspace": 5}, "workspace = 5: must be the path"),
        ({"net_typ": "dag"}, "is not an argument of Parallelize"),
        ({"net_type": "simple"}, "must be 'dag', or not given"),
        ({"param_update_builder_fun": forward}, "param_update_builder_fun = 'forward': must be None, or not given"),
        ({"input_builder_fun": None}, "must be a function"),
        ({"input_builder_fun": lambda model: 7}, "must return batches"),
        ({"optimizer_builder_fun": lambda model: None}, "must return a torch.optim optimizer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_messages_are_refused(given: dict[str, object], said: str):
    with pytest.raises(ConfigError, match=said.replace("[", r"\[").replace("]", r"\]")):
        net(**given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="must be True without an NVIDIA GPU"):
        net(cpu_device=False)


def test_wrong_answers_of_functions_are_refused():
    with pytest.raises(ConfigError, match="must return a list of losses"):
        (wrong := net(forward_pass_builder_fun=lambda model, scale: forward(model, scale)[0])).run()
    with pytest.raises(ConfigError, match="this process trains another net: finalize that one first"):
        net().run()
    wrong.finalize()
    once = net(input_builder_fun=lambda model: iter(DataLoader(data(), batch_size=8)))
    once.run(3)
    with pytest.raises(ConfigError, match="'3 batches': has no more batches"):
        once.run()
    with pytest.raises(ConfigError, match="must be a whole number >= 1"):
        once.run(0)
    with pytest.raises(ConfigError, match="must be 1 to 65535"):
        dpm.RedisStoreHandler("localhost", 65536)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: dpm.FileStoreHandler(5), "FileStoreHandler path = 5: must be the path"),
        (lambda: dpm.FileStoreHandler("w", 5), "FileStoreHandler prefix = 5: must be a text"),
        (lambda: dpm.RedisStoreHandler(None, 6379), "RedisStoreHandler host: must be a text"),
        (lambda: dpm.RedisStoreHandler("localhost", 6379, 5), "RedisStoreHandler prefix = 5: must be a text"),
        (lambda: dpm.RedisStoreHandler("localhost", password=7531), "password = 'int': must be a text"),
        (lambda: dpm.RunInitNet(5), "RunInitNet net = 'int': must be the net that Parallelize returned"),
        (lambda: dpm.RunNet(build()), "RunNet net = 'Linear': must be the net that Parallelize returned"),
        (lambda: dpm.FinalizeAfterCheckpoint(None), "FinalizeAfterCheckpoint net = 'NoneType'"),
        (lambda: dpm.GetLearningRateBlobNames(5), "GetLearningRateBlobNames net = 'int'"),
        (lambda: dpm.FetchBlob(5, "accuracy"), "FetchBlob net = 'int': must be the net that Parallelize returned"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_store_and_no_net_is_refused(call: Callable[[], object], said: str):
    with pytest.raises(ConfigError, match=said):
        call()


# --- meeting -----------------------------------------------------------------------------------------------------


Handler = dpm.FileStoreHandler | dpm.RedisStoreHandler


@pytest.fixture(params=["file", "redis"])
def handler(request: pytest.FixtureRequest, tmp_path: Path) -> Handler:
    if request.param == "file":
        return dpm.FileStoreHandler(tmp_path / "a store", "Run 1/2")
    port = urlsplit(request.getfixturevalue("redis_urls")()).port or 0
    return dpm.RedisStoreHandler("127.0.0.1", port, f"Run {tmp_path}", password=PASSWORD)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_claims, "BEAT_S", 0.1)
    monkeypatch.setattr(rank_claims, "LIFE_S", 2.0)


class Shard:
    """One shard on a thread."""

    def __init__(self, handler: Handler, shard_id: int, num_shards: int, patience_s: float = 30.0) -> None:
        self.given = (handler, shard_id, num_shards, patience_s)
        self.meeting: ShardStart | None = None
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.meeting = ShardStart(*self.given)
        except Exception as error:
            self.error = error

    def ended(self) -> ShardStart | str:
        self.thread.join(40)
        assert not self.thread.is_alive()
        return self.meeting or f"{type(self.error).__name__}: {self.error}"


def test_every_start_has_a_room_of_its_own(handler: Handler):
    rooms = set()
    for _ in range(2):
        found = [shard.ended() for shard in [Shard(handler, number, 3) for number in (2, 0, 1)]]
        assert all(isinstance(meeting, ShardStart) for meeting in found), found
        assert len({meeting.url for meeting in found}) == 1
        rooms.add(found[0].url)
        found[0].store.set("server/0/0", b"here")
        assert found[2].store.get("server/0/0") == b"here"
        with pytest.raises(ConfigError, match="shard_id = 1: must be another number in each process"):
            ShardStart(handler, 1, 3, 5.0)
        room = open_store(found[0].url)
        for meeting in found:
            meeting.close()
        assert room.keys("") == []
        room.close()
    assert len(rooms) == 2


def test_shards_that_were_told_different_numbers_say_so(handler: Handler):
    pair = [Shard(handler, 0, 2), Shard(handler, 1, 3)]
    said = [str(shard.ended()) for shard in pair]
    assert said == [
        "ConfigError: num_shards = 2: must be the same in all processes, and shard 1 has 3",
        "ConfigError: num_shards = 3: must be the same in all processes, and shard 0 has 2",
    ]


def test_who_does_not_come_in_time_is_named(handler: Handler):
    assert Shard(handler, 0, 2, 0.5).ended() == "StoreError: shard 1 did not come within 0.5 s"


def test_an_entry_that_was_left_without_notice_is_free_after_a_while(tmp_path: Path):
    store = open_store(f"file://{tmp_path}/seats")
    with ExitStack() as leaving:
        first = RankClaim(store, 0, "first")
        leaving.callback(first.close)
        with pytest.raises(RankTaken):
            RankClaim(store, 0, "second")
        first._over.set()  # what a SIGKILL leaves: an entry that is not written again
        first._thread.join()
        second = RankClaim(store, 0, "second")
        leaving.callback(second.close)
        first.close()
        assert b"second" in (store.get("seats/0") or b"")
