"""Which weights files go into which wheel: over 10 MB into refzoo-weights, others into refzoo.

Both wheels install them into ``weights/`` beside ``zoo/``, where the checkout has them too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LARGE = 10_000_000  # bytes


class SplitWeights(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the weights files of one kind; `large` in the hook's table says which."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Choose by size; an editable install uses the checkout's folder as it is."""
        if version == "editable":
            return
        folder = Path(self.root, self.config["folder"]).resolve()
        for path in sorted(folder.glob("*.safetensors")):
            if (path.stat().st_size > LARGE) is self.config["large"]:
                build_data["force_include"][str(path)] = f"weights/{path.name}"
