"""refzoo: a domain model zoo with reference implementations in PyTorch.

``import zoo`` is light: it imports neither torch nor any domain. Each public function is imported
when it is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.cards import card as card
    from zoo.cards import list_models as list_models
    from zoo.cards import list_weights as list_weights
    from zoo.export import export as export
    from zoo.finetuning import finetune as finetune
    from zoo.pipeline import pipeline as pipeline
    from zoo.pipeline import preprocess as preprocess
    from zoo.registry import load as load
    from zoo.saving import save as save

__version__ = "0.1.0"

_API = {
    "card": "zoo.cards",
    "export": "zoo.export",
    "finetune": "zoo.finetuning",
    "list_models": "zoo.cards",
    "list_weights": "zoo.cards",
    "load": "zoo.registry",
    "pipeline": "zoo.pipeline",
    "preprocess": "zoo.pipeline",
    "save": "zoo.saving",
}
__all__ = [*_API]


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module 'zoo' has no attribute {name!r}")
    value = getattr(import_module(_API[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_API})


class _Package(ModuleType):
    """Keeps ``zoo.pipeline`` and ``zoo.export`` the functions, whoever imports those modules.

    The import system binds a submodule to its package when it is first imported; here the public
    function of the same name stays.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _API and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
