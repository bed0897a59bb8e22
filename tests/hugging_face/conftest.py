from __future__ import annotations

import json

import numpy as np
import pytest
from small_models import LLAMA, Causal, built


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("".join(json.dumps(record(i)) + "\n" for i in range(60)))
    return str(path)


def record(i):
    """A text of one to three lines, with labels of each kind."""
    return {
        "text": f"x = {i} * y{i}\n" * (1 + i % 3),
        "label": ["b", "a"][i % 2],
        "labels": [["one"], ["two", "odd"], []][i % 3],
        "number": 0.5 + i % 3,
        "numbers": [i % 3, 0.25 * (i % 2)],
        "words": ["x", "is", f"number{i}", "of", "y"][: 3 + i % 3],
        "tags": ["B-VAR", "O", "B-NUM", "O", "B-VAR"][: 3 + i % 3],
        "source": f"{i % 7} plus {i % 3}",
        "target": f"makes {i % 7 + i % 3}",
    }


@pytest.fixture
def pictures(tmp_path):
    from PIL import Image

    for number in range(16):
        path = tmp_path / "train" / ["dark", "light"][number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((9, 8), 40 + 160 * (number % 2) + number, np.uint8)).save(path)
    return str(tmp_path / "train")


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    built(Causal({**LLAMA, "vocab_size": 250})).save_pretrained(folder)
    return str(folder)
