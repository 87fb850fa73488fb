"""Operations on a batch of images x (B, 3, S, S) in [0, 1], with one parameter per image: pure functions."""

from __future__ import annotations

import torch
from torch import Tensor

from fedu2.views.parameters import ViewParameters

__all__ = [
    "adjust_brightness",
    "adjust_contrast",
    "adjust_hue",
    "adjust_saturation",
    "apply",
    "gaussian_blur",
    "resized_crop",
    "solarize",
]


def apply(x: Tensor, parameters: ViewParameters) -> Tensor:
    """The views of images x (B, 3, S, S) in [0, 1] that `parameters` describe: (B, 3, T, T) in [0, 1]."""
    p = parameters
    if p.box is not None:
        x = resized_crop(x, *p.box, size=p.size)
    if p.brightness is not None:
        x = adjust_brightness(x, p.brightness)
    if p.contrast is not None:
        x = adjust_contrast(x, p.contrast)
    if p.saturation is not None:
        x = adjust_saturation(x, p.saturation)
    if p.hue is not None:
        x = adjust_hue(x, p.hue)
    if p.colour is not None:
        x = adjust_saturation(x, p.colour)
    if p.blur is not None:
        x = gaussian_blur(x, p.blur)
    if p.solarize is not None:
        x = solarize(x, p.solarize)
    return x


def resized_crop(
    x: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor, flip: Tensor, *, size: int | None = None
) -> Tensor:
    """Cut out a box, resize it to `size` pixels a side (bilinear, half-pixel centres), mirror it where flip = 1.

    The box is cut out first: what lies beyond its edge has no influence.
    """
    side = size or x.shape[-1]
    rows = _interpolation(top, height, torch.zeros_like(flip), x.shape[-2], side)
    columns = _interpolation(left, width, flip, x.shape[-1], side)
    return _transform_axes(x, rows, columns)


def _interpolation(start: Tensor, length: Tensor, flip: Tensor, size: int, side: int) -> Tensor:
    """(B, T, S) matrices that stretch pixels start..start + length − 1 of a line of S = `size` to T = `side` pixels.

    Output pixel i lies at c_i = (i + ½) length/T − ½ of the box, moved to the nearest pixel centre when
    outside, and takes weight max(0, 1 − |start + c_i − j|) of input pixel j.
    """
    start, length, flip = start[:, None], length[:, None], flip[:, None]
    inputs = torch.arange(size, dtype=start.dtype, device=start.device)
    outputs = torch.arange(side, dtype=start.dtype, device=start.device)
    mirrored = (flip * (side - 1) - outputs).abs()  # i, or T − 1 − i
    centres = start + torch.minimum(((mirrored + 0.5) * (length / side) - 0.5).clamp_min(0), length - 1)
    return (1 - (centres[:, :, None] - inputs).abs()).clamp_min_(0)


def _transform_axes(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Products rows · x · columnsᵀ for each image and channel; x (B, C, S, S), rows and columns (B, T, S)."""
    batch, channels, height, width = x.shape
    # Autocast would round pixels to bfloat16, whose steps in [½, 1] are as coarse as those of bytes.
    with torch.autocast(x.device.type, enabled=False):
        wide = torch.bmm(x.reshape(batch, channels * height, width), columns.mT).view(
            batch, channels, height, columns.shape[1]
        )
        return torch.matmul(rows.unsqueeze(1), wide)


def adjust_brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Scale: factor · x, clamped."""
    return (x * _per_image(factor)).clamp_(0, 1)


def adjust_contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Blend: factor · x + (1 − factor) · mean luma of the image, clamped."""
    mean = _luma(x.mean(dim=(-2, -1), keepdim=True))
    return torch.lerp(mean, x, _per_image(factor)).clamp_(0, 1)


def adjust_saturation(x: Tensor, factor: Tensor) -> Tensor:
    """Blend: factor · x + (1 − factor) · luma of the pixel, clamped; factor 0 makes the image gray."""
    return torch.lerp(_luma(x), x, _per_image(factor)).clamp_(0, 1)


def adjust_hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue in HSV by `shift` ∈ [−½, ½] of the colour wheel; value and saturation stay.

    With value V = max, chroma C = max − min and hue H in sixths of the wheel, channel n = 0, 1, 2 of RGB is
    V − C · clamp(d − 1, 0, 1), where d = 3 − ||H − 2n| − 3| is the distance along the wheel from H to the
    channel's own hue 2n.
    """
    value = x.amax(1)
    chroma = value - x.amin(1)
    hue = _hue(x, value, chroma).add_(6 * shift[:, None, None]).remainder_(6)
    own_hues = 2 * torch.arange(3, dtype=x.dtype, device=x.device)[:, None, None]
    faded = (hue[:, None] - own_hues).abs_().sub_(3).abs_().sub_(2).clamp_(-1, 0)  # −clamp(d − 1, 0, 1)
    return faded.mul_(chroma[:, None]).add_(value[:, None])


def _hue(x: Tensor, value: Tensor, chroma: Tensor) -> Tensor:
    """Hue H in sixths of the wheel: C · H is G − B, B − R + 2C or R − G + 4C as R, G or B is the largest."""
    red, green, blue = x.unbind(1)
    not_red, not_green = (value - red).sign_(), (value - green).sign_()  # 0 where largest, else 1
    # Chosen by lerp: exact for weights 0 and 1, and on the CPU several times as fast as torch.where.
    if_green, if_blue = (blue - red).add_(chroma, alpha=2), (red - green).add_(chroma, alpha=4)
    scaled = torch.lerp(green - blue, torch.lerp(if_green, if_blue, not_green), not_red)
    return scaled.div_(chroma.clamp_min(1e-12))  # gray pixels: 0 / 1e-12, any hue will do


def gaussian_blur(x: Tensor, sigma: Tensor) -> Tensor:
    """Gaussian weights of width σ pixels along both axes, scaled to sum to 1 inside the image.

    At the border this replaces the reflected image of torchvision by the image's own pixels.
    """
    pixels = torch.arange(x.shape[-1], dtype=x.dtype, device=x.device)
    squared_distance = (pixels[:, None] - pixels).square()
    weights = torch.softmax(-squared_distance / (2 * sigma.square())[:, None, None], dim=-1)
    return _transform_axes(x, weights, weights)


def solarize(x: Tensor, where: Tensor) -> Tensor:
    """Invert pixels of at least ½, that is min(x, 1 − x), in images with where = 1; those with 0 stay."""
    return torch.minimum(x, 2 - _per_image(where) - x)  # 2 − x ≥ x leaves an image alone


def _per_image(values: Tensor) -> Tensor:
    return values[:, None, None, None]


def _luma(x: Tensor) -> Tensor:
    """ITU-R 601 gray with torchvision's digits: (B, 3, ...) → (B, 1, ...)."""
    red, green, blue = x[:, 0:1], x[:, 1:2], x[:, 2:3]
    return (0.2989 * red).add_(green, alpha=0.587).add_(blue, alpha=0.114)
