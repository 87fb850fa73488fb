"""One run, fully described.

An `Experiment` holds every choice that influences a result. It is typed, validated, immutable, and goes to and
from YAML, so that the `config.yaml` in a run directory is enough to run it again. On the command line its fields
are keys, dotted for the parts: `method=fedu2 clients=10 fur.weight=0.1`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from fedu2 import parsing
from fedu2.errors import UsageError

__all__ = [
    "BYOLOptions",
    "DataOptions",
    "EUAOptions",
    "EngineOptions",
    "EvaluationOptions",
    "Experiment",
    "FUROptions",
    "HeadOptions",
    "OptimizerOptions",
    "PartitionOptions",
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


class HeadOptions(Options):
    """Projector and predictor: two-layer MLPs with batch norm and ReLU between (512→2048→512 for ResNet-18)."""

    hidden: int | None = Field(None, ge=1, description="default: four times the encoder's features")
    out: int | None = Field(None, ge=1, description="dimension d of the projections; default: the encoder's features")


class SimCLROptions(Options):
    """NT-Xent."""

    temperature: float = Field(0.5, gt=0, description="τ of NT-Xent")


class BYOLOptions(Options):
    """The target network θ' ← m θ' + (1 − m) θ, moved after every step."""

    momentum: float = Field(0.99, ge=0, le=1, description="m of the target network")
    momentum_schedule: Literal["constant", "cosine"] = Field(
        "constant", description="cosine: m rises to 1 over the rounds, as in the BYOL paper"
    )
    target: Literal["auto", "shared", "local"] = Field(
        "auto",
        description="shared: travels and is aggregated; local: stays at the client; auto: as the method asks",
    )


class OptimizerOptions(Options):
    """The clients' local optimizer; its state starts afresh in every round."""

    name: Literal["sgd", "adam", "adamw"] = Field("sgd", description="its state starts afresh in every round")
    lr: float = Field(0.032, gt=0, le=1e30, description="learning rate")
    momentum: float = Field(0.9, ge=0, lt=1, description="sgd only")
    weight_decay: float = Field(1e-4, ge=0, description="on all parameters")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999), description="adam and adamw only"
    )
    schedule: Literal["constant", "cosine"] = Field("constant", description="of the learning rate over rounds")


class FUROptions(Options):
    """Flexible uniform regulariser: unbalanced transport toward random points on the sphere."""

    weight: float = Field(0.1, ge=0, description="λ_U; 0 switches FUR off")
    form: Literal["cosine", "literal"] = Field(
        "cosine",
        description="cosine: unit masses, cost 1 − ⟨z, s⟩, moves mass; literal: as printed, moves none",
    )
    solver: Literal["sinkhorn", "fast", "exact"] = Field(
        "sinkhorn", description="of the transport problem; `fedu2.regularizers.transport` has their accuracy"
    )
    output: Literal["projector", "encoder"] = Field("projector", description="the output that FUR acts on")
    tau_a: float = Field(0.8, gt=0, description="τ_a, penalty on the marginal of the batch")
    tau_b: float = Field(0.8, gt=0, description="τ_b, penalty on the marginal of the reference points")
    references: int | None = Field(None, ge=1, description="M, number of reference points; default: the batch size")


class EUAOptions(Options):
    """Efficient unified aggregator: min-norm combination of the clients' update directions."""

    step: Literal["convex", "fedavg_norm", "literal", "unit"] = Field(
        "convex", description="how long the server's step is along the unified direction"
    )
    server_lr: float = Field(1.0, gt=0, description="factor η on that step")
    phi: float = Field(0.1, gt=0, description="φ of the paper; step=literal only")
    guard: float | None = Field(
        3.0, ge=1, description="a client's weight is at most guard times its data share; null switches it off"
    )
    buffers: Literal["same", "size"] = Field(
        "size", description="batch-norm buffers: the same weights as the parameters, or by data size"
    )


class EvaluationOptions(Options):
    """What is measured while training. Labels are used here and by class-wise partitions, nowhere else."""

    every: int = Field(1, ge=0, description="evaluate every n rounds; 0: after the last round only")
    k: int = Field(200, ge=1, description="neighbours in kNN")
    temperature: float = Field(0.1, gt=0, description="of the kNN vote")
    batch_size: int = Field(512, ge=1, description="images a forward pass")


class EngineOptions(Options):
    """Fast paths, used where they work: the same results up to rounding. `fedu2 doctor` shows what is used."""

    graph: bool = Field(True, description="capture the training step in a CUDA graph and replay it")
    fused: bool = Field(True, description="hand-written GPU kernels for batch norm, views and transport")
    compile: bool = Field(True, description="torch.compile for encoders that have no hand-written kernels")
    lanes: Annotated[int, Field(ge=1, le=16)] | Literal["auto"] = Field("auto", description="clients trained at once")
    threads: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = Field(
        "auto", description="CPU threads; auto: as many as there are idle cores"
    )


# What suits the embedded sample on two CPU cores, in place of the paper's setting.
SAMPLE_DEFAULTS: dict[str, Any] = {
    "clients": 5,
    "encoder": "tiny",
    "rounds": 10,
    "local_epochs": 2,
    "batch_size": 64,
    "optimizer": {"lr": 0.06},
    "byol": {"momentum": 0.9},
    "views": {"crop_scale": (0.35, 1.0)},
    "evaluation": {"every": 2},
}


class Experiment(Options):
    """Every choice that influences a result.

    The defaults are the paper's cross-silo setting; with `dataset=sample`, `SAMPLE_DEFAULTS` take their place.
    """

    method: str = Field("fedu2", description="what clients and server compute; `fedu2 methods` lists them")
    objective: str | None = Field(None, description="ℓ_a: simclr, simsiam or byol; default: that of the method")
    aggregator: str | None = Field(None, description="fedavg or eua; default: that of the method")

    dataset: str = Field("sample", description="where images come from; `fedu2 datasets` lists them")
    clients: int = Field(10, ge=1, description="K, the number of clients")
    partition: Literal["dirichlet", "iid", "classes", "quantity", "file", "folders"] = Field(
        "dirichlet", description="how training images are dealt out"
    )
    alpha: float = Field(0.1, gt=0, description="concentration of the Dirichlet and quantity-skew partitions")

    encoder: str = Field("resnet18", description="F: tiny, resnet10, resnet18, resnet34, resnet50, or your own")
    width: int | None = Field(None, ge=1, description="channels of the first stage; default: that of the encoder")

    rounds: int = Field(100, ge=1, description="R, rounds of communication")
    participation: float = Field(1.0, gt=0, le=1, description="share of clients drawn in each round")
    local_epochs: int = Field(5, ge=1, description="E, passes of a client over its images in a round")
    local_steps: Annotated[int, Field(ge=1)] | Literal["epochs", "equal"] = Field(
        "epochs",
        description="epochs: E passes; equal: small clients make more passes, so that all do about as many "
        "steps; a number: exactly so many steps",
    )
    max_local_epochs: int = Field(10, ge=1, description="local_steps=equal: most passes of a small client")
    batch_size: int = Field(128, ge=2, description="B, images in a step")
    last_batch: Literal["drop", "keep", "fill"] = Field(
        "drop", description="a partial last batch of an epoch: left out, trained as it is, or filled up"
    )
    client_weights: Literal["size", "uniform"] = Field("size", description="FedAvg weights: n_k/n or 1/K")

    seed: int = Field(0, ge=0, description="of every random choice")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, ...")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of forward passes (autocast); auto: bfloat16 where the GPU has it"
    )
    checkpoint_every: int = Field(1, ge=1, description="rounds between checkpoints")

    data: DataOptions = DataOptions()
    split: PartitionOptions = PartitionOptions()
    views: ViewOptions = ViewOptions()
    heads: HeadOptions = HeadOptions()
    simclr: SimCLROptions = SimCLROptions()
    byol: BYOLOptions = BYOLOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    fur: FUROptions = FUROptions()
    eua: EUAOptions = EUAOptions()
    evaluation: EvaluationOptions = EvaluationOptions()
    engine: EngineOptions = EngineOptions()

    @model_validator(mode="wrap")
    @classmethod
    def _validated(cls, values: Any, handler: ModelWrapValidatorHandler[Experiment]) -> Experiment:
        """Lay the sample's defaults under what was set, and tell what is wrong in our own words."""
        if isinstance(values, dict) and values.get("dataset", "sample") == "sample":
            views = values.get("views")
            own_recipe = isinstance(views, dict) and "recipe" in views  # which is then not to be tampered with
            defaults = {key: value for key, value in SAMPLE_DEFAULTS.items() if key != "views" or not own_recipe}
            values = parsing.laid_over(defaults, values)
        try:
            return handler(values)
        except ValidationError as error:
            raise UsageError(parsing.explain(cls, error)) from None

    @classmethod
    def parse(cls, values: Mapping[str, Any], assignments: Sequence[str] = ()) -> Experiment:
        """An experiment from nested `values`, with `key=value` assignments (YAML scalars) laid over them."""
        return cls.model_validate(parsing.tree(cls, values, assignments))

    @classmethod
    def load(cls, path: str | Path, assignments: Sequence[str] = ()) -> Experiment:
        """An experiment from a YAML file."""
        return cls.parse(parsing.read_yaml(Path(path)), assignments)

    def to_yaml(self) -> str:
        """The complete experiment as YAML; `load` reads it back to an equal one."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    def with_(self, **values: Any) -> Experiment:
        """A copy with some fields replaced; dotted keys are written with two underscores: `fur__weight=0`."""
        dotted = {key.replace("__", "."): value for key, value in values.items()}
        return Experiment.parse({**self.flat(), **dotted})

    def flat(self) -> dict[str, Any]:
        """All keys and values, dotted."""
        return dict(parsing.leaves(self.model_dump(mode="json")))
