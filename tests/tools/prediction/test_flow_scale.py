"""10,000 nodes on one core: less than a minute, and less than 2 GB."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from topotrain.tools.prediction.flow.growth_curves import FRAMEWORKS

ROOT = Path(__file__).parents[3]
NODES = 10_000
MOST_S, MOST_BYTES = 60.0, 2e9
PROGRAM = """
import json, resource, sys, time
from topotrain.config.job import Link
from topotrain.tools.prediction.flow.growth_curves import block, reference_probe
from topotrain.tools.prediction.flow_model import predict_flow
from topotrain.tools.prediction.machines import Machines
began = time.process_time()
found = predict_flow(block(sys.argv[1], int(sys.argv[2])), reference_probe(), Machines(link=Link(bandwidth=25e3)))
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([time.process_time() - began, used.ru_maxrss * 1024, found.samples_per_s, found.processes]))
"""


@pytest.mark.journey
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_ten_thousand_nodes(framework: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, framework, str(NODES)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    seconds, memory, samples_per_s, processes = json.loads(ended.stdout)
    # Seconds of the processor, so that what else runs on the machine does not count.
    assert seconds < MOST_S
    assert memory < MOST_BYTES
    assert processes >= NODES
    assert samples_per_s > 0
