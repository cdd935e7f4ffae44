"""Write docs/rl.md: returns over training seeds, and speed beside peers."""

from pathlib import Path

import tyro

from rl.bench import SIDES
from rl.policy import RECIPES
from rl.report import page

ROOT = Path(__file__).resolve().parent.parent


def main(
    seeds: int = 10,
    recipes: tuple[str, ...] = tuple(RECIPES),
    sides: tuple[str, ...] = tuple(SIDES),
) -> None:
    """Train and measure; the page grows as numbers come.

    Args:
        seeds: Trainings of each recipe.
        recipes: Names of weights.
        sides: Of the comparison; libraries need the extra "bench".
    """
    lines = []
    for line in page(seeds, recipes, sides):
        print(line, flush=True)
        lines.append(line)
        (ROOT / "docs" / "rl.md").write_text("\n".join(lines) + "\n", "utf-8")


tyro.cli(main)
