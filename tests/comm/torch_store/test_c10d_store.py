"""Our stores in torch's words: as torch's own store, from several processes, and after one of them was killed."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from process_pool import client
from redis_server import redis_urls as redis_urls  # a fixture
from shells import Shells, ended, open_shells
from torch import distributed, nn
from torch.distributed import DistStoreError, HashStore, PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from topotrain.comm.store import StoreError, open_store, within
from topotrain.comm.store.discovery import generations
from topotrain.comm.store.key_validation import check_key
from topotrain.comm.torch_store.c10d_store import LONGEST, TorchStore, encode, rendezvous
from topotrain.comm.torch_store.elastic_backend import StoreBackend, address, create

ROOT = Path(__file__).parents[3]
SHORT = timedelta(milliseconds=20)


@pytest.fixture
def server(redis_urls: Callable[[], str]) -> str:
    """The URL that logs in to a Redis server, without a database."""
    return redis_urls().removesuffix("/0")


@pytest.fixture(params=["file", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/store"
    return f"{request.getfixturevalue('server')}/1?job=test-{time.time_ns()}"


# ---- torch's words ---------------------------------------------------------------------------------------------------


def behaviour(store: distributed.Store) -> list[object]:
    """What a store answers; torch's own is the measure."""
    store.set_timeout(timedelta(seconds=5))
    answers: list[object] = [store.timeout, store.check(["a"]), store.add("n", 3), store.add("n", -5), store.get("n")]
    store.set("a/B//c d", "text")
    store.set("ä", b"\0\xff")
    answers += [store.get("a/B//c d"), store.get("ä"), store.check(["n", "ä"]), store.check(["n", "none"])]
    answers += [
        store.compare_set("new", "", "1"),
        store.compare_set("new", "0", "2"),
        store.compare_set("new", "1", "2"),
    ]
    answers += [store.compare_set("none", "5", "6"), store.check(["none"]), store.get("new")]
    answers += [store.delete_key("new"), store.delete_key("new"), store.num_keys()]
    store.append("long", "one ")
    store.append("long", "two")
    store.multi_set(["x", "y"], ["1", "2"])
    store.wait(["x", "y"])
    store.wait(["x"], timedelta(seconds=1))
    answers += [store.multi_get(["long", "x", "y"]), store.num_keys(), store.has_extended_api()]
    return answers


def test_it_answers_as_a_store_of_torch(url: str) -> None:
    expected = behaviour(HashStore())
    assert behaviour(TorchStore(open_store(url))) == expected
    through = behaviour(PrefixStore("a/b", TorchStore(within(open_store(url), "second"))))  # called from C++
    assert through == expected


def test_what_does_not_come_is_waited_for_and_then_said(url: str) -> None:
    store = TorchStore(open_store(url))
    store.set_timeout(SHORT)
    calls = (lambda: store.get("a"), lambda: store.wait(["a"]), lambda: store.multi_get(["a"]))
    for call in (*calls, lambda: PrefixStore("p", store).get("a"), lambda: store.wait(["a"], SHORT)):
        with pytest.raises(DistStoreError, match=r"'(p/)?a' was not set in time"):
            call()
    store.set_timeout(timedelta(seconds=20))
    writer = threading.Thread(target=lambda: TorchStore(open_store(url)).set("a", "late"))
    writer.start()
    assert store.get("a") == b"late"
    writer.join()
    with pytest.raises(DistStoreError, match="is not a number"):
        store.add("a", 1)


def test_adding_together_loses_nothing(url: str) -> None:
    def count() -> None:
        store = TorchStore(open_store(url))
        for _ in range(15):
            store.add("n", 1)
            store.append("text", "x")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = TorchStore(open_store(url)).clone()
    assert (store.add("n", 0), store.get("text")) == (60, b"x" * 60)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=50), st.text("a_.-/0A2f", max_size=8))
def test_different_keys_stay_different(one: str, other: str) -> None:
    for key in (one, other):
        check_key(encode(key))
        assert len(encode(key)) <= LONGEST
    assert (encode(one) == encode(other)) == (one == other)
    assert encode(one * 99) != encode(other * 99) or one == other or not one + other or one * 99 == other * 99


# ---- rooms -----------------------------------------------------------------------------------------------------------


class Rank(threading.Thread):
    def __init__(self, url: str, rank: int, size: int = 3, timeout: float = 30) -> None:
        super().__init__()
        self.arguments, self.room, self.error = (open_store(url), rank, size, timeout), "", ""
        self.start()

    def run(self) -> None:
        try:
            self.room = generations.join(*self.arguments)
        except TimeoutError as error:
            self.error = str(error)


def test_a_rank_that_died_while_it_waited_is_not_let_in(url: str) -> None:
    open_store(url).set("ranks/1", b'{"number": "of a dead one", "room": ""}')
    leader, second = Rank(url, 0), Rank(url, 2)
    open_store(url).watch("round", 30)  # rank 0 has called the dead one
    first = Rank(url, 1)
    for rank in (leader, first, second):
        rank.join()
    assert leader.room and {leader.room, first.room, second.room} == {leader.room}


def test_a_missing_rank_is_named(url: str) -> None:
    leader, other = Rank(url, 0, 2, 0.05), Rank(url, 2, 3, 0.05)
    leader.join()
    other.join()
    assert leader.error == "rank 1 has not come in time"
    assert other.error == "rank 2 of 3 was not called by rank 0 in time"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", "rank is missing"),
        ("?rank=0", "world_size is missing"),
        ("?rank=x&world_size=2", "rank = 'x': must be a whole number"),
        ("?rank=2&world_size=2", "rank = 2: must be from 0 to world_size - 1 = 1"),
    ],
)
def test_rank_and_size_are_asked_for(query: str, expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        next(rendezvous(f"redis://127.0.0.1:1{query}"))


# ---- torchrun's state ------------------------------------------------------------------------------------------------


def test_a_state_is_replaced_by_a_client_that_has_seen_it(url: str) -> None:
    one, two = (StoreBackend(open_store(url), 60) for _ in range(2))
    assert one.get_state() is None
    first = one.set_state(b"first")
    assert first is not None and first[0] == b"first" and first[2]
    assert two.set_state(b"second") == (b"first", first[1], False)
    second = two.set_state(b"second", first[1])
    assert second is not None and second[0] == b"second" and second[2]
    assert one.set_state(b"late", first[1]) == (b"second", second[1], False)
    assert one.set_state(b"late", "no token of ours") == (b"second", second[1], False)
    assert one.get_state() == second[:2]
    assert one.born == two.born != "none"


def test_a_state_goes_when_no_client_writes_it(url: str) -> None:
    backend = StoreBackend(open_store(url), 0.05)
    backend.set_state(b"state")
    until = time.monotonic() + 20
    while backend.get_state() is not None:
        assert time.monotonic() < until


def test_what_was_read_last_serves_while_the_store_is_away(url: str, caplog: pytest.LogCaptureFixture) -> None:
    class Away:
        def __getattr__(self, name: str) -> object:
            raise StoreError("store is away")

    backend = StoreBackend(open_store(url), 60)
    backend.set_state(b"state")
    backend._store = Away()  # type: ignore[assignment]
    assert [(backend.get_state() or (b"",))[0] for _ in range(2)] == [b"state"] * 2
    assert caplog.text.count("store is away; going on without it") == 1
    with pytest.raises(RendezvousConnectionError, match="store is away"):
        backend.set_state(b"new", b"token")
    with pytest.raises(RendezvousConnectionError, match="store is away"):
        StoreBackend(Away(), 60).get_state()  # type: ignore[arg-type]


def test_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOPOTRAIN_RENDEZVOUS", raising=False)
    assert address("host:1/2") == "redis://host:1/2"
    assert address(" rediss://host ") == "rediss://host"
    with pytest.raises(ValueError, match=re.escape("needs --rdzv-endpoint=HOST:PORT, or a redis:// URL in TOPOTRAIN_")):
        address("")
    with pytest.raises(ValueError, match=re.escape("tcp://: must be HOST[:PORT][/DB], redis://")):
        address("tcp://host:1")
    monkeypatch.setenv("TOPOTRAIN_RENDEZVOUS", "redis://there")
    assert address("") == "redis://there"


@pytest.mark.journey
def test_a_wrong_endpoint_or_password_is_reported_at_once(server: str) -> None:
    def start(endpoint: str, **conf: str) -> None:
        create(RendezvousParameters("redis", endpoint, "id", 1, 1, **conf))

    with pytest.raises(RendezvousConnectionError, match=r"store redis://127\.0\.0\.1:1: .*refused"):
        start("127.0.0.1:1")
    where = server.rpartition("@")[2]
    with pytest.raises(RendezvousConnectionError, match=r"store redis://127\.0\.0\.1:\d+: .*[Aa]uthenticat"):
        start(where)
    with pytest.raises(RendezvousConnectionError, match="invalid username-password pair") as told:
        start(f"redis://:wrong-word@{where}")
    assert "wrong-word" not in str(told.value)
    with pytest.raises(ValueError, match="--rdzv-endpoint: rendezvous 'redis://host:x'"):
        start("host:x")
    with pytest.raises(ValueError, match="read_timeout=-1: must be a whole number above 0"):
        start(where, read_timeout="-1")
    with pytest.raises(DistStoreError, match="invalid username-password pair"):
        next(rendezvous(f"redis://:wrong-word@{where}?rank=0&world_size=1"))


# ---- whole jobs ------------------------------------------------------------------------------------------------------


def fence(language: str) -> str:
    text = (ROOT / "docs" / "torch-store.md").read_text(encoding="utf-8")
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return str(block)


@pytest.fixture
def shells(tmp_path: Path, warm_at: str) -> Iterator[Shells]:
    with open_shells(tmp_path, warm_at) as opened:
        opened.environ["GLOO_SOCKET_IFNAME"] = "lo"
        yield opened


@pytest.mark.journey
def test_the_script_of_the_page_meets_on_redis_and_leaves_nothing(server: str, shells: Shells, tmp_path: Path) -> None:
    code = fence("python")
    assert "redis://127.0.0.1:6379/0" in code
    # What is destroyed with the model joins a thread of Gloo that may wait for the interpreter's lock (tcp://, too).
    leaves = "from topotrain.launch.runtime.child_channel import end_process\nend_process(0)\n"
    code = code.replace("redis://127.0.0.1:6379/0", f"{server}/2") + leaves
    (tmp_path / "page.py").write_text(code)
    ranks = [shells.python("page.py", RANK=str(rank)) for rank in range(2)]
    gradients = [float(text.split()[-1]) for text in ended(ranks, [0, 0])]

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    for rank in range(2):
        torch.manual_seed(1 + rank)
        (model(torch.randn(8, 4)).square().mean() / 2).backward()
    assert gradients == pytest.approx([model.weight.grad.sum().item()] * 2, abs=1e-6)
    left = open_store(f"{server}/2?job=mine").keys()
    # Rank 0 has taken its values along, so the same URL serves again.
    assert [key for key in left if "/room-" in key] == []


@pytest.mark.journey
def test_torchrun_starts_all_anew_after_a_worker_was_killed(server: str, shells: Shells, tmp_path: Path) -> None:
    _, *words = fence("sh").replace("127.0.0.1:6379", "").split()
    assert words[-1] == "train.py"
    command = ["-m", "torch.distributed.run", *words[:-1], "--local-addr=127.0.0.1", "--no-python"]
    program = [
        *client(shells.warm_at),
        str(ROOT / "tests" / "programs" / "torch_elastic.py"),
        str(tmp_path),
        "--kill-at=3",
    ]
    # Without an endpoint, the URL with the password comes from the environment.
    both = [shells.python(*command, *program, TOPOTRAIN_RENDEZVOUS=f"{server}/3") for _ in range(2)]
    texts = ended(both, [0, 0])
    lives = sorted((tmp_path / "lives").read_text().splitlines())
    assert lives == [f"rank {rank} of 2 from step {step}" for rank in range(2) for step in (0, 3)], (lives, texts)

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    for name, tensor in torch.load(tmp_path / "saved.pt")["model"].items():
        assert torch.allclose(tensor, model.state_dict()[name], rtol=0, atol=1e-6), name
