"""Ray Data's preprocessors of every kind that learns, fitted on a few rows."""

from __future__ import annotations

import numpy as np
import ray.data.preprocessors as rays

from scaleray.data import ArraySource, Ragged, preprocessing

DRAW = np.random.default_rng(0)
ROWS = {
    "a": DRAW.normal(size=300), "b": DRAW.integers(0, 5, 300).astype(float),
    "n": np.where(DRAW.random(300) < 0.2, np.nan, DRAW.normal(size=300)), "c": DRAW.choice(["x", "y", "z"], 300),
    "l": Ragged.of([DRAW.integers(0, 4, 1 + row % 3) for row in range(300)]),
    "t": DRAW.choice(["a b c", "b c", "a a d"], 300),
}  # fmt: skip
FITTED = {
    "standard": lambda: rays.StandardScaler(["a", "b"]), "least and most": lambda: rays.MinMaxScaler(["a", "b"]),
    "most": lambda: rays.MaxAbsScaler(["a"]), "ordinal": lambda: rays.OrdinalEncoder(["c"]),
    "one hot": lambda: rays.OneHotEncoder(["c"]), "one hot of two": lambda: rays.OneHotEncoder(["c"], max_categories={"c": 2}),
    "many hot": lambda: rays.MultiHotEncoder(["l"]), "label": lambda: rays.LabelEncoder("c"),
    "categories": lambda: rays.Categorizer(["c"]), "mean": lambda: rays.SimpleImputer(["n"], strategy="mean"),
    "most frequent": lambda: rays.SimpleImputer(["b"], strategy="most_frequent"),
    "words": lambda: rays.CountVectorizer(["t"]), "bins": lambda: rays.UniformKBinsDiscretizer(["a"], bins=4),
    "chain": lambda: rays.Chain(
        rays.SimpleImputer(["n"], strategy="mean"), rays.StandardScaler(["n", "a"]), rays.OneHotEncoder(["c"])
    ),
}  # fmt: skip


def fitted(kind):
    """What a kind of preprocessor has learned from the rows, part by part."""
    made = preprocessing.fit(FITTED[kind](), ArraySource(ROWS, allows_text=True))
    assert made.fit_status().value == "FITTED"
    return [part.stats_ for part in getattr(made, "preprocessors", [made])]
