"""Weights that a run has made become weights of the zoo: a file in half precision, and its card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo import cards, files, registry, tensorfile
from zoo.cards import Card, Weights
from zoo.config import build, plain
from zoo.errors import ConfigError, WeightsError, shown
from zoo.evaluation import write_golden
from zoo.saving import state_of, write_document
from zoo.weights import find_file

if TYPE_CHECKING:
    from torch import Tensor, nn

KEPT = ("trained_by", "command", "seed", "data", "derived_from")  # of the origin, in this order


def publish(folder: str | Path, name: str) -> Path:
    """Write the weights in a folder to ``weights/`` under a name, and what the card says of them.

    The card has a table ``[weights.TAG]`` already, with licence, labels, preprocessing and config
    but without files, as it must have to be trained. They become the default where the card has
    none. The numbers that the run measured are written too; ``zoo evaluate NAME --write`` measures
    them again on the half-precision file.

    Args:
        folder: ``weights/`` of a run, or what `zoo.save` wrote.
        name: As ``resnet18.cifar10``.

    Returns:
        Path of the card.

    Raises:
        ConfigError: The folder's model is not what the card's table describes.
        WeightsError: A parameter does not fit into half precision.
    """
    base, tag = cards.split_name(name)
    card = cards.card(base)
    stated = {**card.weights, **card.planned}.get(tag or "")
    if tag is None or stated is None:
        raise ConfigError(
            f"{shown(name)} is not on the card; write [weights.{tag or 'TAG'}] into "
            f"weights/{base}.toml first"
        )
    model = registry.load(Path(folder), verify="always")
    saved = registry.card_of(model)
    _agree(saved, card, stated, name)
    written = [tensorfile_of(model, f"{base}.{tag}.safetensors", name)]
    made = saved.weights[saved.tag or ""]
    keys = {value: key for key, value in saved.preprocessing.items() if isinstance(value, str)}
    for file in made.auxiliary:
        target = str(stated.preprocessing[keys[file.name]])
        files.write_atomically(cards.CARDS / target, find_file(saved, file.name).read_bytes())
        written.append(cards.CARDS / target)
    path = cards.CARDS / f"{base}.toml"
    _write_table(path, tag, written, made, default=card.default_tag in (None, tag))
    write_golden(name)
    return path


def tensorfile_of(model: nn.Module, file: str, name: str) -> Path:
    """The model's tensors in ``weights/``: parameters in half precision, buffers as they are."""
    parameters = {n for n, _ in model.named_parameters()}
    state: dict[str, Tensor] = {}
    for key, tensor in state_of(model).items():
        small = tensor.half() if key in parameters and tensor.is_floating_point() else tensor
        if not bool(small.isfinite().all()):
            raise WeightsError(f"{name}: {key} has values that half precision does not hold")
        state[key] = small
    path = cards.CARDS / file
    tensorfile.write(path, state, {"model": name})
    return path


def _agree(saved: Card, card: Card, stated: Weights, name: str) -> None:
    """Refuse a folder whose model is not the one that the table describes."""
    auxiliary = [file.name for file in saved.weights[saved.tag or ""].auxiliary]
    shape = registry.config_class(registry.symbol(saved.model, saved), saved)
    listed = card.folder / "labels" / f"{stated.labels}.txt"
    pairs: dict[str, Any] = {
        "model": (saved.model, stated.model or card.model),
        "config": tuple(
            build(shape, values, where=name)
            for values in (saved.config, {**card.config, **stated.config})
        ),
        "labels": (saved.labels, cards.read_labels(listed) if stated.labels else None),
        "preprocessing": (
            {k: v for k, v in saved.preprocessing.items() if v not in auxiliary},
            {
                k: v
                for k, v in stated.preprocessing.items()
                if saved.preprocessing.get(k) not in auxiliary
            },
        ),
    }
    for key, (has, wants) in pairs.items():
        if has != wants:
            raise ConfigError(
                f"the {key} of the folder, {shown(has, 60)}, is not that of {name} on the card, "
                f"{shown(wants, 60)}; train by its card"
            )


def _write_table(
    path: Path, tag: str, written: list[Path], made: Weights, *, default: bool
) -> None:
    """Fill ``[weights.TAG]`` in, leaving every other line of the card as it is."""
    import tomlkit

    document: Any = tomlkit.parse(path.read_text("utf-8"))
    table = document["weights"][tag]
    name = f"{path.stem}.{tag}"
    if default:
        table["default"] = True
    listed = tomlkit.array()
    for file in written:
        entry = tomlkit.inline_table()
        entry.update(
            {"name": file.name, "size": file.stat().st_size, "sha256": files.sha256_of(file)}
        )
        listed.append(entry)
    origin = tomlkit.inline_table()
    origin.update(_origin(made.origin))
    table["files"], table["origin"], table["golden"] = listed, origin, f"{name}.golden.safetensors"
    table.pop("metrics", None)
    if made.metrics:
        table["metrics"] = tomlkit.aot()
        for metric in made.metrics:
            command = metric.command and f"python scripts/evaluate.py {name}"
            table["metrics"].append(tomlkit.item(plain(replace(metric, command=command))))
    write_document(path, document)


def _origin(origin: Mapping[str, Any]) -> dict[str, Any]:
    """Who made the weights, by which command; the whole recipe is in the run's folder."""
    found = dict(origin)
    if "command" not in found and "recipe" in found:
        made = json.loads(found["recipe"])
        found["command"] = f"python scripts/train.py {made['model']}"
    return {key: found[key] for key in KEPT if key in found}
