"""The ``zoo`` command; ``scripts/X.py`` is ``zoo X``."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from zoo import cards
from zoo.errors import CardError, ConfigError, DataError, ZooError, shown


def list_(pattern: Positional[str] = "*", /, *, domain: str | None = None) -> int:
    """Name, task, parameters and weights of every model.

    Args:
        pattern: Shell pattern for the names.
        domain: vision, nlp, rl, audio, or that of a plug-in.
    """
    names = cards.list_models(pattern, domain=domain)
    if not names:
        raise ConfigError(f"no model's name matches {shown(pattern)}; zoo list shows all")
    broken = 0
    for name in names:
        try:
            card = cards.card(name)
        except CardError as error:
            print(f"zoo: {error.line}", file=sys.stderr)
            broken = broken if "/" in name else 2  # a plug-in's card is a warning
            continue
        tags = " ".join(f"{tag}*" if w.default else tag for tag, w in card.weights.items())
        print(f"{name:20} {card.task.partition(':')[2]:22} {card.parameters:>13,}  {tags}")
    return broken


def show(name: Positional[str], /) -> int:
    """The card of a model: what it is, where its weights are, what was measured.

    Args:
        name: A model, with or without a tag, or the folder of a saved one.
    """
    from zoo.registry import located, saved_card
    from zoo.weights import installed

    place = located(name)
    card = saved_card(place) if isinstance(place, Path) else cards.card(place)
    print(f"{card.full_name}: {card.summary}\npaper       {card.paper}")
    print(f"parameters  {card.parameters:,}\nmodel       {card.model}\ntask        {card.task}")
    for label, specs in (("input", card.inputs), ("output", card.outputs)):
        for key, spec in specs.items():
            print(f"{label:11} {key}: {spec.dtype} {list(spec.shape)}")
    for tag, weights in card.weights.items():
        state = ["installed" if installed(card.with_tag(tag)) else "not installed"]
        state += ["the default"] if weights.default else []
        print(f"\nweights {card.name}.{tag}: {', '.join(state)} ({weights.licence})")
        for file in weights.files:
            print(
                f"  file     {file.name}  sha256 {(file.sha256 or file.upstream_sha256 or '')[:16]}"
            )
        for source in weights.sources:
            print(f"  source   {source.text}")
        for key, value in weights.preprocessing.items():
            print(f"  {key:14} {value}")
        for metric in weights.metrics:
            number = f"{metric.name} = {metric.value:.4f}" + (
                f" on {metric.n:,}" if metric.n else ""
            )
            print(f"  {number}  ({metric.command or metric.source})")
    return 0


def predict(
    name: Positional[str],
    inputs: Positional[tuple[str, ...]],
    /,
    *,
    top_k: int | None = None,
    pair: bool = False,
    out: Path | None = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Answers for files or texts, one line each.

    Args:
        name: A model, or the folder of a saved one.
        inputs: Paths of images, or texts, as the task takes them.
        top_k: How many labels, best first.
        pair: Take the inputs two by two, as pairs of texts.
        out: Where a task that makes files writes them, as the mask of a volume: a file for one
            input; for several a folder, where each has the name of its input.
        as_json: One JSON value a line.
    """
    from zoo.pipeline import pipeline
    from zoo.registry import located

    if not inputs:
        raise ConfigError(f"{name} was given no input; name at least one file or text")
    if pair and len(inputs) % 2:
        raise ConfigError(f"--pair takes an even number of texts, not {len(inputs)}")
    items: list[Any] = list(zip(inputs[::2], inputs[1::2], strict=True)) if pair else list(inputs)
    pipe = pipeline(located(name))
    options: dict[str, Any] = {} if top_k is None else {"top_k": top_k}
    if out is not None:
        if "out" not in getattr(pipe.task, "each", ()):
            raise ConfigError(
                f"{name} does {pipe.task.name}, which writes no files; leave --out out"
            )
        options["out"] = _places(out, inputs)
    answers = list(pipe(items, **options))
    lines = getattr(pipe.task, "lines", None)
    if as_json:
        for answer in answers:
            print(json.dumps(answer, default=lambda value: value.tolist()))
    elif lines:
        print("\n".join(lines(items, answers)))
    else:
        for item, answer in zip(items, answers, strict=True):
            print(
                f"{item}\t"
                + "  ".join(f"{a.get('label', a.get('text'))} {a['score']:.3f}" for a in answer)
            )
    return 0


def _places(out: Path, inputs: Sequence[str]) -> list[Path]:
    """Where the file of each input goes.

    Raises:
        ConfigError: Two inputs have one name.
    """
    if len(inputs) == 1 and not out.is_dir():
        return [out]
    names = [Path(text).name for text in inputs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two inputs are called {shown(twice)}; --out would hold one of them")
    out.mkdir(parents=True, exist_ok=True)
    return [out / name for name in names]


def export(
    name: Positional[str],
    out: Positional[Path],
    /,
    *,
    format: Literal["pt2", "onnx", "transformers"] = "onnx",
) -> int:
    """Write a model for deployment, run the file and compare it with the model.

    Args:
        name: A model, or the folder of a saved one.
        out: Folder for the file.
        format: pt2 (torch.export), onnx, or transformers, which is a folder.
    """
    from zoo.export import export as run
    from zoo.registry import load, located

    chosen = located(name)
    model = load(chosen, pretrained=True if isinstance(chosen, str) else None)
    print(run(model, out, format=format))
    return 0


def convert(
    file: Positional[Path],
    name: Positional[str],
    /,
    *,
    out: Path | None = None,
    task: str | None = None,
    num_classes: int | None = None,
    licence: str | None = None,
) -> int:
    """Make weights of another project a folder that zoo.load opens; every tensor is reported.

    Args:
        file: A .pth, .pt, .bin or .safetensors file, an index of shards, or a Hugging Face folder.
        name: The model that they belong to; a tag brings its preprocessing, labels and tokenizer.
        out: Folder to write, or a .safetensors file for the tensors alone.
        task: Another task of the same family.
        num_classes: Classes of the stored head, where the card says otherwise.
        licence: Of the weights.
    """
    from zoo.importing import convert as run

    config = {} if num_classes is None else {"num_classes": num_classes}
    print(run(file, name, out, task=task, licence=licence, **config))
    return 0


def sign(card: Positional[Path], /, *, key: Path) -> int:
    """Sign a card and the files that belong to it; the signature is written beside the card.

    Args:
        card: A card, or the folder of a saved model.
        key: Ed25519 private key: PEM, or what ssh-keygen -t ed25519 makes, without a passphrase.
    """
    from zoo import signing

    path, key_id = signing.sign(card, key)
    print(f"{path}: signed by key {key_id}")
    return 0


def pull(name: Positional[str], /, *, verify: Literal["auto", "always"] = "auto") -> int:
    """Fetch weights that are not installed, once and by hash; print where their files lie.

    Args:
        name: A model with a tag; the tag may be left out where there is no choice.
        verify: always hashes what is there already, however well known.
    """
    from zoo.pull import pull as run

    print(*run(name, verify=verify), sep="\n")
    return 0


def verify(name: Positional[str | None] = None, /) -> int:
    """Hash all installed and cached weights again; the cache is repaired.

    Args:
        name: A model, with or without a tag; all by default.
    """
    from zoo.verify import verify as run

    print(report := run(name))
    return 1 if report.damaged else 0


def check(name: Positional[str] = "*", /, *, only: tuple[str, ...] = ()) -> int:
    """The contract suite.

    Args:
        name: A model, a shell pattern for several, or the folder of a saved one.
        only: Names of checks; all by default.
    """
    from zoo.check import CHECKS, run_check
    from zoo.registry import located

    saved = isinstance(located(name), Path)
    names = [name] if saved else cards.list_models(name) or [cards.card(name).name]
    results = []
    for model in names:
        for which in only or CHECKS:
            results.append(result := run_check(model, which))
            print(_verdict(result.passed, f"{model} {result.check} {result.message}"))
    failed = sum(not result.passed for result in results)
    print(f"{len(results) - failed} of {len(results)} promises kept")
    return 1 if failed else 0


def evaluate(name: Positional[str], /, *, data: str | None = None, write: bool = False) -> int:
    """Measure again every number on a card.

    Args:
        name: A model; without a tag, its default weights.
        data: Only this set and split, for example stsb/test.
        write: Write the values, and a golden output, into the card.
    """
    from zoo import evaluation

    measured = []
    for result in evaluation.evaluate(name, data=data):
        measured.append(result)
        print(result, flush=True)
    if write:
        print(f"written: {evaluation.write_metrics(measured).name}")
        print(f"written: {evaluation.write_golden(name).name}")
    return 0 if write or all(result.passed for result in measured) else 1


def publish(folder: Positional[Path], name: Positional[str], /) -> int:
    """Put the weights of a run into weights/, in half precision, and fill in their card.

    Args:
        folder: weights/ of a run, or the folder of a saved model.
        name: As resnet18.cifar10; the card has the table [weights.cifar10] already.
    """
    from zoo.publishing import publish as run

    print(f"{run(folder, name)}: {name} is written; zoo evaluate {name} --write measures it")
    return 0


def smoke(names: Positional[tuple[str, ...]] = (), /) -> int:
    """The accuracy smoke test: every number of every card with installed weights, measured again.

    Args:
        names: Models; all with installed weights by default.
    """
    from zoo import evaluation
    from zoo.check import golden_tags, run_check

    chosen = list(names) or [c.full_name for c in evaluation.evaluated_cards()]
    failed = unmeasured = 0
    for name in chosen:
        model = cards.card(name).name
        if golden_tags(model):
            golden = run_check(model, "check_golden")
            print(_verdict(golden.passed, f"{name} golden outputs {golden.message}"), flush=True)
            failed += not golden.passed
        try:
            for result in evaluation.evaluate(name):
                print(_verdict(result.passed, str(result)), flush=True)
                failed += not result.passed
        except DataError as error:
            print(f"zoo: {error.line}", file=sys.stderr, flush=True)
            unmeasured += 1
    print(f"{len(chosen)} sets of weights, {failed} failures, {unmeasured} without their data")
    return 1 if failed else 2 if unmeasured else 0


def train(name: Positional[str], /) -> int:
    """Train a model by its recipe; zoo train NAME.TAG --help lists every flag.

    Args:
        name: Weights to make, for example resnet18.cifar10.
    """
    return _train([name])()


def finetune(model: Positional[str], /, *, data: str) -> int:
    """Fine-tune a model on your own files; zoo finetune MODEL --help lists every flag.

    Args:
        model: A model, with or without a tag, or the folder of a saved one.
        data: A folder with one folder a class, a CSV, TSV, parquet or JSON-lines file.
    """
    from zoo import finetuning

    finetuning.finetune(model, data)
    return 0


def _verdict(passed: bool, text: str) -> str:
    return f"{'ok  ' if passed else 'FAIL'} {text}".rstrip()


COMMANDS: dict[str, Callable[..., int]] = {
    "list": list_,
    "show": show,
    "predict": predict,
    "pull": pull,
    "verify": verify,
    "export": export,
    "convert": convert,
    "sign": sign,
    "check": check,
    "evaluate": evaluate,
    "smoke": smoke,
    "publish": publish,
    "train": train,
    "finetune": finetune,
}


def _train(arguments: list[str]) -> Callable[[], int]:
    from zoo.training.command import command

    return command(arguments)


def _finetune(arguments: list[str]) -> Callable[[], int]:
    from zoo.finetuning import command

    return command(arguments)


# Commands whose flags depend on the model read them by themselves.
PARSERS: dict[str, Callable[[list[str]], Callable[[], int]]] = {
    "train": _train,
    "finetune": _finetune,
}


def main(arguments: list[str] | None = None) -> None:
    """Entry point; exits with 0, 1 (a promise or a number does not hold) or 2 (bad input)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = given[: given.index("--")] if "--" in given else given
    verbose = "-v" in options
    _prepare_streams()
    given = [argument for argument in options if argument != "-v"] + given[len(options) :]
    try:
        status = _parsed(given, verbose)()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` for example, has seen enough
        status = 0
    except (ZooError, OSError) as error:
        print(f"zoo: {error if verbose else _line(error)}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130
    try:
        sys.stdout.flush()
    except OSError:  # what is left cannot be written at the interpreter's end either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


def _prepare_streams() -> None:
    """Streams that take every line: a closed one nothing, a terminal of few letters escapes."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _line(error: ZooError | OSError) -> str:
    if isinstance(error, ZooError):
        return error.line
    reason = error.strerror or str(error) or type(error).__name__
    return ZooError(f"{shown(str(error.filename))}: {reason}" if error.filename else reason).line


def _parsed(given: list[str], verbose: bool) -> Callable[[], int]:
    """The call that the arguments mean.

    Raises:
        ConfigError: They mean none; in one line, where the parser draws a box around its message.
    """
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            if given and given[0] in PARSERS:
                return PARSERS[given[0]](given[1:])
            call: Callable[[], int] = tyro.extras.subcommand_cli_from_dict(
                {name: _deferred(command) for name, command in COMMANDS.items()},
                prog="zoo",
                description=f"{__doc__} -v adds details to errors.",
                args=given,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        lines = [line.strip("│ ") for line in box.getvalue().splitlines() if line[:1] not in "╭╰"]
        text = " ".join(line for line in lines if line.strip("─-")).rstrip(".") or "no command"
        command = f"zoo {given[0]}" if given and given[0] in COMMANDS else "zoo"
        text = text.partition(" For full helptext")[0]
        raise ConfigError(f"{text[:160]}; see {command} --help", text) from None
    return call


def _deferred(command: Callable[..., int]) -> Callable[..., Callable[[], int]]:
    """A command that is parsed now and called later."""

    @functools.wraps(command)
    def bind(*args: Any, **kwargs: Any) -> Callable[[], int]:
        return functools.partial(command, *args, **kwargs)

    return bind
