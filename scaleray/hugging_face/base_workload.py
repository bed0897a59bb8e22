"""Base class of workloads with a model of transformers: builds the model, computes its loss, and writes a folder for
`from_pretrained`.

A subclass defines its transformers class (`auto_class`) and its data (`datasets`). The loss ignores labels of -100, as
everywhere in transformers."""

import inspect
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from scaleray.checkpoints.model_layout import WEIGHTS
from scaleray.common.model_blocks import find_blocks
from scaleray.errors import CheckpointError, WorkloadError, first_line
from scaleray.hugging_face import pretrained_models
from scaleray.hugging_face.pretrained_models import peft, transformers
from scaleray.hugging_face.tensor_plans import transformers_plan
from scaleray.hugging_face.token_rows import IGNORED, MASK, TokenPadding
from scaleray.hugging_face.tokenizers import has_tokenizer, load_tokenizer
from scaleray.parallel import context, part, positions
from scaleray.workload import Workload

GENERATION = "generation_config.json"


def write_model(
    config: Any, auto_class: str, weights: Mapping[str, torch.Tensor], folder: Path, *, source: str | None = None
) -> None:
    """Write config.json, model.safetensors and, for a generative model, generation_config.json.

    weights: by the names of the model's state dict. source: the model's original folder, whose generation config is
    copied. Raises CheckpointError for weights of another model."""
    from safetensors.torch import save_file

    with torch.device("meta"):  # only for names, ties and the class
        model = getattr(transformers(), auto_class).from_config(config)
    check_same(model, weights)
    kept = {name: weights[name].detach().cpu().contiguous() for name in distinct_names(model)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})
    config.architectures = [type(model).__name__]
    config.dtype = next(str(t.dtype).removeprefix("torch.") for t in kept.values() if t.is_floating_point())
    config.save_pretrained(folder)
    if source is not None and (Path(source) / GENERATION).is_file():
        shutil.copyfile(Path(source) / GENERATION, folder / GENERATION)
    elif model.can_generate():
        model.generation_config.save_pretrained(folder)


def distinct_names(model: nn.Module) -> list[str]:
    """Names in the model's state dict, without the second names of tied tensors."""
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first.setdefault(id(tensor), name)
    return list(first.values())


def check_same(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the weights' names differ from the model's state dict."""
    own = model.state_dict().keys()
    if different := sorted(own ^ weights.keys()):
        raise CheckpointError.problem(
            f"the tensor {different[0]}",
            ("is only in the weights" if different[0] in weights else "is only in the model")
            + f": {len(different)} tensors differ from those of a {type(model).__name__} of this config",
            "export to a .safetensors file, or define export() in the workload",
        )


def wrapped(model: nn.Module, settings: Mapping[str, Any]) -> Any:
    """Wrap the model with adapters of peft, freezing everything else except `modules_to_save`. settings: of
    `peft.LoraConfig`. Raises WorkloadError if peft rejects them."""
    library = peft()
    try:
        return library.get_peft_model(model, library.LoraConfig(**settings))
    except (TypeError, ValueError) as exc:
        raise WorkloadError("workload.args.peft", dict(settings), f"peft rejects it: {first_line(exc)}") from exc


def export(build: Callable[[], nn.Module], weights: Mapping[str, torch.Tensor], folder: Path, *, merge: bool) -> None:
    """Write the trained model with its adapters merged, or only the adapters.

    build: creates the wrapped model. Raises CheckpointError for weights of another model.
    """
    model: Any = build()
    check_same(model, weights)
    model.load_state_dict({name: weights[name] for name in distinct_names(model)}, strict=False)
    if merge:
        model.merge_and_unload().save_pretrained(folder)
    else:
        model.save_pretrained(folder)


LABELS = "labels"
HEADS: dict[str, dict[str, Any]] = {
    "AutoModelForSequenceClassification": {"task_type": "SEQ_CLS"},
    "AutoModelForTokenClassification": {"task_type": "TOKEN_CLS"},
    "AutoModelForImageClassification": {"modules_to_save": ["classifier"]},
}
"""Arguments of `peft.LoraConfig`, by class of transformers, with which peft trains and saves a new head."""


class HuggingFaceWorkload(Workload):
    """A model of transformers, from a config (randomly initialised) or from a local folder with weights in safetensors.

    model: a folder, a config as a JSON file, or a mapping with `model_type`. tokenizer: a folder, a tokenizer.json, or
    `bytes`; None uses the one in the model's folder. attention: `sdpa`, `eager`, or None for transformers' choice.
    peft: arguments of `peft.LoraConfig`, to wrap the model with peft. The head of a classifier is trained with the
    adapters unless they specify another task_type or modules_to_save.
    """

    auto_class: ClassVar[str] = "AutoModel"
    """Name of the transformers class that creates the model."""
    predicts_next: ClassVar[bool] = False
    """Whether the logits at a position predict the label at the next one, as in causal language models."""

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: str | None = None,
        attention: str | None = None,
        peft: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = pretrained_models.absolute(model)
        self.folder = pretrained_models.model_folder(self.model)
        self.attention, self.peft = attention, None if peft is None else dict(peft)
        self._tokenizer_path = tokenizer
        if tokenizer is not None and Path(tokenizer).expanduser().exists():
            self._tokenizer_path = str(Path(tokenizer).expanduser().absolute())
        elif tokenizer is None and isinstance(self.model, str) and has_tokenizer(self.model):
            self._tokenizer_path = self.model
        self._config: Any = None
        self._tokenizer: Any = None

    # what a subclass may override

    def config_changes(self) -> Mapping[str, Any]:
        """Values of the model's config that depend on the data or the tokenizer, such as the number of labels."""
        return {}

    def inputs(self, batch: Any) -> dict[str, torch.Tensor]:
        """Arguments of the model's call: every column except the labels, integers as int64."""
        return {name: as_input(column) for name, column in batch.items() if name != LABELS}

    def labels(self, batch: Any) -> torch.Tensor:
        """Tokens that the model should predict, -100 for ignored ones; without a label column, the attended tokens."""
        if LABELS in batch:
            return batch[LABELS].long()
        ids: torch.Tensor = batch["input_ids"].long()
        return ids.masked_fill(batch[MASK] == 0, IGNORED) if MASK in batch else ids

    @property
    def collate(self) -> Any:
        """Return the function that makes a batch from rows of unequal length."""
        if self._config is None:
            self.config()
        return TokenPadding(self._config.get("pad_token_id") or 0)

    # what a run calls

    def build_model(self) -> nn.Module:
        model = pretrained_models.build(self.auto_class, self.config(), self.folder, attention=self.attention)
        return model if self.peft is None else wrapped(model, {**HEADS.get(self.auto_class, {}), **self.peft})

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return summed_loss(*self.predictions(model, batch))

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        return label_metrics(*self.predictions(model, batch))

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return find_blocks(model)

    def weight_names(self, model: nn.Module, config: Mapping[str, Any]) -> None:
        """Check that a folder's weights are of this type of model, so that their names match."""
        own = self.config().model_type
        if config.get("model_type") != own:
            raise WorkloadError("model_type of workload.weights", config.get("model_type"), f"the model's is {own}")

    def export(self, weights: Mapping[str, torch.Tensor], folder: Path, *, adapter: bool = False) -> None:
        """Write a folder for `from_pretrained`: the weights, config.json, generation_config.json and the tokenizer.

        weights: final weights or those of a checkpoint, by the names of the model's state dict; read while writing.
        adapter: for a model wrapped by peft, write only the adapter, in the form of `PeftModel.from_pretrained`.
        """
        if self.peft is not None:
            export(self.build_model, weights, folder, merge=not adapter)
        elif adapter:
            raise WorkloadError.problem("the workload", "has no peft adapter to export: it lacks the argument peft")
        else:
            write_model(self.config(), self.auto_class, weights, folder, source=self.folder)
        if self._tokenizer_path is not None:
            self.tokenizer.save_pretrained(folder)

    # used by both

    def config(self) -> Any:
        """Return a copy of the model's config, which may be changed."""
        if self._config is None:
            self._config = pretrained_models.read_config(self.model, self.config_changes()).to_dict()
        return pretrained_models.read_config(self._config, {})

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer. Raises WorkloadError if there is none."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._tokenizer_path)
        return self._tokenizer

    def predictions(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits (rows, ..., classes) and their labels (rows, ...)."""
        inputs, labels = self.inputs(batch), self.labels(batch)
        if context.size() > 1 and inputs["input_ids"].shape == labels.shape:
            return self._own_predictions(model, inputs, labels)
        logits = model(**inputs).logits
        return (logits[:, :-1], labels[:, 1:]) if self.predicts_next else (logits, labels)

    def _own_predictions(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and labels of the tokens of one worker of `parallel.context`. Raises WorkloadError for rows with
        columns other than tokens, such as a mask or several documents in a row."""
        if others := sorted(inputs.keys() - {"input_ids"}):
            raise WorkloadError.problem(
                "the workload",
                f"has rows with {' and '.join(others)}, but parallel.context can split only rows of tokens",
                "use workload.args.packing concatenate, or other degrees",
            )
        if self.predicts_next:
            labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        own = part(inputs["input_ids"], dim=1)
        places = positions(own.shape[1], own.device).expand(own.shape)
        # without a mask transformers takes a jump of the positions in a ring for the start of another document
        return model(input_ids=own, position_ids=places, attention_mask=torch.ones_like(own)).logits, part(labels)

    def tensor_plan(
        self, model: nn.Module, *, size: int, sequence_parallel: bool
    ) -> Mapping[str, ParallelStyle] | None:
        return transformers_plan(model, size=size, sequence_parallel=sequence_parallel)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokenizer": None}  # workers need none


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy in nats summed over the labels that are not -100, in float32 or wider, and their number."""
    if logits.shape[:-1] != labels.shape:
        raise WorkloadError.problem(
            "labels",
            f"have the shape {tuple(labels.shape)}, while the model's logits have {tuple(logits.shape)}: there must be "
            f"one label per position before the last",
        )
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum()


def label_metrics(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    """Loss and accuracy over the labels other than -100, as sums and counts."""
    total, count = summed_loss(logits, labels)
    is_right = (logits.argmax(dim=-1) == labels) & (labels != IGNORED)
    return {"loss": (total, count), "accuracy": (is_right.sum(), count)}


def as_input(column: torch.Tensor) -> torch.Tensor:
    """A column in the form that models accept: integers as int64."""
    return column if column.is_floating_point() or column.dtype == torch.bool else column.long()


def takes(model: nn.Module, name: str) -> bool:
    """Whether the model's forward pass has an argument with this name."""
    return name in inspect.signature(model.forward).parameters
