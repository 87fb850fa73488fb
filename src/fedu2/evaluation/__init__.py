"""What a representation is worth: kNN, effective rank, alignment and uniformity."""

from fedu2.evaluation.collapse import alignment, effective_rank, spectrum, uniformity
from fedu2.evaluation.knn import knn_accuracy, knn_predict

__all__ = ["alignment", "effective_rank", "knn_accuracy", "knn_predict", "spectrum", "uniformity"]
