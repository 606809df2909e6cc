"""Workers that leave a synchronous job and join it while it runs: every sample counts as often as the script asked."""

import pytest
from shop import ALLREDUCE, SANDBLASTER, Ended, Shop

pytestmark = pytest.mark.journey

SUM = "on_failure: kContinue reduce: kSum"


def resized(shop: Shop, cluster: str, changes: str, extra: str = "") -> Ended:
    return shop.run(cluster, "resized.py", str(shop.folder / "job"), changes, extra=f"{SUM} {extra}")


@pytest.mark.parametrize("cluster", [SANDBLASTER, ALLREDUCE], ids=["sandblaster", "allreduce"])
def test_a_worker_joins_and_two_leave(shop: Shop, cluster: str) -> None:
    ended = resized(shop, cluster, "1,-2")
    ended.check_ledger(3)
    print(ended.err, ended.report["changes"])
    assert [(change["what"], change["workers"]) for change in ended.report["changes"]] == [
        ("1 worker joins", 4),
        ("2 workers leave", 2),
    ]
    assert all(change["waited_s"] > 0 and change["step"] > 0 for change in ended.report["changes"])
    assert ended.report["incidents"] == []
    assert len(ended.report["own_step_s"]) <= 2 and len(ended.report["layout"]["units"][0]["workers"]) == 1
    assert "1 worker joins; the job goes on behind step" in ended.err
    assert "after that change" in ended.err
    log = (ended.workspace / "logs" / "worker-0-1.log").read_text()
    assert "the job goes on with nworkers_per_group: 2" in log
