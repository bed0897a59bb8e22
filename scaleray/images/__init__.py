"""Ready workloads for folders of images: models of torchvision and timm by name."""

from scaleray.images.data import ImageData
from scaleray.images.workload import ImageClassification

__all__ = ["ImageClassification", "ImageData"]
