"""The table of ported recipes in docs/recipes.md: each is verified in float64 and trained on 1 and on 2 workers.

    python jobs/recipes/write_data.py            # the data of some
    python jobs/recipes/table.py [NAME ...]      # all, or these; what is known of the others stays

`seeds` in results.json, qualities of a plain loop and of scaleray, are what the slow tests of the recipes print (`pytest -s`).
Lines are those of the workload, without blank lines, comments, docstrings and imports; the model's own file is not counted.
"""

from __future__ import annotations

import ast
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path("jobs/recipes")
RESULTS, PAGE = ROOT / FOLDER / "results.json", ROOT / "docs/recipes.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
STEPS = 6


@dataclass(frozen=True)
class Recipe:
    """One ported recipe. name: of its config. what: in a reader's words. metric: what it is judged by. obstacles: met on the way,
    kept by hand. counted: names in its file that are the workload; none of a recipe that is only a config. verified_with: options of
    verify beside the usual ones."""

    name: str
    what: str
    metric: str
    obstacles: str = "none"
    counted: tuple[str, ...] = ()
    verified_with: tuple[str, ...] = field(default=())


RECIPES = (
    Recipe("nanogpt", "nanoGPT: a GPT-2 in a file of its own, unchanged", "val/bits_per_byte", "the model gives a mean loss: times the count", ("NanoGPT",)),
    Recipe("image_folder", "image folder: a vision transformer from transformers", "test/accuracy"),
    Recipe("resnet_folder", "image folder: torchvision's ResNet-18", "test/accuracy"),
    Recipe("text_classes", "text classes: a BERT from transformers", "val/accuracy"),
    Recipe("token_tags", "a transformers model with -100 labels, in a subclass", "val/accuracy", counted=("*",)),
    Recipe("chat", "conversations with -100 labels: a GPT-2 from transformers", "val/accuracy"),
    Recipe("parquet_table", "Parquet table through Ray Data's preprocessors", "test/accuracy", counted=("ParquetTable",)),
    Recipe("lightning_digits", "LightningModule and its loaders, unchanged", "val/acc", "none; counted is what was added", ("digits",)),
    Recipe("gan", "GAN: two optimizers and losses", "val/as_asked", "the losses are two methods; each optimizer has its own step", ("Gan",)),
    Recipe("two_towers", "two towers with in-batch negatives", "val/loss", "the loss is over the whole batch: outputs() and batch_loss()", ("TwoTowers",)),
    Recipe("unet_dice", "U-Net with a Dice loss", "val/loss", "the loss is over the whole batch", ("Ink",)),
    Recipe("graph", "graph network with a sparse matrix", "test/accuracy", "a row's loss needs the whole graph, which is a buffer", ("Graph",)),
    Recipe("lstm", "stateful LSTM with truncated backpropagation", "val/bits_per_byte", "the state is declared: CarriedState", ("Bytes",)),
    Recipe("lightning_gan", "LightningModule with manual optimisation: a GAN", "val/as_asked", counted=("gan",)),
    Recipe("lightning_callbacks", "LightningModule with torchmetrics and four callbacks", "val/acc", counted=("classifier",)),
    Recipe("lightning_unet", "LightningModule: a U-Net", "val/iou", counted=("unet",)),
    Recipe("lora_classes", "text classes: adapters of peft on a Llama", "val/accuracy"),
    Recipe("entities", "tags of words: a RoFormer from transformers", "val/f1"),
    Recipe("t5_names", "texts that answer texts: a T5 from transformers", "val/exact_match"),
    Recipe("masked_lm", "masked language model: a RoFormer from transformers", "val/accuracy"),
    Recipe("ema", "an object that needs EMA", "test/accuracy", counted=("*",)),
    Recipe("strokes", "ragged, speech-like sequences: pen strokes by length, in steps of points", "val/accuracy", counted=("Strokes",)),
    Recipe("source_lines", "IterableDataset", "val/accuracy", counted=("SourceLines",)),
)  # fmt: skip


def lines_of(recipe: Recipe) -> int:
    """Lines of the workload: of the named classes, functions and assignments in its file."""
    path = ROOT / FOLDER / f"{recipe.name}.py"
    if not recipe.counted or not path.exists():
        return 0
    text = path.read_text()
    wanted: set[int] = set()
    for node in ast.parse(text).body:
        names = {getattr(node, "name", "")} | {t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)}
        if names & set(recipe.counted) or ("*" in recipe.counted and is_workload(node)):
            wanted |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1)) - docstring_lines(node)
    lines = text.splitlines()
    return sum(bool(lines[n - 1].strip()) and not lines[n - 1].strip().startswith("#") for n in wanted)


def is_workload(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) and any("Workload" in ast.unparse(base) for base in node.bases)


def docstring_lines(node: ast.stmt) -> set[int]:
    """The lines of all docstrings within a definition."""
    found: set[int] = set()
    for inner in ast.walk(node):
        body = getattr(inner, "body", None)
        if isinstance(inner, (ast.ClassDef, ast.FunctionDef)) and body and isinstance(body[0], ast.Expr):
            found |= set(range(body[0].lineno, (body[0].end_lineno or body[0].lineno) + 1))
    return found


def scaleray(*words: str) -> dict[str, Any]:
    """The record that a command prints as JSON. Raises RuntimeError with what it said where it prints none."""
    done = subprocess.run(
        [sys.executable, "-m", "scaleray", *words, "--json"], capture_output=True, text=True, cwd=ROOT, timeout=900
    )
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise RuntimeError(f"scaleray {' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}") from None


def measure(recipe: Recipe) -> dict[str, Any]:
    """Verify the recipe and train it on 1 and on 2 workers."""
    config = ("-c", str(FOLDER / f"{recipe.name}.yaml"))
    verified = scaleray(
        "verify",
        *config,
        "--strategies",
        "ddp",
        "--world-sizes",
        "1,2",
        "--accumulation",
        "1",
        "--steps",
        str(STEPS),
        "--local",
        *recipe.verified_with,
    )
    judged = [o for o in verified["outcomes"] if o["verdict"] != "refused" and o["world_size"] > 1]
    distance = max(
        (max(o["comparison"][k] or 0.0 for k in ("loss", "grad_norm", "parameters")) for o in judged), default=None
    )
    found = {"verified": bool(verified["passed"]), "distance": distance, "verdict": verified["verdict"], "quality": {}}
    for workers in (1, 2):
        how = ("--local",) if workers == 1 else ("--scale.workers", str(workers))
        record = scaleray("train", *config, *how)
        found["quality"][str(workers)] = record["metrics"].get(recipe.metric)
    return found


def table(results: dict[str, Any]) -> str:
    """The rows in Markdown; a recipe that was not measured has none."""
    head = [
        "recipe",
        "lines of workload",
        "obstacles",
        "2 workers against one process, float64",
        "quality on 1 worker",
        "on 2 workers",
        "plain loop, seeds 0, 1, 2",
        "scaleray, the same seeds",
    ]
    rows = [head, ["---"] * len(head)]
    for recipe in RECIPES:
        if (found := results.get(recipe.name)) is None:
            continue
        lines = lines_of(recipe)
        distance = (
            "differs"
            if not found["verified"]
            else f"{found['distance']:.1e}"
            if found["distance"] is not None
            else found["verdict"]
        )
        quality = [
            f"{recipe.metric} {found['quality'][w]:.5g}" if isinstance(found["quality"].get(w), float) else ""
            for w in ("1", "2")
        ]
        rows.append([f"[{recipe.what}](../jobs/recipes/{recipe.name}.yaml)", str(lines) if lines else "a config alone",
                     recipe.obstacles, distance, *quality, *map(over_seeds, found.get("seeds", ((), ())))])  # fmt: skip
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def over_seeds(values: Sequence[float]) -> str:
    """Mean of the values, and each of them."""
    return f"{statistics.mean(values):.4g} ({', '.join(f'{value:.4g}' for value in values)})" if values else ""


def main(names: list[str]) -> None:
    known = {recipe.name: recipe for recipe in RECIPES}
    for name in names or [n for n in known if (ROOT / FOLDER / f"{n}.yaml").exists()]:
        print(f"{name} ...", flush=True)
        try:
            found = measure(known[name])
        except (RuntimeError, subprocess.TimeoutExpired) as exc:  # the others are worth knowing all the same
            print(exc)
            continue
        print(f"  {found}", flush=True)
        results = read_results()  # others may be measured at the same time
        results[name] = {**results.get(name, {}), **found}
        RESULTS.write_text(json.dumps({n: results[n] for n in known if n in results}, indent=2) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(read_results())}\n{END}{rest.partition(END)[2]}")


def read_results() -> dict[str, Any]:
    """What was measured of each recipe, by name."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


if __name__ == "__main__":
    main(sys.argv[1:])
