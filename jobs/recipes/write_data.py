"""Data of the recipes, written from what ships in packages: the standard library's source and scikit-learn's digits.

    python jobs/recipes/write_data.py [build/recipes]

Text (train.jsonl, val.jsonl), a tokenizer trained on it (tokenizer/), snippets with the package they come from
(snippets.parquet), conversations (chats.jsonl), statements with tags of their words (statements.jsonl), names in two
spellings (names.jsonl) and images in a folder for each class (digits/train/7/0123.png).
"""

from __future__ import annotations

import hashlib
import io
import json
import keyword
import re
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PACKAGES = ("asyncio", "email", "tkinter", "importlib", "xml", "ctypes")
SNIPPET = 300  # characters
VOCABULARY = 2048
TEXT_BYTES = 3_000_000  # a part of the library, so that a recipe takes minutes


def main(folder: Path) -> None:
    """Write all of it."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = list(library())
    held_out = [share(text) < 0.1 for text in documents]
    train = [text for text, is_out in zip(documents, held_out, strict=True) if not is_out]
    write_lines(folder / "train.jsonl", ({"text": text} for text in train))
    write_lines(folder / "val.jsonl", ({"text": t} for t, is_out in zip(documents, held_out, strict=True) if is_out))
    write_tokenizer(folder / "tokenizer", train)
    write_parquet(folder / "snippets.parquet", list(snippets()))
    write_lines(folder / "chats.jsonl", chats(documents))
    write_lines(folder / "statements.jsonl", statements(documents))
    write_lines(folder / "names.jsonl", names(library(4 * TEXT_BYTES)))
    write_digits(folder / "digits")


def library(limit: int = TEXT_BYTES) -> Iterator[str]:
    """Source files of the standard library, chosen by a hash, up to so many characters."""
    home, total = Path(sysconfig.get_path("stdlib")), 0
    paths = [p for p in home.rglob("*.py") if not {"test", "tests", "site-packages"} & set(p.relative_to(home).parts)]
    for path in sorted(paths, key=lambda p: share(p.relative_to(home).as_posix())):
        text = path.read_text(encoding="utf-8", errors="ignore")
        total += len(text)
        if total > limit:
            return
        yield text


def snippets() -> Iterator[dict[str, Any]]:
    """Pieces of a few packages, with the name of the package."""
    home = Path(sysconfig.get_path("stdlib"))
    for package in PACKAGES:
        text = "".join(p.read_text(encoding="utf-8") for p in sorted((home / package).rglob("*.py")))
        for start in range(0, min(len(text), 400 * SNIPPET), SNIPPET):
            yield {"text": text[start : start + SNIPPET], "label": package}


def chats(documents: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Questions about words of the library, each in a conversation of two turns."""
    words = sorted({word for text in documents for word in text.split() if word.isalpha() and 3 <= len(word) <= 8})
    for word in words[:6000]:
        answer = "yes" if keyword.iskeyword(word) else "no"
        yield {
            "messages": [
                {"role": "user", "content": f"shout {word.lower()}"},
                {"role": "assistant", "content": word.upper()},
                {"role": "user", "content": f"is {word} a keyword"},
                {"role": "assistant", "content": answer},
            ]
        }


STATEMENTS, NAMES = 6000, 8000


def statements(documents: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Statements as words with a tag each: what is called, imported or defined is an entity, of one or more words."""
    found: dict[str, dict[str, Any]] = {}
    for text in documents:
        words: list[str] = []
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NEWLINE:
                if 3 <= len(words) <= 24:
                    found.setdefault(" ".join(words), {"words": words, "tags": tags(words)})
                words = []
            elif token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER):
                words.append(token.string)
            elif token.type == tokenize.STRING:
                words.append("'text'")
    yield from sorted(found.values(), key=lambda record: share(" ".join(record["words"])))[:STATEMENTS]


def tags(words: list[str]) -> list[str]:
    """Tag of each word: B- at the first of an entity, I- at its others, and O."""
    found, start = ["O"] * len(words), 0
    while start < len(words):
        end = start + 1
        if words[start].isidentifier() and not keyword.iskeyword(words[start]):
            while words[end : end + 1] == ["."] and words[end + 1 : end + 2] and words[end + 1].isidentifier():
                end += 2
            before, after = words[start - 1] if start else "", words[end] if end < len(words) else ""
            kind = {"def": "FUNCTION", "class": "CLASS", "import": "MODULE", "from": "MODULE"}.get(before)
            kind = kind or ("CALL" if after == "(" else None)
            if kind is not None:
                found[start:end] = [f"B-{kind}", *[f"I-{kind}"] * (end - start - 1)]
        start = end
    return found


def names(documents: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Names of the library with underscores, and in one word with capitals."""
    found = {word for text in documents for word in re.findall(r"\b[a-z]{2,9}(?:_[a-z]{2,9}){1,2}\b", text)}
    for name in sorted(found, key=share)[:NAMES]:
        yield {"source": name, "target": name.title().replace("_", "")}


def write_tokenizer(folder: Path, texts: list[str]) -> None:
    """Train a byte-level BPE tokenizer and write it as transformers reads it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<eos>", "<pad>", "<mask>", "<cls>", "<sep>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    )
    names = {f"{name.strip('<>')}_token": name for name in special}
    PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder)


def write_digits(folder: Path) -> None:
    """Write scikit-learn's digits as PNG files of 8 x 8 pixels, a folder for each class."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    for number, (pixels, label) in enumerate(zip(images, labels, strict=True)):
        split = "test" if share(pixels.tobytes()) < 0.2 else "train"
        path = folder / split / str(label) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels.reshape(8, 8) * 255 / 16).astype(np.uint8)).save(path)


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write records as lines of JSON."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def write_parquet(path: Path, records: list[dict[str, Any]]) -> None:
    """Write records as rows of a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(records), path)


def share(content: str | bytes) -> float:
    """A number from 0 to below 1 that follows from the content."""
    digest = hashlib.sha256(content.encode() if isinstance(content, str) else content).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/recipes"))
