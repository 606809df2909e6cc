"""Names of devices: what they mean, what they add up to, what exists, and what a scope leaves on modules."""

import copy

import pytest
from torch import nn

from topotrain.config.job import ConfigError
from topotrain.parallel.capture.device_scopes import PLACE, DeviceScope, complete, current, parse, place, scope
from topotrain.training.parameters.flat_parameters import HOME


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", DeviceScope()),
        ("/job:worker/task:1", DeviceScope("worker", None, 1)),
        ("/task:1/job:worker", DeviceScope("worker", None, 1)),
        ("/job:ps/replica:0/task:2/device:CPU:0", DeviceScope("ps", 0, 2, "CPU", 0)),
        ("/cpu:0", DeviceScope(device_type="CPU", device_index=0)),
        ("/gpu:1", DeviceScope(device_type="GPU", device_index=1)),
        ("/job:worker/task:*/device:GPU:*", DeviceScope("worker", device_type="GPU")),
    ],
)
def test_names_are_read(text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("worker:1", "no such part as 'worker:1'"),
        ("/job:worker/tsk:1", "no such part as '/tsk:1'"),
        ("/job:worker/task:1x", "it has no such part"),
        ("/task:1/task:2", "two parts /task"),
        (3, "must be like"),
    ],
)
def test_what_is_no_name_is_refused(text, told):
    with pytest.raises(ConfigError, match=told):
        parse(text)


def test_the_inner_name_adds_to_the_outer():
    inner = parse("/task:1").within(parse("/job:worker/task:0/cpu:0"))
    assert inner == DeviceScope("worker", None, 1, "CPU", 0)
    assert parse(str(inner)) == inner


def test_completed():
    assert complete(parse("/task:1"), 2, 1) == DeviceScope("worker", 0, 1, "CPU", 0)
    assert complete(parse("/gpu:0"), 2, 1, ("GPU",)) == DeviceScope("worker", 0, None, "GPU", 0)
    assert complete(parse("/job:ps/task:2"), 1, 3, ("GPU",)) == DeviceScope("ps", 0, 2, "CPU", 0)


@pytest.mark.parametrize(
    "text",
    ["/job:worker/task:2", "/job:master/task:0", "/replica:1", "/gpu:0", "/cpu:1", "/job:ps/task:1", "/job:ps/gpu:0"],
)
def test_what_does_not_exist_is_refused_with_a_list(text):
    with pytest.raises(ConfigError, match=r"/job:worker/task:0 to task:1, /job:ps/task:0, each with CPU:0"):
        complete(parse(text), 2, 1)


def test_a_scope_is_noted_on_what_is_made_inside():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            with scope("/job:worker"):
                with scope("/task:1"):
                    self.inner = nn.Linear(2, 2)
                    self.act = nn.ReLU()
                    with scope(None):
                        self.free = nn.Linear(2, 2)
                with scope("/task:0"):
                    self.again = nn.Sequential(nn.Linear(2, 2))
                    self.around = nn.Sequential(self.inner, nn.ReLU())  # what was made elsewhere keeps its scope
            self.outside = nn.Linear(2, 2)

    net = copy.deepcopy(Net())
    noted = {name: getattr(module, PLACE, None) for name, module in net.named_modules()}
    one, zero = "/job:worker/task:1", "/job:worker/task:0"
    assert noted == {
        "": None,
        "inner": one,
        "act": one,
        "free": None,
        "again": zero,
        "again.0": zero,
        "around": zero,
        "around.1": zero,
        "outside": None,
    }
    assert current() is None


def test_a_server_is_home_to_parameters():
    with scope("/job:ps/task:1"):
        made = nn.Linear(2, 2)
    assert {getattr(p, HOME) for p in made.parameters()} == {1}
    assert not hasattr(made, PLACE)
    place(made, "/job:ps/task:0")
    assert {getattr(p, HOME) for p in made.parameters()} == {0}


def test_place_counts_more_than_a_scope():
    with scope("/job:worker/task:0"):
        made = nn.Linear(2, 2)
    assert getattr(place(made, "/job:worker/task:1"), PLACE) == "/job:worker/task:1"
    with pytest.raises(ConfigError, match="must name a task"):
        place(made, "/job:worker")
    with pytest.raises(ConfigError, match=r"must be a torch\.nn\.Module"):
        place("made", "/job:worker/task:1")


def test_a_scope_ends_with_an_error_too():
    with pytest.raises(ZeroDivisionError), scope("/job:worker/task:1"):
        raise ZeroDivisionError
    assert current() is None
    assert not hasattr(nn.Linear(2, 2), PLACE)
