"""What each rank of test_stages.py does: ``stage_ranks.py FOLDER WHAT...``."""

from __future__ import annotations

import faulthandler
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nlp.bert import Bert, BertConfig
from nlp.distilbert import DistilBert, DistilBertConfig
from nlp.tasks import FillMask, SentenceEmbedding, TextClassification
from nlp.transformer import ClassifierConfig, TransformerClassifier
from zoo import cards
from zoo.data.loader import Step
from zoo.data.rows import ListRows
from zoo.errors import ConfigError
from zoo.training import distributed
from zoo.training.recipe import SGD, AdamW, Linear, Recipe
from zoo.training.run import make_batches, train
from zoo.training.stages import Pipelined
from zoo.training.state import Run

CPU = torch.device("cpu")
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a", "very", "no")
SMALL: dict[str, Any] = {
    "vocab_size": len(WORDS), "embed_dim": 8, "num_layers": 4, "num_heads": 2, "mlp_dim": 16,
}  # fmt: skip
STILL = {**SMALL, "dropout": 0.0}  # other ranks drop others
CARD = f"""
model = "nlp.bert:Bert"
task = "nlp.tasks:TextClassification"
summary = "A small network for tests."
paper = "https://arxiv.org/abs/1810.04805"
parameters = 1
head = ["classifier", "bert.pooler"]
[config]
task = "text-classification"
{"".join(f"{key} = {value}{chr(10)}" for key, value in STILL.items())}
[inputs.input_ids]
dtype = "int64"
shape = ["batch", "tokens"]
[outputs.logits]
dtype = "float32"
shape = ["batch", "num_classes"]
[weights.small]
config = {{ num_classes = 2 }}
licence = "MIT"
files = [
    {{ name = "tiny.small.safetensors", sha256 = "SHA" }},
    {{ name = "words.txt", sha256 = "WORDS" }},
]
preprocessing = {{ tokenizer = "words.txt", max_length = 16 }}
"""
RECIPE = Recipe(
    strategy="pipeline",
    config={"num_classes": 2},
    epochs=2.0,
    batch_size=5,
    microbatches=3,
    optimizer=AdamW(lr=1e-2),
    schedule=Linear(warmup=0.2),
    clip_norm=0.5,
    ema=0.9,
    layer_decay=0.9,
    freeze=2,
    freeze_epochs=1.0,
    checkpoint_every=2,
    evaluate_every=3,
    keep=9,
)


def models() -> dict[str, tuple[torch.nn.Module, type]]:
    """One of each kind of head, and of each file of the family, with its task."""
    torch.manual_seed(0)
    return {
        "classes": (Bert(BertConfig(**STILL, task="text-classification")), TextClassification),
        "words": (Bert(BertConfig(**STILL, task="fill-mask")), FillMask),
        "vectors": (
            DistilBert(DistilBertConfig(**STILL, task="sentence-embedding")),
            SentenceEmbedding,
        ),
        "encoder": (TransformerClassifier(ClassifierConfig(**STILL)), TextClassification),
        "pre-norm": (
            TransformerClassifier(ClassifierConfig(**STILL, norm_first=True)),
            TextClassification,
        ),
    }


def batch_of(kind: str, sizes: list[tuple[int, int]]) -> list[dict[str, torch.Tensor]]:
    """Microbatches of some (rows, tokens); the last token of every second row is padding."""
    made = []
    for number, (rows, tokens) in enumerate(sizes):
        chance = torch.Generator().manual_seed(number)
        ids = torch.randint(5, len(WORDS), (rows, tokens), generator=chance)
        mask = torch.ones_like(ids)
        mask[::2, -1] = 0
        target = torch.arange(rows) % 2
        if kind == "words":
            target = torch.where(mask == 1, ids, -100)
        if kind == "vectors":
            target = torch.arange(rows // 2) * 1.5
        made.append({"input_ids": ids, "attention_mask": mask, "target": target})
    return made


def gradients() -> dict[str, Any]:
    """Gradient, loss and norm of one step of each model, and what it then answers."""
    from zoo.training.loop import train_step

    found = {}
    for kind, (model, task_class) in models().items():
        task = task_class.__new__(task_class)  # its loss needs neither card nor tokenizer
        recipe = Recipe(
            strategy="pipeline",
            optimizer=SGD(lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0),
            microbatches=3,
        )
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        rows = ListRows("rows", [("", 0)] * 8)
        batches = make_batches(rows, task, recipe, CPU)
        run = Run(model, task, recipe, batches, Path(), device=CPU)
        run.settle()
        run.wrapped.train()
        train_step(run, Step(0, 0, batch_of(kind, [(4, 5), (2, 7), (2, 3)]), 8))
        whole = distributed.full_state(model)
        inputs = {k: t for k, t in batch_of(kind, [(3, 6)])[0].items() if k != "target"}
        with torch.inference_mode():
            answer = run.answering.eval()(**inputs)
        found[kind] = {
            "gradient": {n: (before[n] - whole[n]).tolist() for n in before},
            "loss": run.position.loss_sum / run.position.loss_count,
            "norm": run.norm,
            "answer": answer.tolist(),
            "held": sum(p.numel() for p in model.parameters() if not p.is_meta),
        }
    return found


def refused() -> list[str]:
    """What cannot be cut."""
    said = []
    for model in (torch.nn.Linear(2, 2), Bert(BertConfig(**{**SMALL, "num_layers": 1}))):
        try:
            Pipelined(model, CPU)
        except ConfigError as error:
            said.append(error.line)
    return said


def learn(folder: Path, out: Path) -> None:
    """A whole run, or the rest of one."""
    cards.CARDS = folder / "cards"
    table = str(folder / "texts.csv")
    recipe = replace(RECIPE, data=table, validation=table)
    train("tiny.small", recipe, out, trackers=(), quiet=True, device="cpu")


def main(folder: Path, *jobs: str) -> None:
    """Each job is ``gradients``, or the folder of a run."""
    torch.set_num_threads(1)
    with distributed.start("cpu", timeout_s=120):
        world = distributed.world_size()
        for job in jobs:
            if job != "gradients":
                learn(folder, folder / job)
                continue
            found = distributed.gather(gradients())
            said = refused() if world > 1 else []
            if distributed.is_main():
                text = json.dumps({"steps": found, "refused": said})
                (folder / f"gradients-{world}.json").write_text(text)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(500, exit=True)  # a hang shows where, and fails
    main(Path(sys.argv[1]), *sys.argv[2:])
