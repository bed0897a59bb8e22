"""Ready-made workload for folders of images, with models of torchvision and timm by name."""

from scaleray.images.classifier import ImageClassification
from scaleray.images.image_data import ImageData

__all__ = ["ImageClassification", "ImageData"]
