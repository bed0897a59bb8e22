"""Ready workloads for models of transformers, and a base class for own ones."""

from scaleray.hugging_face.classifiers import SequenceClassification
from scaleray.hugging_face.language_models import CausalLanguageModel
from scaleray.hugging_face.workload import HuggingFaceWorkload, summed_loss

__all__ = ["CausalLanguageModel", "HuggingFaceWorkload", "MaskedLanguageModel", "SequenceClassification", "summed_loss"]
