"""Weights of other projects become a saved folder of a card's model: ``zoo convert FILE NAME``.

The file is held to the model as strictly as in `zoo.load`, with one difference: no tensor is ever
fresh. Tensors keep their values and types and get the model's own names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo import __version__, cards, files, registry, saving, tensorfile
from zoo.cards import Card, Weights
from zoo.convert import Foreign, read_foreign, read_json
from zoo.errors import ConfigError, WeightsUnavailableError
from zoo.weights import PICKLED, Stored, find_file

if TYPE_CHECKING:
    from torch import nn

    from zoo.loading import Plan


TOKENIZER = "tokenizer.json"  # of Hugging Face tokenizers


@dataclass(frozen=True)
class Converted:
    """What was written, and what became of every tensor of the source."""

    path: Path  # folder, or safetensors file
    model: str  # full name on the card that was written
    kept: tuple[str, ...]
    renamed: Mapping[str, str]  # stored name -> name in the model
    dropped: tuple[str, ...]  # declared by the family as not needed
    tied: Mapping[str, str]  # equal copy of a tensor that has two names -> the copy that was kept
    absent: tuple[str, ...]  # counters that the file lacks, written as 0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line for each tensor, then what was written."""
        lines = [f"kept     {name}" for name in self.kept]
        lines += [f"renamed  {name} -> {own}" for name, own in self.renamed.items()]
        lines += [f"tied     {name} = {used}" for name, used in self.tied.items()]
        lines += [f"dropped  {name} (not needed)" for name in self.dropped]
        lines += [f"zero     {name} (not in the file)" for name in self.absent]
        lines += self.notes
        counts = ", ".join(
            f"{len(names)} {what}"
            for what, names in (
                ("kept", self.kept),
                ("renamed", self.renamed),
                ("tied", self.tied),
                ("dropped", self.dropped),
                ("zero", self.absent),
            )
            if names
        )
        return "\n".join([*lines, f"{self.path}: {self.model}, tensors: {counts}"])


def convert(
    source: str | Path,
    name: str,
    out: str | Path | None = None,
    *,
    task: str | None = None,
    licence: str | None = None,
    **config: Any,
) -> Converted:
    """Write weights of another project as a folder that `zoo.load` opens.

    Args:
        source: A file of `torch.save`, a safetensors file, an index of shards, or a folder as
            Hugging Face publishes it, of which labels and auxiliary files are taken too.
        name: A card's model. With a tag, the folder gets the configuration, preprocessing and
            auxiliary files of that tag; its labels too, if the classes are as many. Licence and tag
            only if the source is, by its hash, the file on the card.
        out: Folder to write, by default one named like the result; or a file, ``*.safetensors``,
            that gets the tensors alone.
        task: Another task of the same family.
        licence: Of the weights.
        **config: Fields of the family's configuration that differ from the card's, such as
            num_classes. What a ``config.json`` beside the tensors states of a family that knows it
            need not be given.

    Raises:
        WeightsError: The source is damaged or does not fit the model; nothing is written.
        UnknownModelError: No such name or tag.
        ConfigError: No such field or task, or `out` is taken by something else.
    """
    from zoo.loading import load_into, make_plan, skeleton_of

    source, target = Path(source), Path(out) if out is not None else None
    if target is not None and target.suffix in PICKLED:
        raise ConfigError(f"{target.name} would be a pickle; give a folder or a *.safetensors file")
    asked = cards.card(name)
    for symbol in (asked.model, asked.task):  # no module is imported under the device "meta"
        registry.symbol(symbol, asked)
    foreign = read_foreign(source)
    stated = _stated(asked, foreign)
    own_task = stated.pop("task", None)
    with skeleton_of():
        model: Any = registry.load(
            name, pretrained=False, task=task or own_task, device="meta", **{**stated, **config}
        )
    header = foreign.header
    plan = make_plan(model, header.tensors, name=name, head=model.card.head)
    stored = Stored(header, lambda *_, **__: foreign.tensors, str(source), None, "not on a card")
    load_into(model, stored, name=name, head=model.card.head, new_head=False, stored_channels=None,
              dtype=None)  # fmt: skip

    hashes = {path: files.sha256_of(path) for path in foreign.files}
    vouched = not (task or config) and _vouches(asked, hashes)
    labels = asked.labels if vouched else _labels(model, foreign)
    model.card = _own_card(asked if vouched else model.card, vouched, _tokenizer(foreign, model))
    origin = {
        "converted_from": ", ".join(path.name for path in hashes),
        "upstream_sha256": ", ".join(hashes.values()),
        "zoo_version": __version__,
    }
    if target is not None and target.suffix == ".safetensors":
        tensorfile.write(target, saving.state_of(model), origin)
        return _report(target, model, header.tensors, plan, ())
    auxiliary, notes = _auxiliary(asked, foreign.folder, model.card.preprocessing)
    folder = saving.write_folder(
        model,
        target if target is not None else Path(model.card.full_name.rpartition("/")[2]),
        tag=model.card.tag,
        labels=labels,
        licence=licence or model.card.weights[model.card.tag].licence,
        origin=origin,
        auxiliary=auxiliary,
    )
    return _report(folder, model, header.tensors, plan, notes)


def _vouches(card: Card, hashes: Mapping[Path, str]) -> bool:
    """True where the card has a tag and pins the hash of this very file."""
    if card.tag is None or len(hashes) != 1:
        return False
    file, found = card.weights[card.tag].files[0], next(iter(hashes.values()))
    return any(found.startswith(pin) for pin in (file.sha256, file.upstream_sha256) if pin)


def _stated(card: Card, foreign: Foreign) -> dict[str, Any]:
    """Fields of the configuration that a Hugging Face folder states, if the family reads them."""
    read = getattr(registry.symbol(card.model, card), "from_transformers", None)
    path = foreign.folder / "config.json" if foreign.folder else None
    found = read_json(path) if read and path and path.exists() else {}
    return dict(read(found)) if read and "model_type" in found else {}


def _tokenizer(foreign: Foreign, model: nn.Module) -> dict[str, Any]:
    """The preprocessing of a text model whose card names none: the tokenizer of the folder."""
    path = foreign.folder / TOKENIZER if foreign.folder else None
    limit = getattr(model.config, "max_length", None)
    if path is None or limit is None or not _belongs(path):
        return {}
    return {"tokenizer": TOKENIZER, "max_length": limit}


def _own_card(card: Card, vouched: bool, tokenizer: Mapping[str, Any]) -> Card:
    """The card of the result: the tag and licence are the card's only if it vouches for them."""
    if vouched:
        return card
    if card.tag:
        old = card.weights[card.tag]
    else:
        old = Weights(files=(), licence="", preprocessing=dict(tokenizer))
    own = replace(old, licence="not stated")
    return replace(card, tag="converted", weights={"converted": own})


def _auxiliary(
    card: Card, folder: Path | None, preprocessing: Mapping[str, Any]
) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Further files of the tag: those beside the source, else those installed; and what is not."""
    if card.tag is None and folder and preprocessing:
        return {TOKENIZER: folder / TOKENIZER}, ()
    if card.tag is None:
        tags = ", ".join(cards.list_weights(card.name))
        hint = f"; a name with a tag brings that of the tag: {tags}" if tags else ""
        return {}, (f"note     {card.name} says nothing of preprocessing{hint}",)
    found: dict[str, Path] = {}
    notes: list[str] = []
    for file in card.weights[card.tag].auxiliary:
        beside = folder / (file.upstream or file.name) if folder else None
        try:
            own = beside if beside and _belongs(beside) else find_file(card, file.name)
            found[file.name] = own
        except WeightsUnavailableError:
            notes.append(f"note     {file.name} is not there; convert the folder that holds it")
    return found, tuple(notes)


def _belongs(path: Path) -> bool:
    """True for a file of its folder. A link out of it could copy a private file into the result.

    The hub's cache links from ``snapshots/REVISION/`` to ``blobs/``; both belong to one repository.
    """
    folder = path.parent.resolve()
    if folder.parent.name == "snapshots":
        folder = folder.parent.parent
    return path.is_file() and path.resolve().is_relative_to(folder)


def _labels(model: nn.Module, foreign: Foreign) -> Sequence[str] | None:
    """Names of the classes: those in Hugging Face's config.json, else those of the card's tag."""
    card = registry.card_of(model)
    classes = getattr(model.config, "num_classes", None)
    if not any("num_classes" in spec.shape for spec in card.outputs.values()):
        return None
    path = foreign.folder / "config.json" if foreign.folder else None
    table = read_json(path).get("id2label") if path and path.exists() else None
    if isinstance(table, dict) and classes and set(table) == {str(i) for i in range(classes)}:
        names = [table[str(i)] for i in range(classes)]
        if names == [f"LABEL_{i}" for i in range(classes)]:  # what stands there for "none"
            return None
        if all(isinstance(name, str) and saving.is_label(name) for name in names):
            return names
    return card.labels if card.labels and len(card.labels) == classes else None


def _report(
    path: Path, model: nn.Module, stored: Mapping[str, Any], plan: Plan, notes: tuple[str, ...]
) -> Converted:
    owns = {source: own for own, source in plan.sources.items()}
    return Converted(
        path=path,
        model=registry.card_of(model).full_name,
        kept=tuple(source for source in stored if owns.get(source) == source),
        renamed={source: owns[source] for source in stored if owns.get(source, source) != source},
        dropped=plan.dropped,
        tied=plan.duplicates,
        absent=plan.absent,
        notes=notes,
    )
