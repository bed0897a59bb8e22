"""Ready-made workloads for folders of images: models of torchvision and timm by name."""

from scaleray.images.classifier import ImageClassification
from scaleray.images.image_data import ImageData

__all__ = ["ImageClassification", "ImageData"]
