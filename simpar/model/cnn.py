"""Convolutional networks of the image-classification benchmarks, as layers of matrix products.

A convolution is the product of its unfolded input with its filters (im2col; Chellapilla et al. 2006): for each sample
``height · width`` rows, as many columns as filters, and an inner dimension of ``channels · kernel area``. Pooling,
normalisation and activations are memory-bound and small beside it; they are counted as one pass over a layer's output.
Shapes are those of the papers, for 1,000 classes, without auxiliary classifiers.
"""

from collections.abc import Callable
from typing import NamedTuple

from simpar.errors import ModelError, nearest
from simpar.model.module import Affine, KernelForm, ModuleLayer, ModuleModel
from simpar.model.work import DTYPE_BYTES, DType, Gemm, MemoryBound

_CLASSES = 1000
_NORM_PARAMETERS = 2  # scale and shift of a channel


class Conv(NamedTuple):
    """A convolution, or with an area of 1 on one position a dense layer.

    Attributes:
        positions: output height times width.
        inputs: input channels.
        outputs: output channels.
        area: of the kernel.
        extra: parameters of each output channel beside its filter: a bias, or scale and shift of its normalisation.
        groups: groups that channels are split into.
    """

    positions: int
    inputs: int
    outputs: int
    area: int
    extra: int
    groups: int = 1

    @property
    def parameters(self) -> int:
        """Filters and what comes with each channel."""
        return self.outputs * (self.inputs // self.groups * self.area + self.extra)

    @property
    def macs(self) -> int:
        """Multiply-adds of one sample."""
        return self.positions * self.outputs * self.inputs // self.groups * self.area


Named = list[tuple[str, list[Conv]]]


def cnn(name: str, *, dtype: DType = "fp32") -> ModuleModel:
    """A network by name: ``alexnet``, ``inception-v3``, ``resnet-50``, ``resnet-152`` or ``vgg-16``.

    >>> cnn("resnet-50").parameters
    25557032

    Raises:
        ModelError: no such network.
    """
    if name not in _NETWORKS:
        raise ModelError(
            f"cnn '{name}' is unknown{nearest(name, tuple(_NETWORKS))}; choose one of {', '.join(_NETWORKS)}"
        )
    layers = tuple(_layer(title, convs, dtype) for title, convs in _NETWORKS[name]())
    return ModuleModel(name=name, layers=layers, dtype=dtype)


def _layer(name: str, convs: list[Conv], dtype: DType) -> ModuleLayer:
    size = DTYPE_BYTES[dtype]
    forward, backward = [], []
    for conv in convs:
        rows, columns, inner = conv.positions, conv.outputs // conv.groups, conv.inputs // conv.groups * conv.area
        batch = Affine(0, rows)
        forward.append(_product(rows, columns, inner, ("m", batch), conv.groups, dtype))
        backward.append(_product(rows, inner, columns, ("m", batch), conv.groups, dtype))
        backward.append(_product(columns, inner, rows, ("k", batch), conv.groups, dtype))
    outputs = sum(conv.positions * conv.outputs for conv in convs)
    for forms, passes in ((forward, 2), (backward, 3)):
        forms.append(
            KernelForm(MemoryBound(passes * outputs * size), (("nbytes", Affine(0, passes * outputs * size)),))
        )
    parameters = sum(conv.parameters for conv in convs)
    last = convs[-1].positions * convs[-1].outputs * size
    # inputs of the convolutions and of what follows them
    kept = Affine(0, 2 * outputs * size)
    return ModuleLayer(name, parameters, parameters, tuple(forward), tuple(backward), kept, Affine(0, last))


def _product(  # noqa: PLR0917 - a shape
    m: int, n: int, k: int, grows: tuple[str, Affine], groups: int, dtype: DType
) -> KernelForm:
    return KernelForm(Gemm(m, n, k, dtype, batch=groups, out_bytes=DTYPE_BYTES[dtype]), (grows,))


def _vgg_16() -> Named:
    """Simonyan & Zisserman 2015, configuration D."""
    found: Named = []
    channels, side = 3, 224
    for block, (width, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), 1):
        for index in range(1, count + 1):
            found.append((f"conv{block}_{index}", [Conv(side**2, channels, width, 9, 1)]))
            channels = width
        side //= 2
    dense = ((512 * 49, 4096), (4096, 4096), (4096, _CLASSES))
    return found + [(f"fc{6 + i}", [Conv(1, a, b, 1, 1)]) for i, (a, b) in enumerate(dense)]


def _alexnet() -> Named:
    """Krizhevsky et al. 2012, in the form of one GPU (Krizhevsky 2014), as benchmarks use it."""
    convs = ((55, 3, 64, 121), (27, 64, 192, 25), (13, 192, 384, 9), (13, 384, 256, 9), (13, 256, 256, 9))
    dense = ((256 * 36, 4096), (4096, 4096), (4096, _CLASSES))
    return [(f"conv{i}", [Conv(side**2, a, b, area, 1)]) for i, (side, a, b, area) in enumerate(convs, 1)] + [
        (f"fc{i}", [Conv(1, a, b, 1, 1)]) for i, (a, b) in enumerate(dense, 6)
    ]


def _resnet(blocks: tuple[int, int, int, int]) -> Named:
    """He et al. 2016, bottleneck form; the 3×3 convolution has the stride (as in later code), so sizes halve there."""
    found: Named = [("conv1", [Conv(112**2, 3, 64, 49, _NORM_PARAMETERS)])]
    channels = 64
    for stage, count in enumerate(blocks):
        width, side = 64 * 2**stage, 56 // 2**stage
        for index in range(count):
            entry = side * 2 if stage and not index else side
            convs = [
                Conv(entry**2, channels, width, 1, _NORM_PARAMETERS),
                Conv(side**2, width, width, 9, _NORM_PARAMETERS),
                Conv(side**2, width, 4 * width, 1, _NORM_PARAMETERS),
            ]
            if not index:
                convs.append(Conv(side**2, channels, 4 * width, 1, _NORM_PARAMETERS))
            found.append((f"conv{stage + 2}_{index + 1}", convs))
            channels = 4 * width
    return [*found, ("fc", [Conv(1, channels, _CLASSES, 1, 1)])]


def _inception_v3() -> Named:
    """Szegedy et al. 2016, in the form that was released (tensorflow/models, inception_v3.py)."""

    def conv(side: int, inputs: int, outputs: int, area: int) -> Conv:
        return Conv(side**2, inputs, outputs, area, _NORM_PARAMETERS)

    stem = ((149, 3, 32, 9), (147, 32, 32, 9), (147, 32, 64, 9), (73, 64, 80, 1), (71, 80, 192, 9))
    found: Named = [(f"conv{i}", [conv(*shape)]) for i, shape in enumerate(stem, 1)]
    for index, (inputs, pooled) in enumerate(((192, 32), (256, 64), (288, 64))):
        shapes = ((inputs, 64, 1), (inputs, 48, 1), (48, 64, 25), (inputs, 64, 1), (64, 96, 9), (96, 96, 9))
        found.append((f"mixed_35_{index}", [conv(35, *shape) for shape in (*shapes, (inputs, pooled, 1))]))
    found.append(
        ("reduction_35", [conv(17, 288, 384, 9), conv(35, 288, 64, 1), conv(35, 64, 96, 9), conv(17, 96, 96, 9)])
    )
    for index, width in enumerate((128, 160, 160, 192)):
        double = ((768, width, 1), (width, width, 7), (width, width, 7), (width, width, 7), (width, 192, 7))
        single = ((768, 192, 1), (768, width, 1), (width, width, 7), (width, 192, 7))
        found.append((f"mixed_17_{index}", [conv(17, *shape) for shape in (*single, *double, (768, 192, 1))]))
    first = [conv(17, 768, 192, 1), conv(8, 192, 320, 9)]
    second = [conv(17, 768, 192, 1), conv(17, 192, 192, 7), conv(17, 192, 192, 7), conv(8, 192, 192, 9)]
    found.append(("reduction_17", first + second))
    for index, inputs in enumerate((1280, 2048)):
        split = ((384, 384, 3), (384, 384, 3))
        plain, stacked = ((inputs, 320, 1), (inputs, 384, 1)), ((inputs, 448, 1), (448, 384, 9))
        all_of_8 = (*plain, *split, *stacked, *split, (inputs, 192, 1))
        found.append((f"mixed_8_{index}", [conv(8, *shape) for shape in all_of_8]))
    return [*found, ("fc", [Conv(1, 2048, _CLASSES, 1, 1)])]


_NETWORKS: dict[str, Callable[[], Named]] = {
    "alexnet": _alexnet,
    "inception-v3": _inception_v3,
    "resnet-50": lambda: _resnet((3, 4, 6, 3)),
    "resnet-152": lambda: _resnet((3, 8, 36, 3)),
    "vgg-16": _vgg_16,
}
CNN_NAMES = tuple(_NETWORKS)
