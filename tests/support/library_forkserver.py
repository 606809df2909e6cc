"""A forkserver that has imported the libraries of docs/integrations.md, which takes longer than the training."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from topotrain.launch.agent import forkserver

OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@contextmanager
def served_libraries(folder: Path) -> Iterator[str]:
    """The socket of such a forkserver."""
    for needed in ("transformers", "accelerate", "pytorch_lightning"):
        if find_spec(needed) is None:  # not importorskip: importing takes seconds
            pytest.skip(f"{needed} is not installed: pip install -e '.[dev]'")
    heavy = ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "accelerate", "pytorch_lightning")
    preload = (*forkserver.PRELOAD, "sklearn.datasets", "sklearn.model_selection", *heavy)
    with closing(forkserver.start(folder / "forkserver.log", preload, {**os.environ, **OFFLINE})) as served:
        yield served.path
