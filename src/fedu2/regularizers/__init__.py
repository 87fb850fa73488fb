"""Regularisers ℓ_u that keep representations from collapsing."""

from __future__ import annotations

from fedu2.regularizers.fur import FURResult, fur, fur_toward, sphere_points
from fedu2.regularizers.transport import Plan, solve

__all__ = ["FURResult", "Plan", "fur", "fur_toward", "solve", "sphere_points"]
