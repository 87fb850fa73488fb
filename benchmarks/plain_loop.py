"""The opponent: federated self-supervised training as research code writes it, and how fast that is.

    python -m benchmarks.plain_loop [--seconds 20] [--device cuda] [--transforms auto]

Clients train one after another: the server's model is deep-copied, a `DataLoader` of the client's own makes two views
of one Pillow image after another by torchvision's transforms, steps are eager float32, BYOL's target moves by a loop
over parameters, the loss is read after every step, and the server averages state dicts.

Looked at for this: EasyFL (weimingwill/EasyFL, applications/fedssl: FedU and FedEMA), Orchestra
(akhilmathurs/orchestra), FedX (Sungwon-Han/FEDX) and the FedU² authors' code (XeniaLLL/FedU2). The loop above is what
they share. The first three make the views in the training process, without workers; the last has 8 persistent workers
a client for up to ten clients, and 3 that start anew in every epoch for more. None pins memory.

Wherever a choice was open, it is the faster one that a practitioner would still write: all cores as workers (but no
more than an epoch has batches, as the others would start only to idle), kept over a client's local epochs; pinned
memory and asynchronous copies; cuDNN's search for the fastest convolution; TF32 as PyTorch has it by default
(convolutions yes, matrix products no); a target that moves in place; models that stay on the device.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import os
import random
import statistics
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from fedu2.experiment import Experiment
from fedu2.models import build_encoder
from fedu2.objectives import BYOL, Objective, objectives
from fedu2.views import MEAN, RECIPES, STD, Recipe

__all__ = ["PlainResult", "fedavg", "measure"]

WARM_UP = 5  # steps whose time does not count
RESIDENT_STEPS = 20  # timed steps on a batch that is already on the device

View = Callable[[Image.Image], Tensor]  # one random view of one image, (3, S, S), normalised


@dataclass(frozen=True)
class PlainResult:
    """What a measurement found. `seconds` holds all that happened between the counted steps, too."""

    samples_per_second: float
    step_ms: float  # seconds / steps: the loader's delays and changes of client included
    samples: int  # images trained on in the counted time
    seconds: float
    clients_seen: int  # different clients among the counted steps
    gpu_only_step_ms: float  # the same eager step on a resident batch: median
    change_ms: (
        float | None
    )  # mean time of a client's first step with its copied model and new loader; None: none counted
    loss: float  # mean of the counted steps
    transforms: str  # torchvision or pillow
    workers: int  # at most, for each client's loader


class Step(NamedTuple):
    """One optimizer step: on whose images, how many of them, and the loss."""

    client: int
    samples: int
    loss: float


def measure(
    images: Tensor,
    shares: Sequence[Tensor],
    objective: str,
    device: torch.device | str,
    seconds: float,
    *,
    encoder: str = "resnet18",
    width: int | None = None,
    batch_size: int = 128,
    epochs: int = 5,
    workers: int | None = None,
    transforms: str = "auto",
    seed: int = 0,
) -> PlainResult:
    """Train for `seconds` on uint8 images (n, 3, S, S) that are dealt out as `shares` says.

    A first few steps do not count, nor does the start of the first client's loader; what its workers have prepared in
    the meantime is a small gift (at most two batches a worker). The start of every further loader counts. Clients come
    in random order, so that a part of a round stands for the whole; those smaller than a batch make no step.
    """
    torch.manual_seed(seed)
    device, workers = torch.device(device), os.cpu_count() or 1 if workers is None else workers
    transforms, views = views_of(RECIPES[objective], images.shape[-1], transforms)
    server = build_model(objective, encoder, width).to(device)
    loop = rounds(server, TwoViews(images, views), shares, batch_size, epochs, workers, random.Random(seed))
    with _fastest_convolutions(), closing(loop):
        resident_ms = resident_step_ms(server, batch_size, images.shape[-1], device)
        previous = list(islice(loop, WARM_UP))[-1].client

        counted: list[Step] = []
        changes: list[float] = []
        start = before = now = perf_counter()
        while now - start < seconds:
            step = next(loop)
            now = perf_counter()  # the loss has been read: the device has nothing left to do
            if step.client != previous:
                changes.append(now - before)
            counted.append(step)
            previous, before = step.client, now

    samples, elapsed = sum(step.samples for step in counted), now - start
    return PlainResult(
        samples_per_second=samples / elapsed,
        step_ms=1e3 * elapsed / len(counted),
        samples=samples,
        seconds=elapsed,
        clients_seen=len({step.client for step in counted}),
        gpu_only_step_ms=resident_ms,
        change_ms=1e3 * statistics.mean(changes) if changes else None,
        loss=statistics.mean(step.loss for step in counted),
        transforms=transforms,
        workers=workers,
    )


def rounds(
    server: Objective,
    images: TwoViews,
    shares: Sequence[Tensor],
    batch_size: int,
    epochs: int,
    workers: int,
    rng: random.Random,
) -> Generator[Step, None, None]:
    """Rounds without end, one step at a time; `server` becomes the mean of the clients after every round."""
    device = next(server.parameters()).device
    clients = [client for client, share in enumerate(shares) if len(share) >= batch_size]
    if not clients:
        raise ValueError(f"no client has the {batch_size} images of a batch")
    while True:
        rng.shuffle(clients)
        states, sizes = [], []
        for client in clients:
            model = copy.deepcopy(server).train()
            optimizer = make_optimizer(model)
            loader = make_loader(images, shares[client], batch_size, workers, pin_memory=device.type == "cuda")
            for _ in range(epochs):
                for view1, view2 in loader:
                    view1, view2 = view1.to(device, non_blocking=True), view2.to(device, non_blocking=True)
                    yield Step(client, len(view1), train_step(model, optimizer, view1, view2))
            states.append(model.state_dict())
            sizes.append(len(shares[client]))
        server.load_state_dict(fedavg(states, sizes))


def build_model(objective: str, encoder: str, width: int | None) -> Objective:
    """The networks of the paper's setting: for ResNet-18, heads 512 → 2048 → 512."""
    experiment = Experiment.parse({"dataset": "cifar10", "objective": objective})
    return objectives[objective](build_encoder(encoder, width), experiment)


def make_optimizer(model: nn.Module) -> torch.optim.SGD:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.032, momentum=0.9, weight_decay=1e-4)


def make_loader(
    images: TwoViews, share: Tensor, batch_size: int, workers: int, pin_memory: bool
) -> DataLoader[tuple[Tensor, Tensor]]:
    """A client's loader: views (B, 3, S, S) on the host, a partial last batch left out."""
    workers = min(workers, len(share) // batch_size)
    return DataLoader(
        Subset(images, share.tolist()),
        batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=pin_memory,
    )


def train_step(model: Objective, optimizer: torch.optim.Optimizer, view1: Tensor, view2: Tensor) -> float:
    """One eager step; the loss, for the log."""
    optimizer.zero_grad()
    loss = model(view1, view2).loss
    loss.backward()
    optimizer.step()
    if isinstance(model, BYOL):
        move_target(model, model.options.momentum)
    return float(loss.item())


@torch.no_grad()
def move_target(model: BYOL, momentum: float) -> None:
    """θ' ← m θ' + (1 − m) θ, parameter by parameter."""
    online = chain(model.encoder.parameters(), model.projector.parameters())
    for target, source in zip(model.target.parameters(), online, strict=True):
        target.mul_(momentum).add_(source, alpha=1 - momentum)


@torch.no_grad()
def fedavg(states: Sequence[dict[str, Tensor]], sizes: Sequence[int]) -> dict[str, Tensor]:
    """Σ_k n_k/n θ_k for every entry of the state dicts, running statistics included."""
    total = sum(sizes)
    average = {}
    for name, first in states[0].items():
        mean = torch.zeros_like(first, dtype=torch.float32)
        for state, size in zip(states, sizes, strict=True):
            mean += state[name] * (size / total)
        average[name] = mean.to(first.dtype)  # counters of batches are whole numbers
    return average


def resident_step_ms(server: Objective, batch_size: int, size: int, device: torch.device) -> float:
    """Median milliseconds of `train_step` on one batch of noise that lies on the device; leaves `server` as it was."""
    model = copy.deepcopy(server).train()
    optimizer = make_optimizer(model)
    view1, view2 = (torch.randn(batch_size, 3, size, size, device=device) for _ in range(2))
    times = []
    for _ in range(WARM_UP + RESIDENT_STEPS):
        start = perf_counter()
        train_step(model, optimizer, view1, view2)
        times.append(perf_counter() - start)
    return 1e3 * statistics.median(times[WARM_UP:])


@contextmanager
def _fastest_convolutions() -> Iterator[None]:
    """`cudnn.benchmark`, given back as it was found: what is measured next has settings of its own."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class TwoViews(Dataset[tuple[Tensor, Tensor]]):
    """Two random views of each image, made one image at a time."""

    def __init__(self, images: Tensor, views: tuple[View, View]) -> None:
        self.images = images.permute(0, 2, 3, 1).contiguous().numpy()  # (n, S, S, 3) bytes, as CIFAR's own class has it
        self.views = views

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = Image.fromarray(self.images[index])
        first, second = self.views
        return first(image), second(image)


def views_of(recipes: tuple[Recipe, Recipe], size: int, transforms: str = "auto") -> tuple[str, tuple[View, View]]:
    """Whose transforms, and those of the two recipes; auto: torchvision's where it is installed, else Pillow's."""
    if any(recipe.blur for recipe in recipes):
        raise ValueError("the plain loop has no blur, which the recipes for 32 pixels do without")
    if transforms == "auto":
        transforms = "torchvision" if importlib.util.find_spec("torchvision") else "pillow"
    makers: dict[str, Callable[[Recipe, int], View]] = {"torchvision": torchvision_view, "pillow": PillowView}
    make = makers[transforms]
    first, second = recipes
    return transforms, (make(first, size), make(second, size))


def torchvision_view(recipe: Recipe, size: int) -> View:
    from torchvision import transforms as T

    jitter = T.ColorJitter(recipe.brightness, recipe.contrast, recipe.saturation, recipe.hue)
    operations = [
        T.RandomResizedCrop(size, scale=recipe.crop_scale),
        T.RandomHorizontalFlip(recipe.flip),
        T.RandomApply([jitter], recipe.jitter),
        T.RandomGrayscale(recipe.grayscale),
    ]
    if recipe.solarize:
        operations.append(T.RandomSolarize(128, recipe.solarize))
    compose: View = T.Compose([*operations, T.ToTensor(), T.Normalize([MEAN] * 3, [STD] * 3)])
    return compose


@dataclass(frozen=True)
class PillowView:
    """The same operations in the same order with Pillow alone: half of torchvision's time, which goes into checks.

    Chance is Python's `random`, which a loader seeds in each of its workers.
    """

    recipe: Recipe
    size: int

    def __call__(self, image: Image.Image) -> Tensor:
        recipe = self.recipe
        view = image.crop(_draw_box(image, recipe.crop_scale))
        view = view.resize((self.size, self.size), Image.Resampling.BILINEAR)
        if random.random() < recipe.flip:
            view = ImageOps.mirror(view)
        if random.random() < recipe.jitter:
            view = _jittered(view, recipe)
        if random.random() < recipe.grayscale:
            view = view.convert("L").convert("RGB")
        if random.random() < recipe.solarize:
            view = ImageOps.solarize(view, 128)
        pixels = torch.from_numpy(np.array(view)).permute(2, 0, 1).contiguous()
        return pixels.float().div_(255).sub_(MEAN).div_(STD)


def _draw_box(image: Image.Image, scale: tuple[float, float]) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of a crop of random area and shape; the whole image when ten do not fit."""
    for _ in range(10):
        area = image.width * image.height * random.uniform(*scale)
        aspect = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        width, height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < width <= image.width and 0 < height <= image.height:
            left, top = random.randint(0, image.width - width), random.randint(0, image.height - height)
            return left, top, left + width, top + height
    return 0, 0, image.width, image.height


def _jittered(image: Image.Image, recipe: Recipe) -> Image.Image:
    """Brightness, contrast, saturation and hue, in random order."""

    def blend(enhancer: Callable[[Image.Image], ImageEnhance._Enhance], strength: float) -> None:
        nonlocal image
        image = enhancer(image).enhance(random.uniform(max(0, 1 - strength), 1 + strength))

    def turn_hue() -> None:
        nonlocal image
        hue, saturation, value = image.convert("HSV").split()
        shift = int(255 * random.uniform(-recipe.hue, recipe.hue)) % 256
        turned = Image.fromarray(np.array(hue) + np.uint8(shift))  # bytes wrap around, as hues do
        image = Image.merge("HSV", (turned, saturation, value)).convert("RGB")

    operations = [
        lambda: blend(ImageEnhance.Brightness, recipe.brightness),
        lambda: blend(ImageEnhance.Contrast, recipe.contrast),
        lambda: blend(ImageEnhance.Color, recipe.saturation),
        turn_hue,
    ]
    for operation in random.sample(operations, 4):
        operation()
    return image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--transforms", choices=["auto", "torchvision", "pillow"], default="auto")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    setting: dict[str, Any] = {"transforms": arguments.transforms}
    if device.type == "cuda":
        count, seconds = 50_000, arguments.seconds or 20.0
        print(f"{torch.cuda.get_device_name(device)}, {os.cpu_count()} cores: ResNet-18, batches of 128")
    else:
        count, seconds = 4_000, arguments.seconds or 4.0
        setting |= {"encoder": "tiny", "width": 8, "batch_size": 32}
        print(f"{device}, {os.cpu_count()} cores: a tiny encoder, batches of 32")
    images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8)

    print("objective  clients  samples/s   step ms   resident step ms   change of client ms   clients seen  transforms")
    for objective, clients in (("byol", 10), ("byol", 100), ("simclr", 10), ("simsiam", 10)):
        shares = list(torch.randperm(count).chunk(clients))
        found = measure(images, shares, objective, device, seconds, **setting)
        change = "-" if found.change_ms is None else f"{found.change_ms:.0f}"
        print(
            f"{objective:9s} {clients:8d} {found.samples_per_second:10.0f} {found.step_ms:9.1f}"
            f" {found.gpu_only_step_ms:18.1f} {change:>21} {found.clients_seen:14d}  {found.transforms}"
        )


if __name__ == "__main__":
    main()
