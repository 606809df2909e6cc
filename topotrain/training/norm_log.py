"""`debug: true`: the norm of each parameter and of its gradient, one JSON line per step."""

import json
from pathlib import Path

import torch

from topotrain.config.private_files import create_text
from topotrain.core.client.client import StepOutcome
from topotrain.training.worker import Worker


class NormLog:
    """Writes {"step", "norms": {name: {"value", "grad"}}} after every step; "grad" is null where there is none."""

    def __init__(self, worker: Worker, path: Path) -> None:
        self._worker = worker
        self._file = create_text(path)

    def __call__(self, outcome: StepOutcome | None) -> None:
        norms = {}
        for tensor, described in zip(self._worker.parts.tensors, self._worker.parts.parameters, strict=True):
            if tensor.is_meta:  # another worker of the group holds it
                continue
            gradient = None if tensor.grad is None else float(torch.linalg.vector_norm(tensor.grad))
            norms[described.name] = {"value": float(torch.linalg.vector_norm(tensor.detach())), "grad": gradient}
        self._file.write(json.dumps({"step": self._worker.tally.steps, "norms": norms}) + "\n")
        self._file.flush()
