"""Named recipes of views, and how a run's options change them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedu2.errors import UsageError
from fedu2.options import ViewOptions

__all__ = ["RECIPES", "Recipe", "views_for"]


@dataclass(frozen=True)
class Recipe:
    """How a view is drawn: probabilities of operations and ranges of strengths. The default does nothing."""

    crop_scale: tuple[float, float] = (1.0, 1.0)  # share of the image's area
    flip: float = 0.0
    jitter: float = 0.0  # probability; the four strengths follow
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0  # in turns of the colour wheel
    grayscale: float = 0.0
    blur: float = 0.0
    blur_sigma: tuple[float, float] = (0.1, 2.0)  # in pixels
    solarize: float = 0.0
    size: int | None = None  # side of the view in pixels, if not the image's

    def __post_init__(self) -> None:
        low, high = self.crop_scale
        if not 0 < low <= high <= 1:
            raise UsageError(f"views.crop_scale must be two areas 0 < low ≤ high ≤ 1, not ({low}, {high})")
        low, high = self.blur_sigma
        if not 0 < low <= high:
            raise UsageError(f"blur_sigma must be two widths 0 < low ≤ high, not ({low}, {high})")


_SIMCLR = Recipe(
    crop_scale=(0.08, 1.0),
    flip=0.5,
    jitter=0.8,
    brightness=0.4,
    contrast=0.4,
    saturation=0.4,
    hue=0.1,
    grayscale=0.2,
)
_SIMSIAM = replace(_SIMCLR, crop_scale=(0.2, 1.0))
_BYOL = replace(_SIMCLR, saturation=0.2)
_WEAK = Recipe(crop_scale=(0.64, 1.0), flip=0.5)

RECIPES: dict[str, tuple[Recipe, Recipe]] = {
    "simclr": (_SIMCLR, _SIMCLR),
    "byol": (_BYOL, replace(_BYOL, solarize=0.2)),
    "simsiam": (_SIMSIAM, _SIMSIAM),
    "weak": (_WEAK, _WEAK),
    "none": (Recipe(), Recipe()),
}
"""Recipes of the first and second view, as published for 32-pixel images, where blur is left out.

simclr: the CIFAR-10 command of github.com/google-research/simclr (jitter strength 0.5, no blur).
byol: arXiv:2006.07733 without blur, as in solo-learn's configuration for CIFAR (`asymmetric.yaml`).
simsiam: arXiv:2011.10566 without blur, as in its experiments on CIFAR-10.
weak: for fine-tuning. The FedU² authors' code uses simsiam's with jitter strengths 0.8, 0.8, 0.8, 0.2.
"""


def views_for(options: ViewOptions, objective: str) -> tuple[Recipe, Recipe]:
    """Recipes of both views: the named (auto: the objective's, else SimCLR's), with options put in place."""
    name = objective if options.recipe == "auto" else options.recipe
    first, second = RECIPES.get(name, RECIPES["simclr"])
    changes = options.model_dump(exclude={"recipe"}, exclude_none=True)
    # BYOL solarises only its second view; the option follows it.
    changes_first = {field: value for field, value in changes.items() if field != "solarize"}
    return replace(first, **changes_first), replace(second, **changes)
