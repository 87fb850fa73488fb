"""The model card: what an exported encoder is, how good, how to use it. No paths, no names of sites or machines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fedu2.evaluate import kept
from fedu2.experiment import Experiment
from fedu2.export.formats import Format
from fedu2.methods import MethodCard, methods
from fedu2.run import Run

__all__ = ["PREPARE", "model_card"]

PREPARE = """import numpy as np
from PIL import Image, ImageOps

picture = ImageOps.exif_transpose(Image.open("picture.png")).convert("RGB")
picture = ImageOps.fit(picture, ({size}, {size}), Image.Resampling.BICUBIC)
images = np.asarray(picture, np.float32).transpose(2, 0, 1)[None] / 255  # (1, 3, {size}, {size}) in [0, 1]
"""

FEDU2 = """@inproceedings{liao2024rethinking,
  title     = {Rethinking the Representation in Federated Unsupervised Learning with Non-IID Data},
  author    = {Liao, Xinting and Liu, Weiming and Chen, Chaochao and Zhou, Pengyang and Yu, Fengyuan and Zhu, Huabin
               and Yao, Binhui and Wang, Tao and Zheng, Xiaolin and Tan, Yanchao},
  booktitle = {Proceedings of the IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)},
  year      = {2024}
}"""

CARD = """---
license: other
pipeline_tag: image-feature-extraction
tags: [federated-learning, self-supervised-learning]
---

# {title} encoder: {encoder}, {features} features

Maps RGB images of {size}×{size} pixels to vectors of {features} numbers. Trained without labels, federated over
{clients} clients, by {title}: {summary}

## Use

`images` are float32, (N, 3, {size}, {size}), RGB in [0, 1]; normalisation is part of the network.
To make one of a picture (a transparent one, or one with 16 bits a channel, must be made plain RGB first):

```python
{prepare}```

{uses}

## Training

| | |
| --- | --- |
{training}

## Figures

{figures}

## Intended use and limits

For search, clustering, and classifiers on top of its vectors, on images like those of its training; or as a start for
fine-tuning. By itself it names nothing.

It has learned from its clients' images, with whatever these show too often or too seldom: judge it on images of your
own before you rely on it, above all where people may come to harm. On pictures of another kind, or much larger than
{size}×{size} before they were scaled, its vectors may be worth little. That images did not travel is no proof of
privacy: weights can tell something of what they were trained on.

## Licence

To be stated by those who publish this model; it depends on the training images, too.

## Citation

{citation}
"""


def model_card(run: Run, facts: Mapping[str, Any], formats: Mapping[str, Format]) -> str:
    """README.md of an export, from what the run has written."""
    method = methods[run.experiment.method]
    return CARD.format(
        **{name: facts[name] for name in ("encoder", "features", "clients")},
        title=method.title,
        summary=method.summary,
        size=facts["image_size"],
        prepare=PREPARE.format(size=facts["image_size"]),
        uses="\n\n".join(f"`{name}`:\n\n```python\n{format_.snippet}```" for name, format_ in formats.items()),
        training=_rows(_training(run.experiment, facts)),
        figures=_figures(run, facts),
        citation=f"{_cited(method)}\n\n```bibtex\n{FEDU2}\n```",
    )


def _cited(method: MethodCard) -> str:
    if method is methods["fedu2"]:
        return "The method, FedU²:"
    return (
        f"The method, {method.title}: {method.reference}.\n\nThe program that trained it, fedu2, is built around FedU²:"
    )


def _rows(table: Mapping[str, Any]) -> str:
    return "\n".join(f"| {name} | {value} |" for name, value in table.items())


def _training(experiment: Experiment, facts: Mapping[str, Any]) -> dict[str, Any]:
    shares = {
        "dirichlet": f", α = {experiment.alpha:g}",
        "quantity": f", α = {experiment.alpha:g}",
        "classes": f", {experiment.split.classes_per_client} classes each",
    }
    steps = experiment.local_steps
    local = f"{steps} steps" if isinstance(steps, int) else f"{experiment.local_epochs} epochs"
    chosen = ", the best by kNN on the test images" if facts["best"] else ""
    return {
        "data set": experiment.dataset,
        "clients": f"{experiment.clients}, partition {experiment.partition}{shares.get(experiment.partition, '')}",
        "method": f"{experiment.method}, objective {experiment.objective}, aggregator {experiment.aggregator}",
        "rounds": f"{facts['round']} of {experiment.rounds}{chosen}",
        "in a round": f"{local}, batches of {experiment.batch_size}, {experiment.participation:.0%} of the clients",
        "optimizer": f"{experiment.optimizer.name}, learning rate {experiment.optimizer.lr:g}",
        "seed": experiment.seed,
    }


def _figures(run: Run, facts: Mapping[str, Any]) -> str:
    """What was measured of this very encoder, beside the untrained one."""
    records = {record["round"]: record for record in run.history}
    trained, untrained = records.get(facts["round"], {}), records.get(0, {})
    names = {"knn": "accuracy in %, kNN while training", "effective_rank": "effective rank", "alignment": "alignment",
             "uniformity": "uniformity"}  # fmt: skip
    lines = [
        f"| {title} | {trained[name]:.4g} | {f'{untrained[name]:.4g}' if name in untrained else '–'} |"
        for name, title in names.items()
        if name in trained
    ]
    lines += _judged(run, facts)
    if not lines:
        return "Nothing was measured of this encoder."
    return "\n".join(["| | this encoder | untrained |", "| --- | --- | --- |", *lines])


def _judged(run: Run, facts: Mapping[str, Any]) -> list[str]:
    """The rows of evaluation.json; a folder of the user's own is not named."""
    entries = [entry for entry in kept(run) if not entry["protocol"].startswith("supervised")]  # of another network

    def shown(entry: Mapping[str, Any]) -> str:
        spread = f" ± {entry['deviation']:.1f}" if len(entry["values"]) > 1 else ""
        return f"{entry['mean']:.1f}{spread}"

    def settings(entry: Mapping[str, Any]) -> str:
        return json.dumps([entry[name] for name in ("protocol", "data", "seeds", "options")])

    before = {settings(entry): shown(entry) for entry in entries if entry["encoder"] == "untrained"}
    rows = {}
    for entry in entries:
        if entry["encoder"] != "untrained" and entry["round"] == facts["round"]:
            where = "" if entry["data"] == run.experiment.dataset else ", on other labelled images"
            rows[entry["protocol"], where] = (shown(entry), before.get(settings(entry), "–"))  # the last counts
    return [
        f"| accuracy in %, {name}{where} | {after} | {untrained} |"
        for (name, where), (after, untrained) in rows.items()
    ]
