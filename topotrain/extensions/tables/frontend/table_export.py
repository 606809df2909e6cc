"""The rows of a table as a folder of files.

It has `index.json` and `part-00000.safetensors`, `part-00001.safetensors`, …. Each part has `ids` (int64, [n]) and
`values` ([n, width]), n touched rows in no order. With parts of about 16 MB neither a writer nor a reader holds the
whole table.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from topotrain.config.job import ConfigError
from topotrain.config.private_files import make_folder, read_text, write_text
from topotrain.training.final_parameters import NotSaved, load_tensors, save_tensors

PART_BYTES = 16 << 20


def write_parts(folder: Path, rows: Iterable[tuple[torch.Tensor, torch.Tensor]], described: dict[str, Any]) -> int:
    """Write rows in parts and return their number. Raises NotSaved."""
    try:
        return _write(folder, rows, described)
    except NotSaved:
        raise
    except OSError as error:
        raise NotSaved(folder, error) from None


def _write(folder: Path, rows: Iterable[tuple[torch.Tensor, torch.Tensor]], described: dict[str, Any]) -> int:
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    # The folder appears under its name when all parts are written.
    make_folder(temporary)
    names, count = [], 0
    for number, (ids, values) in enumerate(_gathered(rows)):
        names.append(f"part-{number:05d}.safetensors")
        save_tensors({"ids": ids, "values": values}, temporary / names[-1], {"format": "pt"})
        count += len(ids)
    write_text(temporary / "index.json", json.dumps({**described, "count": count, "parts": names}, indent=2) + "\n")
    # os.replace refuses a folder that is not empty.
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)
    return count


def _gathered(rows: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Join small pieces into large ones."""
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    size = 0
    for ids, values in rows:
        # A message has at most a few thousand rows, which would be many small files.
        if held and size + ids.nbytes + values.nbytes > PART_BYTES:
            yield _joined(held)
            held, size = [], 0
        if len(ids):
            held.append((ids, values))
            size += ids.nbytes + values.nbytes
    if held:
        yield _joined(held)


def _joined(held: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    return held[0] if len(held) == 1 else (torch.cat([ids for ids, _ in held]), torch.cat([rows for _, rows in held]))


def _fit(ids: torch.Tensor, values: torch.Tensor, width: int) -> bool:
    return ids.dtype is torch.int64 and ids.dim() == 1 and values.shape == (len(ids), width)


def read_parts(folder: Path, width: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (ids, values) of each part of a folder. Raises ConfigError."""
    try:
        index = json.loads(read_text(folder / "index.json"))
        names = [str(name) for name in index["parts"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("table", str(folder), f"must be a folder with index.json and parts: {error}") from None
    for name in names:
        # Only the name: the index must not lead to a file outside of the folder.
        held = load_tensors(folder / Path(name).name)
        if held.keys() != {"ids", "values"} or not _fit(held["ids"], held["values"], width):
            raise ConfigError("table", str(folder / name), f"must hold ids and values of {width} elements")
        yield held["ids"], held["values"]
