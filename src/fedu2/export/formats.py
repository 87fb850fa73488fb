"""Forms that an exported network can take, by name: how it is written, read back, and used by others."""

from __future__ import annotations

import importlib
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save
from torch import Tensor

from fedu2.errors import UsageError
from fedu2.export import standalone
from fedu2.export.network import Network
from fedu2.registry import Registry

__all__ = ["Format", "formats"]

Loaded = Callable[[Tensor], Tensor]
Facts = Mapping[str, Any]


class Format(ABC):
    """A form of the exported network.

    snippet: how a stranger uses it in the exported folder; `images` is a NumPy array, float32 (N, 3, S, S) in [0, 1].
    """

    snippet: ClassVar[str]

    def check(self, encoder: str) -> None:
        """Refuse what cannot be written, before anything is computed."""
        return

    @abstractmethod
    def write(self, network: Network, folder: Path, facts: Facts) -> None:
        """Write the network's files; config.json, with `facts`, is there already."""

    @abstractmethod
    def load(self, folder: Path) -> Loaded:
        """What was written, as others would read it."""


formats: Registry[Format] = Registry("format")


class Safetensors(Format):
    """Weights under the names of PyTorch's state dict, and a file that defines the network."""

    snippet = """import torch
from encoder import load

with torch.inference_mode():
    features = load()(torch.from_numpy(images))
"""

    def check(self, encoder: str) -> None:
        if encoder not in standalone.ARCHITECTURES:
            known = ", ".join(standalone.ARCHITECTURES)
            raise UsageError(
                f"encoder {encoder!r} is your own, and encoder.py defines {known}: choose the format onnx or pt2"
            )

    def write(self, network: Network, folder: Path, facts: Facts) -> None:
        told = {name: str(value) for name, value in facts.items()}
        weights = {name: tensor for name, tensor in network.module.state_dict().items() if tensor.is_floating_point()}
        (folder / "encoder.safetensors").write_bytes(save(weights, told))  # save_file would hide it from other users
        (folder / "encoder.py").write_bytes(Path(standalone.__file__).read_bytes())

    def load(self, folder: Path) -> Loaded:
        return standalone.load(folder)  # encoder.py is a copy of that file: nothing in the folder is executed


class PT2(Format):
    """The traced network as torch.export saves it."""

    snippet = """import torch

encoder = torch.export.load("encoder.pt2").module()
features = encoder(torch.from_numpy(images))
"""

    def write(self, network: Network, folder: Path, facts: Facts) -> None:
        file = BytesIO()  # on a full disk torch's own writer would end the process
        torch.export.save(network.program, file)
        (folder / "encoder.pt2").write_bytes(file.getvalue())

    def load(self, folder: Path) -> Loaded:
        return torch.export.load(folder / "encoder.pt2").module()


class ONNX(Format):
    """The traced network in ONNX, for runtimes in any language."""

    snippet = """import onnxruntime

session = onnxruntime.InferenceSession("encoder.onnx")
features = session.run(["features"], {"images": images})[0]
"""

    def check(self, encoder: str) -> None:
        for package in ("onnx", "onnxscript", "onnxruntime"):
            try:
                importlib.import_module(package)
            except ImportError:
                raise UsageError(f"format onnx needs {package}: pip install 'fedu2[onnx]'") from None

    def write(self, network: Network, folder: Path, facts: Facts) -> None:
        with _silence():
            written = torch.onnx.export(
                network.program,
                (torch.zeros(2, 3, network.size, network.size),),
                dynamo=True,
                input_names=["images"],
                output_names=["features"],
                dynamic_shapes={"images": {0: torch.export.Dim("batch", min=1)}},
                verbose=False,
            )
            assert written is not None
            graph = written.model.graph
            for part in (*graph, *graph.inputs, *graph.outputs, *graph.initializers.values()):
                part.metadata_props.clear()  # the exporter's notes: longer than the graph
            written.model.metadata_props.update({name: str(value) for name, value in facts.items()})
            written.save(folder / "encoder.onnx")

    def load(self, folder: Path) -> Loaded:
        runtime = importlib.import_module("onnxruntime")
        session = runtime.InferenceSession(folder / "encoder.onnx", providers=["CPUExecutionProvider"])
        return lambda images: torch.from_numpy(session.run(["features"], {"images": images.numpy()})[0])


@contextmanager
def _silence() -> Iterator[None]:
    """Exporters talk a lot, of what others have not installed and what they will not support one day."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(before)


formats.register("safetensors")(Safetensors())
formats.register("pt2")(PT2())
formats.register("onnx")(ONNX())
formats.seal()
