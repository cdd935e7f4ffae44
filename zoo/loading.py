"""From a file's tensors to a model: plan on names, shapes and dtypes first, allocate afterwards.

The skeleton is built on the meta device, so nothing is allocated or initialised that the file
replaces; then the file's tensors are assigned. Every tensor of the model has exactly one origin,
written in the `LoadReport`; a random one needs the caller's word (other classes or another task)
and a place under the card's `head`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from zoo.errors import CardError, WeightsError, shown
from zoo.tensorfile import TensorInfo, torch_dtype
from zoo.weights import Stored

COUNTER = "num_batches_tracked"  # older files lack it; it matters only to norms without a momentum


@dataclass(frozen=True)
class LoadReport:
    """Where every tensor of a loaded model came from."""

    model: str
    source: str  # a place, or "random"
    sha256: str | None = None
    verified: str = "no file"
    tensors: Mapping[str, str] = field(default_factory=dict)  # name in the model -> origin
    fresh: tuple[str, ...] = ()  # initialised anew
    adapted: tuple[str, ...] = ()  # changed to fit the input channels
    absent: tuple[str, ...] = ()  # counters that the file lacks, set to 0
    dropped: tuple[str, ...] = ()  # stored, and declared as not needed
    renamed: Mapping[str, str] = field(default_factory=dict)  # stored name -> name in the model
    prefix: str = ""  # stripped from all stored names
    notes: tuple[str, ...] = ()  # sources that came first and did not verify

    def __str__(self) -> str:
        """The report in a few lines."""
        count = len(self.tensors) - (0 if self.source == "random" else len(self.fresh))
        total = f"{self.model}: {count} of {len(self.tensors)} tensors"
        lines = [f"{total} from {self.source} ({self.verified})"]
        if self.prefix:
            lines.append(f"prefix stripped from all names: {self.prefix}")
        for title, names in (
            ("initialised anew", self.fresh),
            ("adapted to the input channels", self.adapted),
            ("absent in the file, set to 0", self.absent),
            ("in the file, not needed", self.dropped),
        ):
            if names:
                more = f" and {len(names) - 4} more" if len(names) > 4 else ""
                lines.append(f"{title}: {', '.join(names[:4])}{more}")
        return "\n".join([*lines, *self.notes])


@dataclass(frozen=True)
class Plan:
    """Which stored tensor goes where, decided before anything is allocated."""

    sources: dict[str, str]  # name in the model -> stored name
    duplicates: dict[str, str]  # a second stored copy of a tied tensor -> the copy that is used
    fresh: tuple[str, ...]
    adapted: tuple[str, ...]
    absent: tuple[str, ...]
    dropped: tuple[str, ...]
    prefix: str


def load_into(
    skeleton: Any,
    stored: Stored,
    *,
    name: str,
    head: tuple[str, ...],
    new_head: bool,
    stored_channels: int | None,
    dtype: torch.dtype | None,
) -> LoadReport:
    """Fill a skeleton on the meta device from a file; afterwards nothing of it is on meta.

    Args:
        skeleton: Model built under `skeleton_of`.
        stored: The open file.
        name: What to call the model in messages.
        head: Prefixes of the names that may be fresh.
        new_head: The caller asked for other classes or another task.
        stored_channels: Input channels of the stored network, where the caller asked for another
            number; the family's `adapt_input` converts.
        dtype: Of every floating-point tensor, but of buffers in float64; None widens 16-bit ones to
            float32.

    Raises:
        WeightsError: The file does not fit. Its first line names the first tensor, the details all.
    """
    plan = make_plan(
        skeleton,
        stored.header.tensors,
        name=name,
        head=head,
        new_head=new_head,
        stored_channels=stored_channels,
    )
    expected = skeleton.state_dict()
    # Statistics that a model keeps in float64 stay what they are.
    double = {s for own, s in plan.sources.items() if expected[own].dtype == torch.float64}
    floats = {
        source: torch.float64 if source in double else dtype or torch.float32
        for source, info in stored.header.tensors.items()
        if torch_dtype(info.dtype).is_floating_point
    }
    held = stored.tensors(floats, anywhere=_looked_up(skeleton, plan))
    _same(plan.duplicates, held, name)
    tensors = {own: held[source] for own, source in plan.sources.items()}
    if plan.adapted:
        changed = skeleton.adapt_input(tensors, stored_channels)
        tensors |= {own: changed[own] for own in plan.adapted}
    _assign(skeleton, tensors, plan.absent)
    if plan.fresh:
        _initialise(skeleton, plan.fresh, dtype)
    restore_buffers(skeleton)
    origins = {
        own: f"{stored.source}: {source}" + (" (adapted)" if own in plan.adapted else "")
        for own, source in plan.sources.items()
    }
    origins |= dict.fromkeys(plan.fresh, "fresh") | dict.fromkeys(plan.absent, "0")
    return LoadReport(
        model=name,
        source=stored.source,
        sha256=stored.sha256,
        verified=stored.verified,
        tensors=origins,
        fresh=plan.fresh,
        adapted=plan.adapted,
        absent=plan.absent,
        dropped=plan.dropped,
        renamed={source: own for own, source in plan.sources.items() if source != own},
        prefix=plan.prefix,
        notes=stored.notes,
    )


def make_plan(
    skeleton: nn.Module,
    stored: Mapping[str, TensorInfo],
    *,
    name: str,
    head: tuple[str, ...] = (),
    new_head: bool = False,
    stored_channels: int | None = None,
) -> Plan:
    """Decide the origin of every tensor from the header alone; arguments as in `load_into`."""
    expected = skeleton.state_dict(keep_vars=True)
    first = tied(expected)
    prefix, own_names, dropped = _match(skeleton, stored, expected)

    sources: dict[str, str] = {}
    duplicates: dict[str, str] = {}
    unexpected: list[str] = []
    for source, own in own_names.items():
        if own not in expected:
            unexpected.append(source)
        elif (canonical := first[own]) in sources:
            duplicates[source] = sources[canonical]
        else:
            sources[canonical] = source

    info = {own: stored[source] for own, source in sources.items()}
    adapted = _adapted(skeleton, info, expected, stored_channels)
    missing = [own for own in expected if first[own] == own and own not in sources]
    absent = tuple(own for own in missing if own.endswith(COUNTER))
    missing = [own for own in missing if own not in absent]
    wrong = [
        own for own, tensor in info.items() if not _fits(tensor, expected[own], adapted.get(own))
    ]
    fresh: tuple[str, ...] = ()
    for part in head if new_head else ():  # a head is fresh as a whole, and each on its own
        part_of = [own for own in expected if first[own] == own and under(own, (part,))]
        fits = [own for own in part_of if own in info and own not in wrong]
        output = part_of[-1].rpartition(".")[0] if part_of else ""
        if any(own.rpartition(".")[0] == output for own in fits):
            continue  # the file has these very classes: what does not fit is damaged
        left = [source for source, own in own_names.items() if under(own, (part,))]
        fresh += tuple(part_of)
        dropped += tuple(left)
        sources = {own: source for own, source in sources.items() if own not in part_of}
        missing = [own for own in missing if own not in part_of]
        wrong = [own for own in wrong if own not in part_of]
        absent = tuple(own for own in absent if own not in part_of)
        unexpected = [source for source in unexpected if source not in left]
    if missing or unexpected or wrong:
        raise _misfit(name, missing, unexpected, wrong, info, expected, head)
    return Plan(
        sources,
        duplicates,
        fresh,
        tuple(a for a in adapted if a in sources),
        absent,
        dropped,
        prefix,
    )


def _match(
    skeleton: nn.Module, stored: Iterable[str], expected: Mapping[str, Any]
) -> tuple[str, dict[str, str], tuple[str, ...]]:
    """Prefix, name in the model of each stored tensor, and declared drops.

    A prefix is stripped only if all names share it and the rest fits the model better than the
    whole.
    """
    convert: Callable[[Iterable[str]], dict[str, str | None]] | None
    convert = getattr(skeleton, "convert_keys", None)
    best: tuple[int, str, dict[str, str | None]] | None = None
    names = list(stored)
    for prefix in _shared_prefixes(names):
        rest = [n[len(prefix) :] for n in names]
        table: dict[str, str | None] = convert(rest) if convert else {n: n for n in rest}
        targets = {own for own in table.values() if own is not None}
        distance = len(targets ^ expected.keys()) + len(rest) - len(set(rest))
        if best is None or distance < best[0]:
            best = distance, prefix, table
    if best is None:
        return "", {}, ()
    _, prefix, table = best
    own_names = {prefix + n: own for n, own in table.items() if own is not None}
    return prefix, own_names, tuple(prefix + n for n, own in table.items() if own is None)


def _shared_prefixes(names: list[str]) -> Iterator[str]:
    """The empty prefix, then every longer one that ends at a dot and that all names share."""
    yield ""
    prefix = ""
    while names and all("." in n[len(prefix) :] for n in names):
        prefix += names[0][len(prefix) :].partition(".")[0] + "."
        if not all(n.startswith(prefix) for n in names):
            return
        yield prefix


def _looked_up(skeleton: nn.Module, plan: Plan) -> set[str]:
    """Stored names of tables only looked up in, and of kernels that are repacked anyway."""
    owners = dict(skeleton.named_modules())
    uses = Counter(id(t) for t in skeleton.state_dict(keep_vars=True).values())
    found = set()
    for own, source in plan.sources.items():
        path, _, attribute = own.rpartition(".")
        owner = owners[path]
        if isinstance(owner, nn.Embedding | _ConvNd) and uses[id(getattr(owner, attribute))] == 1:
            found.add(source)
    return found


def tied(expected: Mapping[str, Tensor]) -> dict[str, str]:
    """Canonical (first) name of each tensor; two names of one parameter share it."""
    first: dict[int, str] = {}
    return {own: first.setdefault(id(tensor), own) for own, tensor in expected.items()}


def _adapted(
    skeleton: Any,
    info: Mapping[str, TensorInfo],
    expected: Mapping[str, Tensor],
    stored_channels: int | None,
) -> dict[str, torch.Size]:
    """Shapes that the family's `adapt_input` gives, asked on meta tensors."""
    if stored_channels is None or not hasattr(skeleton, "adapt_input"):
        return {}
    on_meta = {
        own: torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype), device="meta")
        for own, tensor in info.items()
    }
    try:
        changed: dict[str, Tensor] = skeleton.adapt_input(on_meta, stored_channels)
    except (RuntimeError, KeyError, IndexError):  # the stored layer does not have that form at all
        return {}
    return {
        own: tensor.shape
        for own, tensor in changed.items()
        if info[own].shape != expected[own].shape and info[own].shape[1] == stored_channels
    }


def _fits(stored: TensorInfo, expected: Tensor, adapted: torch.Size | None) -> bool:
    """True if the shape is right and the dtype can become the model's."""
    shape = tuple(stored.shape if adapted is None else adapted)
    dtype = torch_dtype(stored.dtype)
    same_kind = dtype.is_floating_point and expected.dtype.is_floating_point
    return shape == tuple(expected.shape) and (same_kind or dtype == expected.dtype)


def under(own: str, head: tuple[str, ...]) -> bool:
    """True if a name lies under one of the prefixes of a head."""
    return any(own == prefix or own.startswith(prefix + ".") for prefix in head)


def _misfit(
    name: str,
    missing: list[str],
    unexpected: list[str],
    wrong: list[str],
    info: Mapping[str, TensorInfo],
    expected: Mapping[str, Tensor],
    head: tuple[str, ...],
) -> WeightsError:
    """One line with the first fault of each kind and a remedy, then every fault."""

    def has(own: str) -> str:
        return f"{info[own].dtype} {tuple(info[own].shape)}"

    def wants(own: str) -> str:
        return f"{str(expected[own].dtype).removeprefix('torch.')} {tuple(expected[own].shape)}"

    parts = []
    if wrong:
        own = wrong[0]
        parts.append(f"{own} is {has(own)} in the file and {wants(own)} in the model")
    if missing:
        parts.append(f"the file lacks {len(missing)} tensors, first {shown(missing[0], 80)}")
    if unexpected:
        parts.append(f"it has {len(unexpected)} unknown ones, first {shown(unexpected[0], 80)}")
    classes = next(
        (info[own].shape[0] for own in wrong if info[own].shape and under(own, head)), None
    )
    if not missing and not unexpected and classes and all(under(own, head) for own in wrong):
        parts.append(f"pass num_classes={classes}, or other classes for a fresh head")
    if 2 * (len(missing) + len(unexpected) + len(wrong)) > len(expected):
        parts.insert(0, "the file belongs to another architecture")
    details = [
        f"mismatched: {own}: {has(own)} in the file, {wants(own)} in the model" for own in wrong
    ]
    details += [f"missing: {own}" for own in missing]
    details += [f"unexpected: {source}" for source in unexpected]
    return WeightsError(f"{name}: {'; '.join(parts)}", *details)


def _same(duplicates: Mapping[str, str], held: Mapping[str, Tensor], name: str) -> None:
    for copy, used in duplicates.items():
        if held[copy].dtype != held[used].dtype or not torch.equal(held[copy], held[used]):
            raise WeightsError(
                f"{name}: {copy!r} and {used!r} are one tensor in the model and differ"
            )


def _assign(skeleton: nn.Module, tensors: Mapping[str, Tensor], absent: tuple[str, ...]) -> None:
    """Put tensors in the places of the meta ones; a tied parameter stays one object."""
    made: dict[int, nn.Parameter] = {}
    for path, module in skeleton.named_modules():
        prefix = f"{path}." if path else ""
        for own, old in module._parameters.items():
            if old is None:
                continue
            if prefix + own in tensors:
                made[id(old)] = nn.Parameter(tensors[prefix + own], old.requires_grad)
            if id(old) in made:
                module._parameters[own] = made[id(old)]
        for own, buffer in module._buffers.items():
            if prefix + own in tensors:
                module._buffers[own] = tensors[prefix + own]
            elif prefix + own in absent and buffer is not None:
                module._buffers[own] = torch.zeros(buffer.shape, dtype=buffer.dtype)


def _initialise(model: Any, fresh: tuple[str, ...], dtype: torch.dtype | None) -> None:
    """Make the tensors named in `fresh` as an ordinary construction would, and touch no other."""
    for path in dict.fromkeys(own.rpartition(".")[0] for own in fresh):
        module = model.get_submodule(path)
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        before = [dict(table) for table in tables]
        for table in tables:
            for own, old in table.items():
                if old is not None:
                    table[own] = _allocated(old)
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()  # also the running statistics of a norm
        model.init_weights(module)
        module.to(dtype)
        for table, old_table in zip(tables, before, strict=True):
            for own, old in old_table.items():
                if f"{path}.{own}" not in fresh:  # tied to a loaded one
                    table[own] = old


def _allocated(old: Tensor) -> Tensor:
    """A tensor in memory of the form of one on meta."""
    dtype = torch.float32 if old.is_floating_point() else old.dtype
    real = torch.empty(old.shape, dtype=dtype)
    return nn.Parameter(real, old.requires_grad) if isinstance(old, nn.Parameter) else real


def restore_buffers(model: nn.Module) -> None:
    """Make the buffers that no file holds, and see that nothing stayed on the meta device."""
    for module in model.modules():
        if hasattr(module, "init_buffers"):
            module.init_buffers()  # type: ignore[operator]
    left = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if left:
        raise CardError(
            f"{type(model).__name__}: {left[0]!r} is made neither by the weights nor by "
            "init_buffers()"
        )


_lock = threading.Lock()
_depth = 0
_originals: dict[str, Any] = {}


@contextmanager
def skeleton_of() -> Iterator[None]:
    """Modules built in this block lie on the meta device, and initialisers leave them alone.

    Running initialisers on meta tensors costs several times the load itself. `torch.nn.init` is
    shared by all threads, so its functions pass through for every tensor that is not on meta.
    """
    global _depth
    with _lock:
        if _depth == 0:
            for name, function in list(vars(nn.init).items()):
                if name.endswith("_") and not name.startswith("_") and callable(function):
                    _originals[name] = function
                    setattr(nn.init, name, _skip_meta(function))
        _depth += 1
    try:
        with torch.device("meta"):
            yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                for name, function in _originals.items():
                    setattr(nn.init, name, function)
                _originals.clear()


def _skip_meta(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def initialise(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if tensor.is_meta else function(tensor, *args, **kwargs)

    return initialise
