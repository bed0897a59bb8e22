"""Tokenizers from local files, and a tokenizer of bytes that needs no files."""

from pathlib import Path
from typing import Any

from scaleray.checkpoints.model_layout import CONFIG
from scaleray.common.installed import library
from scaleray.errors import WorkloadError, first_line
from scaleray.hugging_face.pretrained_models import EXTRA, LOCAL, transformers

BYTES = "bytes"
"""Name, used in place of a path, of the tokenizer whose tokens are the bytes of the text."""
FAST = "tokenizer.json"
FILES = (FAST, "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
CHAT = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def has_tokenizer(folder: str | None) -> bool:
    """Whether a folder contains a tokenizer's files."""
    return folder is not None and any((Path(folder) / name).is_file() for name in FILES)


def load_tokenizer(where: str | None) -> Any:
    """Load the tokenizer from a folder or a tokenizer.json, or `bytes`. Raises WorkloadError if it is missing."""
    if where is None:
        raise WorkloadError.problem(
            "workload.args.tokenizer",
            "is required: the model's folder has no tokenizer",
            f"give a folder with {FAST}, the file itself, or {BYTES}",
        )
    if where == BYTES:
        return byte_tokenizer()
    path = Path(where)
    if not path.exists():
        raise WorkloadError(
            "workload.args.tokenizer",
            where,
            "no such folder or file exists here",
            f"nothing is downloaded from a hub: copy the tokenizer's files, give its {FAST}, or use {BYTES}",
        )
    if path.is_dir() and not has_tokenizer(where):
        there = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
        raise WorkloadError.problem(
            "workload.args.tokenizer", f"{where} has none of {', '.join(FILES[:4])}", f"it contains: {there}"
        )
    names = transformers()
    try:
        if path.is_file():
            return names.PreTrainedTokenizerFast(tokenizer_file=where)
        if (path / FAST).is_file() and not any((path / n).is_file() for n in (CONFIG, "tokenizer_config.json")):
            return names.PreTrainedTokenizerFast(tokenizer_file=str(path / FAST))
        return names.AutoTokenizer.from_pretrained(where, **LOCAL)
    except Exception as exc:  # the library, written in Rust, raises Exception itself
        raise WorkloadError.problem("workload.args.tokenizer", f"{where} cannot be read: {first_line(exc)}") from exc


def byte_tokenizer() -> Any:
    """Tokenizer with the 256 bytes and the special tokens <eos>, <pad>, <mask>, <cls> and <sep>."""
    parts = library("tokenizers", extra=EXTRA, wanted_by="the tokenizer bytes")
    alphabet = sorted(parts.pre_tokenizers.ByteLevel.alphabet())
    inner = parts.Tokenizer(parts.models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = parts.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = parts.decoders.ByteLevel()
    special = {f"{name}_token": f"<{name}>" for name in ("eos", "pad", "mask", "cls", "sep")}
    inner.add_special_tokens(list(special.values()))
    inner.post_processor = parts.processors.TemplateProcessing(
        single="<cls> $A <sep>",
        pair="<cls> $A <sep> $B:1 <sep>:1",
        special_tokens=[(name, inner.token_to_id(name)) for name in ("<cls>", "<sep>")],
    )
    tokenizer = transformers().PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    tokenizer.chat_template = CHAT
    return tokenizer
