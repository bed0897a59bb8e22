"""Ready-made workloads for models of transformers, and a base class for custom workloads."""

from scaleray.hugging_face.base_workload import HuggingFaceWorkload, summed_loss
from scaleray.hugging_face.classifiers import ImageClassification, SequenceClassification
from scaleray.hugging_face.language_models import CausalLanguageModel, MaskedLanguageModel
from scaleray.hugging_face.sequence_to_sequence import SequenceToSequence
from scaleray.hugging_face.token_classification import TokenClassification

__all__ = [
    "CausalLanguageModel",
    "HuggingFaceWorkload",
    "ImageClassification",
    "MaskedLanguageModel",
    "SequenceClassification",
    "SequenceToSequence",
    "TokenClassification",
    "summed_loss",
]
