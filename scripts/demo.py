"""The main job on sample input: classify photographs, rank sentences, show a card, load, export."""

from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import zoo

PHOTOS = Path(find_spec("sklearn").submodule_search_locations[0], "datasets", "images")
SENTENCES = [
    "The pilot landed the aircraft in heavy rain.",
    "A plane came down safely in a storm.",
    "She planted tulips along the garden wall.",
    "The bank raised its interest rates again.",
]


def main() -> None:
    """Every step prints what it found."""
    print("1. An ImageNet network looks at two photographs (efficientnet_lite0)")
    classify = zoo.pipeline("efficientnet_lite0")
    photos = [str(PHOTOS / name) for name in ("china.jpg", "flower.jpg")]
    for photo, answer in zip(photos, classify(photos, top_k=3), strict=True):
        print(
            f"   {Path(photo).name}: " + ", ".join(f"{a['label']} {a['score']:.2f}" for a in answer)
        )

    print("2. A BERT ranks sentences by their likeness to the first (all-minilm-l6-v2)")
    embed = zoo.pipeline("all-minilm-l6-v2")
    vectors = embed(SENTENCES)
    for score, text in sorted(
        zip(vectors[1:] @ vectors[0], SENTENCES[1:], strict=True), reverse=True
    ):
        print(f"   {score:5.2f}  {text}")

    print("3. A card")
    card = zoo.card("efficientnet_lite0.imagenet1k")
    print(f"   {card.summary} {card.parameters:,} parameters, {card.weights['imagenet1k'].licence}")
    for metric in card.weights["imagenet1k"].metrics:
        print(f"   {metric.name} = {metric.value:.3f} on {metric.n}: {metric.command}")

    print("4. ResNet-50 with trained weights, and a fresh head for seven classes")
    model = zoo.load("resnet50", pretrained=True, num_classes=7)
    print(f"   logits {tuple(model(torch.rand(1, 3, 64, 64)).shape)}")
    print("   " + str(model.load_report).replace("\n", "\n   "))

    print("5. Export to ONNX, run by ONNX Runtime at sizes it has not seen, compared")
    with TemporaryDirectory() as folder:
        print(
            "   "
            + str(zoo.export("all-minilm-l6-v2", folder, format="onnx")).replace("\n", "\n   ")
        )


if __name__ == "__main__":
    main()
