"""Costs of convolutional networks, derived from the shape of residual networks and from published figures of others."""

from scaleray.errors import ConfigError
from scaleray.planner.models.block_counts import Block, ModelProfile

RESNETS = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
}


def resnet(depth: int, *, image: int = 224, num_classes: int = 1000, is_small_stem: bool = False) -> ModelProfile:
    """Return a residual network of `depth` layers, version 1.5. `is_small_stem`: one 3x3 convolution, as for CIFAR.

    Raises ConfigError for a depth that He et al. 2015, arXiv:1512.03385, do not list.
    """
    if depth not in RESNETS:
        raise ConfigError("ResNet depth", depth, f"it must be one of {', '.join(map(str, RESNETS))}")
    counts, has_bottleneck = RESNETS[depth]
    expansion = 4 if has_bottleneck else 1
    size = image if is_small_stem else image // 2
    parts = [_conv("stem", 3, 64, 3 if is_small_stem else 7, size)]
    size, width_in = (size if is_small_stem else size // 2), 64
    for stage, count in enumerate(counts):
        width = 64 * 2**stage
        for index in range(count):
            stride = 2 if stage and not index else 1
            inside, size = size, size // stride
            name = f"stage{stage + 1}.{index}"
            if has_bottleneck:
                convs = [
                    _conv(name, width_in, width, 1, inside),
                    _conv(name, width, width, 3, size, stride=stride),
                    _conv(name, width, 4 * width, 1, size),
                ]
            else:
                convs = [_conv(name, width_in, width, 3, size, stride=stride), _conv(name, width, width, 3, size)]
            if stride > 1 or width_in != expansion * width:
                convs.append(_conv(name, width_in, expansion * width, 1, size, copies=1))
            parts.append(_sum_of(name, convs))
            width_in = expansion * width
    classes = Block(
        name="classifier",
        num_params=width_in * num_classes + num_classes,
        conv_flops=2.0 * width_in * num_classes,
        traffic_bytes=2.0 * width_in,
        kept_bytes=2.0 * width_in,
        num_kernels=3,
    )
    return ModelProfile(name=f"ResNet-{depth}", blocks=(*parts, classes), kind="cnn")


def _conv(
    name: str, channels_in: int, channels: int, kernel: int, size: int, *, stride: int = 1, copies: int = 2
) -> Block:
    """A convolution with its norm. `copies`: kept copies of the output: the norm's input and, before an activation, its
    output."""
    outputs = channels * size * size
    return Block(
        name=name,
        num_params=channels_in * channels * kernel * kernel + 2 * channels,
        conv_flops=2.0 * outputs * channels_in * kernel * kernel,
        winograd_flops=2.0 * outputs * channels_in * kernel * kernel if kernel == 3 and stride == 1 else 0.0,
        # the convolution writes it, batch norm reads it twice and writes it, the activation reads and writes it,
        # the next layer reads it
        traffic_bytes=2.0 * 7 * outputs,
        kept_bytes=2.0 * copies * outputs,
        boundary_bytes=2.0 * outputs,
        num_kernels=3,
    )


def _sum_of(name: str, parts: list[Block]) -> Block:
    return Block(
        name=name,
        num_params=sum(part.num_params for part in parts),
        conv_flops=sum(part.conv_flops for part in parts),
        winograd_flops=sum(part.winograd_flops for part in parts),
        traffic_bytes=sum(part.traffic_bytes for part in parts),
        kept_bytes=sum(part.kept_bytes for part in parts),
        boundary_bytes=parts[-1].boundary_bytes,
        num_kernels=1 + sum(part.num_kernels for part in parts),
    )


def convolutional(
    name: str,
    *,
    num_params: float,
    forward_macs: float,
    outputs: float,
    num_layers: int,
    largest_params: float = 0.0,
    winograd_share: float = 0.0,
    has_norms: bool = True,
) -> ModelProfile:
    """Return a convolutional network from published figures: `outputs` are the elements written by its convolutions,
    `winograd_share` the part of the products in 3x3 or 5x5 filters of stride 1."""
    # without a norm: written, read and written by the activation, read by the next layer; the in-place result of the
    # activation is kept
    passes, copies = (7, 2) if has_norms else (4, 1)
    block = Block(
        name="layer",
        count=num_layers,
        num_params=num_params / num_layers,
        conv_flops=2.0 * forward_macs / num_layers,
        winograd_flops=2.0 * forward_macs * winograd_share / num_layers,
        traffic_bytes=2.0 * passes * outputs / num_layers,
        kept_bytes=2.0 * copies * outputs / num_layers,
        boundary_bytes=2.0 * outputs / num_layers,
        num_kernels=3,
    )
    return ModelProfile(name=name, blocks=(block,), kind="cnn", largest_tensor_params=largest_params)
