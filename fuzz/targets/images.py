"""Pictures of a folder: what is no picture is skipped with a reason."""

from __future__ import annotations

import io
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from fedu2.data.decode import decode_files

__all__ = ["hostile", "one_input", "seeds"]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "TGA", "ICO", "JPEG2000", "PCX", "DDS", "AVIF")
MODES = {"PNG": ("RGBA", "P", "I;16", "1", "LA"), "TIFF": ("F", "I;16", "RGBA", "CMYK"), "JPEG": ("L", "CMYK"),
         "GIF": ("P",), "WEBP": ("RGBA",)}  # fmt: skip

# Black squares, RGBA, too slow to make each time: of as many pixels as their format allows, and of 7999 × 7999. Those
# in JPEG 2000 say that their colours have 31 bits, those in WebP that they are to be turned.
PICTURES = Path(__file__).parents[1] / "pictures"


def seeds() -> list[bytes]:
    """A small picture in every format, and in the modes that are read in ways of their own."""
    pairs = [(name, mode) for name in FORMATS for mode in ("RGB", *MODES.get(name, ()))]
    return [content for name, mode in pairs if (content := _picture(name, mode))]


def _picture(name: str, mode: str) -> bytes:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned
    picture = Image.linear_gradient("L").resize((24, 17)).convert(mode if mode != "I;16" else "I")
    extra = {"exif": exif} if name in ("JPEG", "PNG", "WEBP") else {}
    try:
        (picture.convert("I;16") if mode == "I;16" else picture).save(file, name, **extra)
    except (OSError, KeyError, ValueError):  # this Pillow was built without it
        return b""
    return file.getvalue()


def hostile() -> list[bytes]:
    """Pictures that are small in a file and large in memory, or say so; and one in an icon."""
    pictures = [
        ("PNG", "1", 7900),
        ("PNG", "RGBA", 4000),
        ("PNG", "1", 11_000),
        ("TIFF", "F", 3000),
        ("GIF", "P", 7900),
    ]
    made = [_large(*picture) for picture in pictures]
    claim = bytearray(made[0])
    claim[16:24] = (60_000).to_bytes(4, "big") * 2
    inner = made[0]
    icon = b"\0\0\1\0\1\0\x10\x10\0\0\1\0\x20\0" + len(inner).to_bytes(4, "little") + (22).to_bytes(4, "little")
    return [*made, bytes(claim), icon + inner, *(path.read_bytes() for path in sorted(PICTURES.iterdir()))]


def _large(name: str, mode: str, side: int) -> bytes:
    file = io.BytesIO()
    extra = {"compression": "tiff_adobe_deflate"} if name == "TIFF" else {}
    Image.new(mode, (side, side)).save(file, name, **extra)
    return file.getvalue()


def one_input(data: bytes) -> None:
    """As a folder is read; that there was no memory for it must not be a reason to skip a picture."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "picture.png")
        path.write_bytes(data)
        _, reasons = decode_files([path], 16)
    if "MemoryError" in reasons.values():
        raise MemoryError
