"""PyTorch's own format: a saved `torch.export.ExportedProgram`.

`torch.export.load` reads it, without the classes of the model; what the card says is in the extra
file `METADATA`, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.export.parity import Run
from zoo.export.program import Program, flat

SUFFIX = ".pt2"
PACKAGES: tuple[str, ...] = ()
METADATA = "metadata.json"


def write(program: Program, path: Path, metadata: Mapping[str, Any]) -> None:
    """Save the program; `path` ends with ``.pt2``."""
    text = json.dumps(metadata, ensure_ascii=False)
    torch.export.save(program.exported, str(path), extra_files={METADATA: text})


def run(path: Path) -> Run:
    """The file, read back: named inputs to a tuple of outputs."""
    module = torch.export.load(str(path)).module()

    def call(inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return flat(module(**inputs))

    return call


def read_metadata(path: Path) -> dict[str, Any]:
    """What `write` was given about the model."""
    held = {METADATA: ""}
    torch.export.load(str(path), extra_files=held)
    found: dict[str, Any] = json.loads(held[METADATA])
    return found
