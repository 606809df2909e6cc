"""Options that describe machines: what is accepted, and the line that refuses the rest."""

import pytest
from made_probe import made_job

from topotrain.config.job import ConfigError, Link, TransportChoice
from topotrain.tools import amounts
from topotrain.tools.prediction.machines import Machines, parse_machines


def test_all_options():
    found = parse_machines("8", "1gbit,1ms", "1x4,3x2.5", "16GB", "30d", "4")
    assert found == Machines(8, 4, Link(bandwidth=1000.0, delay=1.0), {1: 4.0, 3: 2.5}, 16_000_000_000, 30 * 86400.0)
    assert parse_machines() == Machines()


@pytest.mark.parametrize(
    ("option", "text", "accepted"),
    [
        ("hosts", "0", "--hosts = '0': must be a whole number, 1 to 65536"),
        ("hosts", "many", "--hosts = 'many': must be a whole number"),
        ("cores", "1.5", "--cores = '1.5': must be a whole number"),
        ("link", "fast", "--link = 'fast': 'fast' is not a part of a link"),
        ("link", "1gbit,2gbit", "bandwidth is given twice"),
        ("link", "0mbit", "--link = '0mbit': bandwidth must be"),
        ("link", "1gbit,loss=2", "--link = '1gbit,loss=2': loss must be a number >= 0 and < 1"),
        ("link", "1gbit,99999999s", "delay must be at most 3600 s"),
        ("memory", f"{'9' * 400}GB", "must be a size above 0"),
        ("straggler", "1y4", "'1y4' is no straggler: must be such as 1x4"),
        ("straggler", "1x0", "'1x0' is no straggler: must be 1 to 1,000 times slower"),
        ("straggler", "1x0.5", "'1x0.5' is no straggler: must be 1 to 1,000 times slower"),
        ("straggler", "1x9999999999999", "'1x9999999999999' is no straggler: must be 1 to 1,000 times slower"),
        ("straggler", f"{'9' * 5000}x2", "is no straggler: must be such as 1x4"),
        ("straggler", "1x2,1x3", "worker 1 is given twice"),
        ("memory", "16", "--memory = '16': must be a size above 0"),
        ("memory", "0GB", "must be a size above 0"),
        ("mtbf", "never", "--mtbf = 'never': must be a time above 0"),
    ],
)
def test_a_wrong_value_is_one_line(option, text, accepted):
    with pytest.raises(ConfigError) as found:
        parse_machines(**{option: text})
    assert accepted in str(found.value)
    assert "\n" not in str(found.value)


def test_sizes():
    for text, size in (("512MB", 512_000_000), ("2GiB", 2 << 30), ("1tb", 10**12)):
        assert amounts.nbytes("--memory", text) == size
    with pytest.raises(ConfigError):
        amounts.nbytes("--memory", "1.5 GB")


def test_with_a_link_each_unit_has_a_host():
    job = made_job(nworkers_per_group=4, server_worker_separate=True)
    assert Machines().topology(job).hosts == (0,) * 5
    assert Machines(link=Link()).topology(job).hosts == (0, 1, 2, 3, 4)
    assert Machines(hosts=2).topology(job).hosts == (0, 0, 0, 1, 1)
    # More hosts than units are left idle.
    assert Machines(hosts=9).topology(job).hosts == (0, 1, 2, 3, 4)
    with pytest.raises(ConfigError, match="--straggler = 4: must be the number of a worker, 0 to 3"):
        Machines(stragglers={4: 2.0}).topology(made_job(nworkers_per_group=4))


def test_an_emulated_link_of_the_job_is_on_one_machine():
    job = made_job(nworkers_per_group=2, link=Link(bandwidth=100.0))
    found = Machines().with_job(job)
    assert found.emulated
    assert found.link == Link(bandwidth=100.0)
    # Hosts that were given are real ones.
    assert not Machines(link=Link()).with_job(job).emulated


@pytest.mark.parametrize(
    ("machines", "transport", "mbit"),
    [
        (Machines(), "kAuto", 0.0),
        (Machines(), "kTcp", 9000.0),
        (Machines(hosts=2), "kAuto", 9000.0),
        (Machines(link=Link(bandwidth=100.0)), "kAuto", 100.0),
        (Machines(link=Link(bandwidth=40000.0)), "kAuto", 9000.0),
        (Machines(link=Link(delay=20.0)), "kAuto", 9000.0),
    ],
)
def test_slices_follow_the_speed_that_a_job_would_measure(machines, transport, mbit):
    job = made_job(nworkers_per_group=2, server_worker_separate=True, transport=TransportChoice[transport])
    assert machines.topology(job, tcp_mbit=9000.0).link_mbit == mbit
