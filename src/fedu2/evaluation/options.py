"""The settings of the evaluation protocols; the defaults are the paper's, from its authors' code."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedu2.options import Options

__all__ = ["FinetuneOptions", "KNNOptions", "LinearOptions", "Protocols"]


class KNNOptions(Options):
    """Weighted nearest neighbours of frozen features."""

    k: int = Field(200, ge=1, description="neighbours")
    temperature: float = Field(0.1, gt=0, description="of the vote")


class LinearOptions(Options):
    """A linear classifier on frozen features."""

    epochs: int = Field(200, ge=1, description="passes over the features")
    batch_size: int = Field(512, ge=1, description="features in a step")
    lr: float = Field(3e-3, gt=0, description="learning rate of Adam")
    weight_decay: float = Field(0.0, ge=0, description="of Adam")


class FinetuneOptions(Options):
    """Encoder and classifier trained on few labels."""

    fractions: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(
        (0.01, 0.1), min_length=1, description="shares of the labels, by class"
    )
    epochs: int = Field(200, ge=1, description="passes over the labelled images")
    batch_size: int = Field(128, ge=2, description="images in a step")
    encoder_lr: float = Field(1e-3, gt=0, description="learning rate of the encoder")
    classifier_lr: float = Field(0.3, gt=0, description="learning rate of the classifier")
    scratch_lr: float = Field(0.03, gt=0, description="supervised reference: learning rate of the untrained network")
    momentum: float = Field(0.9, ge=0, lt=1, description="of SGD")
    weight_decay: float = Field(0.0, ge=0, description="of SGD")


class Protocols(Options):
    """All protocols."""

    knn: KNNOptions = KNNOptions()
    linear: LinearOptions = LinearOptions()
    finetune: FinetuneOptions = FinetuneOptions()
