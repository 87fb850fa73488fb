"""An encoder that needs no fedu2: `export` writes it as safetensors, ONNX or PT2, checked, with a model card."""

from fedu2.export.formats import formats
from fedu2.export.package import export

__all__ = ["export", "formats"]
