"""Self-supervised objectives: the alignment loss ℓ_a of a client."""

from fedu2.objectives import alignuniform, orchestra  # noqa: F401 (the files register their objectives)
from fedu2.objectives.base import Objective, Outcome, objectives
from fedu2.objectives.byol import BYOL
from fedu2.objectives.simclr import SimCLR, nt_xent
from fedu2.objectives.simsiam import SimSiam

__all__ = ["BYOL", "Objective", "Outcome", "SimCLR", "SimSiam", "nt_xent", "objectives"]

objectives.seal()
