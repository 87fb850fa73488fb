"""The groups of an experiment's keys: typed, closed, immutable."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "AlignUniformOptions",
    "BYOLOptions",
    "DataOptions",
    "DefenceOptions",
    "Divergence",
    "EUAOptions",
    "EngineOptions",
    "EvaluationOptions",
    "FUROptions",
    "FedDecorrOptions",
    "FedEMAOptions",
    "FedUOptions",
    "FedXOptions",
    "FlowerOptions",
    "HeadOptions",
    "LDAWAOptions",
    "OptimizerOptions",
    "Options",
    "OrchestraOptions",
    "PartitionOptions",
    "RotationOptions",
    "SSDOptions",
    "ServerOptions",
    "SimCLROptions",
    "ViewOptions",
]


class Options(BaseModel):
    """A group of keys: closed (no unknown names) and immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DataOptions(Options):
    """Where images come from."""

    root: str | None = Field(None, description="directory that holds the data set; default: the cache")
    download: bool = Field(True, description="fetch a missing archive when the network allows")
    layout: Literal["auto", "clients", "images"] = Field(
        "auto", description="dataset=folder: one sub-folder per client, or one folder that is partitioned"
    )
    holdout: float = Field(0.1, ge=0, lt=1, description="dataset=folder: share of images kept for evaluation")
    validation: float = Field(
        0.0, ge=0, lt=1, description="for tuning: this share of the training images takes the test images' place"
    )
    image_size: int = Field(32, ge=8, le=512, description="side of the square images that the encoder sees")


class PartitionOptions(Options):
    """How training images are dealt out to clients; see also the top-level keys partition and alpha."""

    min_size: int = Field(8, ge=1, description="dirichlet, quantity: fewest images of a client")
    classes_per_client: int = Field(2, ge=1, description="partition=classes: classes that a client holds")
    file: str | None = Field(None, description="partition=file: JSON file with one list of indices per client")


class ViewOptions(Options):
    """Random views; a field left at None takes the value of the recipe."""

    recipe: Literal["auto", "simclr", "byol", "simsiam", "weak", "none"] = Field(
        "auto", description="named set of augmentations; auto: that of the objective"
    )
    crop_scale: tuple[float, float] | None = Field(None, description="range of the crop's share of the area")
    flip: float | None = Field(None, ge=0, le=1, description="probability of a horizontal flip")
    jitter: float | None = Field(None, ge=0, le=1, description="probability of colour jitter")
    brightness: float | None = Field(None, ge=0, description="strength of the jitter")
    contrast: float | None = Field(None, ge=0, description="strength of the jitter")
    saturation: float | None = Field(None, ge=0, description="strength of the jitter")
    hue: float | None = Field(None, ge=0, le=0.5, description="strength of the jitter")
    grayscale: float | None = Field(None, ge=0, le=1, description="probability of grayscale")
    blur: float | None = Field(None, ge=0, le=1, description="probability of Gaussian blur")
    solarize: float | None = Field(None, ge=0, le=1, description="probability of solarisation of the second view")
    size: int | None = Field(None, ge=8, le=512, description="side of the views in pixels; default: the images' own")


class HeadOptions(Options):
    """Projector and predictor: two-layer MLPs with batch norm and ReLU between (512→2048→512 for ResNet-18)."""

    hidden: int | None = Field(None, ge=1, description="default: four times the encoder's features")
    out: int | None = Field(None, ge=1, description="dimension d of the projections; default: the encoder's features")


class SimCLROptions(Options):
    """NT-Xent."""

    temperature: float = Field(0.5, gt=0, description="τ of NT-Xent")


class BYOLOptions(Options):
    """The target network θ' ← m θ' + (1 − m) θ, moved after every step."""

    momentum: float = Field(0.9, ge=0, le=1, description="m of the target network")
    momentum_schedule: Literal["constant", "cosine"] = Field(
        "constant", description="cosine: m rises to 1 over the rounds, as in the BYOL paper"
    )
    target: Literal["auto", "shared", "local", "fresh"] = Field(
        "auto",
        description="shared: travels and is aggregated; local: stays at the client; fresh: begins each round as a copy "
        "of the online network that was sent; auto: as the method asks",
    )


class OptimizerOptions(Options):
    """The clients' local optimizer; its state starts afresh in every round."""

    name: Literal["sgd", "adam", "adamw"] = Field("sgd", description="its state starts afresh in every round")
    lr: float = Field(0.05, gt=0, le=1e30, description="learning rate")
    momentum: float = Field(0.9, ge=0, lt=1, description="sgd only")
    weight_decay: float = Field(5e-4, ge=0, description="on all parameters")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999), description="adam and adamw only"
    )
    schedule: Literal["constant", "cosine"] = Field(
        "cosine",
        description="of the learning rate over rounds; constant: a run can be prolonged",
    )


class FUROptions(Options):
    """Flexible uniform regulariser: unbalanced transport toward random points on the sphere."""

    weight: float = Field(2.0, ge=0, description="λ_U, in the units of the gradient; 0 switches FUR off")
    schedule: Literal["auto", "constant", "cosine"] = Field(
        "auto", description="cosine: λ_U falls to 0 over the rounds; auto: as optimizer.schedule"
    )
    until: float = Field(0.5, gt=0, le=1, description="schedule=cosine: the share of rounds after which λ_U is 0")
    form: Literal["cosine", "literal"] = Field(
        "cosine",
        description="cosine: unit masses, cost 1 − ⟨z, s⟩, moves mass; literal: as printed, moves none",
    )
    solver: Literal["sinkhorn", "fast", "exact"] = Field(
        "sinkhorn",
        description="gradient=plan: of the transport problem; `fedu2.regularizers.transport` has their accuracy",
    )
    output: Literal["projector", "encoder"] = Field("projector", description="the output that FUR acts on")
    gradient: Literal["plan", "expected"] = Field(
        "expected",
        description="plan: toward the matched references (λ_U = 0.1 in the paper); expected: its mean over references",
    )
    temperature: float = Field(0.5, gt=0, description="gradient=expected: of the plan, in deviations of the cost")
    tau_a: float = Field(0.8, gt=0, description="τ_a, penalty on the marginal of the batch")
    tau_b: float = Field(0.8, gt=0, description="τ_b, penalty on the marginal of the reference points")
    references: int | None = Field(None, ge=1, description="M, number of reference points; default: the batch size")


class EUAOptions(Options):
    """Efficient unified aggregator: min-norm combination of the clients' update directions."""

    step: Literal["convex", "extrapolated", "fedavg_norm", "literal", "unit"] = Field(
        "convex", description="how long the server's step is along the unified direction"
    )
    rates: Literal["equal", "shares"] = Field(
        "equal", description="all clients' models are neared at one rate, or each in proportion to its data share"
    )
    phi: float = Field(0.1, gt=0, description="φ of the paper; step=literal only")
    guard: float | None = Field(
        3.0,
        ge=1,
        description="a client's weight is at most guard times its data share, less for short updates; null: free",
    )
    until: float = Field(1.0, gt=0, le=1, description="the share of rounds after which the guard is 1")
    buffers: Literal["same", "size"] = Field(
        "size", description="batch-norm buffers: the same weights as the parameters, or by data size"
    )


class ServerOptions(Options):
    """The server's step along what the aggregator found, for all aggregators; see fedu2/federation/server_step.py."""

    lr: float = Field(1.0, gt=0, description="η, factor on the step")
    until: float = Field(1.0, gt=0, le=1, description="the share of rounds after which η is 1, if it was more")
    parts: Literal["all", "encoder"] = Field("all", description="what takes steps longer than 1; heads take 1 then")
    momentum: float = Field(0.0, ge=0, lt=1, description="β, of the steps of earlier rounds")


class RotationOptions(Options):
    """An auxiliary task for any method: by which of four angles was a view turned? (Gidaris et al., ICLR 2018)"""

    weight: float | None = Field(None, ge=0, description="of the rotation loss; default: that of the method, mostly 0")


Divergence = Literal["distance_to_global", "last_drift"]
_DIVERGENCE = "what is measured: global model against last local one (paper), or the last local training (code)"


class FedUOptions(Options):
    """FedU's divergence-aware predictor update."""

    threshold: float = Field(0.4, ge=0, description="μ: the predictor is replaced while the divergence is below it")
    divergence: Divergence = Field("distance_to_global", description=_DIVERGENCE)


class FedEMAOptions(Options):
    """FedEMA's divergence-aware moving average."""

    tau: float = Field(0.7, ge=0, le=1, description="τ of the autoscaler: μ in a client's second round")
    scale: float | None = Field(None, ge=0, description="a constant λ for all clients in place of the autoscaler")
    cap: float = Field(1.0, ge=0, le=1, description="the largest μ; FedU²'s port caps it at 0.7")
    divergence: Divergence = Field("last_drift", description=_DIVERGENCE)
    after_absence: Literal["overwrite", "merge"] = Field(
        "overwrite", description="a client that did not train in the round before: take the global model, or merge"
    )


class FedXOptions(Options):
    """FedX's two-sided distillation: four terms of weight 1."""

    temperature: float = Field(0.1, gt=0, description="τ of the contrastive terms and of the relations")
    target_temperature: float = Field(0.1, gt=0, description="τ₂ of the relations that are aimed at")
    divergence: Literal["toward_mean", "js"] = Field(
        "toward_mean", description="of two relations: KL from their mean (code), or Jensen–Shannon (paper)"
    )


class OrchestraOptions(Options):
    """Orchestra's clusters, local and global."""

    global_clusters: int = Field(128, ge=2, description="G")
    local_clusters: int = Field(16, ge=1, description="L, centroids that a client sends")
    memory: int = Field(128, ge=2, description="M, target projections that a client clusters")
    temperature: float = Field(0.1, gt=0, description="τ of the assignments")
    momentum: float = Field(0.996, ge=0, le=1, description="m of the target network")
    norm: bool = Field(True, description="the projector ends in a batch norm without parameters")
    server_steps: int = Field(500, ge=1, description="steps of the global clustering in a round")


class LDAWAOptions(Options):
    """L-DAWA: clients weighted by the cosine between their weights and the global ones."""

    level: Literal["tensor", "model"] = Field(
        "tensor", description="tensor: a cosine for each tensor; model: one for all weights, as in FedU²'s port"
    )
    renormalize: bool = Field(False, description="divide by the sum of the cosines, so that weights do not shrink")
    warm_up: int = Field(0, ge=0, description="rounds of FedAvg before; 3 in the authors' code")


class FedDecorrOptions(Options):
    """FedDecorr's penalty on correlated dimensions."""

    weight: float = Field(0.1, ge=0, description="β")
    scaling: Literal["code", "paper"] = Field(
        "code", description="code: off-diagonal, grows with the batch; paper: ‖correlations‖²/d²"
    )
    output: Literal["projector", "encoder"] = Field("projector", description="the output that is decorrelated")


class AlignUniformOptions(Options):
    """Alignment and uniformity (Wang and Isola, ICML 2020)."""

    weight: float = Field(1.0, ge=0, description="β of uniformity")
    t: float = Field(2.0, gt=0, description="of the Gaussian potential exp(−t‖z_i − z_j‖²)")


class SSDOptions(Options):
    """Soft Separation and Distillation."""

    separation: float = Field(1.0, ge=0, description="γ of the dimension-scaled regularisation")
    distillation: float = Field(0.1, ge=0, description="δ of the distillation from projector to encoder")
    scale: float = Field(10.0, gt=0, description="α, the factor on a client's own dimensions")
    form: Literal["code", "paper"] = Field("code", description="of its two terms; as printed, representations collapse")
    temperature: float = Field(0.5, gt=0, description="of the distillation; form=code only")


class EvaluationOptions(Options):
    """What is measured while training. Labels are used here and by class-wise partitions, nowhere else."""

    every: int = Field(1, ge=0, description="evaluate every n rounds; 0: after the last round only")
    k: int = Field(200, ge=1, description="neighbours in kNN")
    temperature: float = Field(0.1, gt=0, description="of the kNN vote")
    batch_size: int = Field(512, ge=1, description="images a forward pass")


_AUTO = "the median; auto: {} for clients that are not ours, none for our own; null switches it off"


class DefenceOptions(Options):
    """Against updates of clients that are not trusted; what each of them does is told in docs/robustness.md."""

    clip: Annotated[float, Field(ge=1)] | Literal["auto"] | None = Field(
        "auto", description="an update counts with at most so many times the length of " + _AUTO.format(20)
    )
    claims: Annotated[float, Field(ge=1)] | Literal["auto"] | None = Field(
        "auto", description="a client counts with at most so many times the images of " + _AUTO.format(3)
    )
    rule: Literal["none", "multi_krum", "trimmed"] = Field(
        "none", description="in front of the aggregator: leave out those far from the others, or trim each coordinate"
    )
    hostile: float = Field(0.3, ge=0, lt=0.5, description="share of a round's clients that the rule is built for")


class EngineOptions(Options):
    """Fast paths, used where they work: the same results up to rounding. `fedu2 doctor` shows what is used."""

    graph: bool = Field(True, description="capture the training step in a CUDA graph and replay it")
    fused: bool = Field(True, description="hand-written GPU kernels for batch norm, views and transport")
    compile: bool = Field(True, description="torch.compile for encoders that have no hand-written kernels")
    lanes: Annotated[int, Field(ge=1, le=16)] | Literal["auto"] = Field("auto", description="clients trained at once")
    threads: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = Field(
        "auto", description="CPU threads; auto: as many as there are idle cores"
    )


class FlowerOptions(Options):
    """A federation of sites over Flower; runs in one process leave these alone."""

    min_sites: int = Field(2, ge=1, description="sites that must be connected before the first round")
    min_replies: int = Field(2, ge=1, description="valid replies that a round needs, or all where fewer were asked")
    timeout: float = Field(3600.0, gt=0, description="seconds that a site has for a round; then it is left out")
    patience: float = Field(600.0, gt=0, description="seconds to wait for sites that are missing")
    half: bool = Field(False, description="parameters travel in bfloat16: half the bytes, and rounding")
    server_data: str | None = Field(
        None, description="labelled images at the server to judge by: a folder, or a data set; default: at the sites"
    )
