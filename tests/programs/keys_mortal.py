"""Ten steps of a key-value store, in the middle of which worker 1 kills itself, once.

MARK: the file that says that it has done so.
"""

import os
import signal
import sys
from pathlib import Path

import torch

import topotrain as tt

mark = Path(sys.argv[1])
kv = tt.kvstore.create("dist_sync")
kv.init("w", torch.zeros(3, 4))
kv.set_optimizer(tt.kvstore.SGD(lr=1.0))
value = torch.zeros(3, 4)
for step in range(10):
    kv.push("w", -torch.ones(3, 4))
    kv.pull("w", out=value)
    if kv.rank == 1 and step == 4 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
if kv.rank == 0:
    print("value", value.unique().tolist(), flush=True)
