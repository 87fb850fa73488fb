"""Weighted k-nearest-neighbour classification of frozen features.

Reference: Wu et al., Unsupervised Feature Learning via Non-Parametric Instance Discrimination, CVPR 2018.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedu2.evaluation.sphere import on_sphere

__all__ = ["knn_accuracy", "knn_predict"]


def knn_predict(
    queries: Tensor, bank: Tensor, labels: Tensor, classes: int, k: int = 200, temperature: float = 0.1
) -> Tensor:
    """The predicted class (Q,) of each query: argmax_c Σ_{i ∈ N_k} exp(cos(q, b_i)/T)·[y_i = c].

    queries: (Q, D), bank: (B, D), labels: (B,) int64. k is cut to the size of the bank. Works in chunks of queries, so
    that at most about 64 MB of similarities are alive.
    """
    bank = on_sphere(bank.float())
    queries = on_sphere(queries.float())
    k = min(k, len(bank))
    chunk = max(1, 16_000_000 // len(bank))
    predictions = []
    for part in queries.split(chunk):
        similarity, nearest = (part @ bank.T).topk(k, dim=1)  # (q, k)
        votes = torch.zeros(len(part), classes, device=bank.device)
        # Subtracting each query's largest similarity scales all its votes alike, and keeps exp in range.
        weight = ((similarity - similarity[:, :1]) / temperature).exp()
        votes.scatter_add_(1, labels[nearest], weight)
        predictions.append(votes.argmax(dim=1))
    return torch.cat(predictions)


def knn_accuracy(
    queries: Tensor,
    query_labels: Tensor,
    bank: Tensor,
    bank_labels: Tensor,
    k: int = 200,
    temperature: float = 0.1,
) -> float:
    """Top-1 accuracy in percent."""
    classes = int(torch.maximum(bank_labels.max(), query_labels.max())) + 1
    predicted = knn_predict(queries, bank, bank_labels, classes, k, temperature)
    return 100 * (predicted == query_labels).float().mean().item()
