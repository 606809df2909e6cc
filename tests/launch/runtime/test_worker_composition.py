"""A worker's process knows every message that it may be sent: an unknown one would end the connection."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from random_frames import every_message

from topotrain.core.protocol import Receiver

ROOT = Path(__file__).parents[3]
PROGRAM = """
import json, topotrain.launch.runtime.prepare_composition, topotrain.launch.runtime.worker_connections
from topotrain.config.job import Cluster
from topotrain.config.topology import layout
from topotrain.core.protocol import KINDS
from topotrain.launch.runtime.worker_composition import client_extensions

client_extensions(layout(Cluster(nworkers_per_group=2, backup=1)))
print(json.dumps(sorted(KINDS)))
"""


@pytest.mark.journey
def test_a_worker_imports_all_messages_that_it_may_be_sent() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    sent = {kind for kind in every_message() if any(route.receiver is Receiver.WORKER for route in kind.ROUTES)}
    assert {kind.KIND for kind in sent} <= set(json.loads(done.stdout)), "imported by no feature of a worker"
    assert len(sent) > 20
