"""One run, fully described.

An `Experiment` holds every choice that influences a result. It is typed, validated, immutable, and goes to and
from YAML, so that the `config.yaml` in a run directory is enough to run it again. On the command line its fields
are keys, dotted for the parts: `method=fedu2 clients=10 fur.weight=1`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ModelWrapValidatorHandler, ValidationError, model_validator

from fedu2 import parsing
from fedu2.errors import UsageError
from fedu2.options import (
    AlignUniformOptions,
    BYOLOptions,
    DataOptions,
    DefenceOptions,
    EngineOptions,
    EUAOptions,
    EvaluationOptions,
    FedDecorrOptions,
    FedEMAOptions,
    FedUOptions,
    FedXOptions,
    FlowerOptions,
    FUROptions,
    HeadOptions,
    LDAWAOptions,
    OptimizerOptions,
    Options,
    OrchestraOptions,
    PartitionOptions,
    RotationOptions,
    ServerOptions,
    SimCLROptions,
    SSDOptions,
    ViewOptions,
)

__all__ = ["Experiment"]


# What suits the embedded sample on two CPU cores, in place of the paper's setting.
SAMPLE_DEFAULTS: dict[str, Any] = {
    "clients": 5,
    "encoder": "tiny",
    "rounds": 10,
    "local_epochs": 2,
    "batch_size": 64,
    "optimizer": {"lr": 0.06, "weight_decay": 1e-4, "schedule": "constant"},
    "views": {"crop_scale": (0.35, 1.0)},
    "evaluation": {"every": 2},
}


class Experiment(Options):
    """Every choice that influences a result.

    The defaults are the paper's cross-silo setting, trained by a recipe of our own (decision 15); with
    `dataset=sample`, `SAMPLE_DEFAULTS` take their place.
    """

    method: str = Field("fedu2", description="what clients and server compute; `fedu2 methods` lists them")
    objective: str | None = Field(None, description="ℓ_a: simclr, simsiam, byol, ...; default: that of the method")
    aggregator: str | None = Field(None, description="fedavg, eua or ldawa; default: that of the method")

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
    rotation: RotationOptions = RotationOptions()
    fur: FUROptions = FUROptions()
    eua: EUAOptions = EUAOptions()
    server: ServerOptions = ServerOptions()
    fedu: FedUOptions = FedUOptions()
    fedema: FedEMAOptions = FedEMAOptions()
    fedx: FedXOptions = FedXOptions()
    orchestra: OrchestraOptions = OrchestraOptions()
    ldawa: LDAWAOptions = LDAWAOptions()
    feddecorr: FedDecorrOptions = FedDecorrOptions()
    alignuniform: AlignUniformOptions = AlignUniformOptions()
    ssd: SSDOptions = SSDOptions()
    evaluation: EvaluationOptions = EvaluationOptions()
    engine: EngineOptions = EngineOptions()
    flower: FlowerOptions = FlowerOptions()
    defence: DefenceOptions = DefenceOptions()

    @model_validator(mode="wrap")
    @classmethod
    def _validated(cls, values: Any, handler: ModelWrapValidatorHandler[Experiment]) -> Experiment:
        """Lay the sample's defaults under what was set, and tell what is wrong in our own words."""
        values = _of_today(values)
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


def _of_today(values: Any) -> Any:
    """Nested values of a run or file of an earlier version, as this one calls them."""
    return _with_servers_step(_with_constant_weight(values)) if isinstance(values, dict) else values


# A run keeps all keys of a group; these are FUR's since the first version.
_FUR = {"weight", "form", "solver", "output", "tau_a", "tau_b", "references"}


def _with_constant_weight(values: dict[str, Any]) -> dict[str, Any]:
    """A run without `fur.schedule` is of a version in which λ_U did not fall; one without `fur.until`, of one in which
    it fell over all rounds.
    """
    group = values.get("fur")
    if not isinstance(group, dict) or not group.keys() >= _FUR:
        return values
    return {**values, "fur": {"schedule": "constant", "until": 1.0, **group}}


def _with_servers_step(values: dict[str, Any]) -> dict[str, Any]:
    """`eua.server_lr`, EUA's alone then, is `server.lr` now."""
    group = values.get("eua")
    if not isinstance(group, dict) or "server_lr" not in group:
        return values
    step = {"server": {"lr": group["server_lr"]}}
    chosen = values.get("aggregator") or ("eua" if values.get("method", "fedu2") == "fedu2" else None)
    rest = {**values, "eua": {key: value for key, value in group.items() if key != "server_lr"}}
    return parsing.laid_over(step, rest) if chosen == "eua" else rest
