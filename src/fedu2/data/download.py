"""Fetching one published file, whole and verified, or not at all."""

from __future__ import annotations

import hashlib
import http.client
import logging
import urllib.request
from collections.abc import Callable
from pathlib import Path

from fedu2.errors import DataError
from fedu2.files import atomic_file

__all__ = ["download"]

Progress = Callable[[int, int | None], None]  # bytes so far, bytes in all (None: not known)

CHUNK = 1 << 20
log = logging.getLogger("fedu2")


def download(
    url: str,
    target: Path,
    md5: str,
    *,
    progress: Progress | None = None,
    timeout: float = 30.0,
    max_bytes: int = 1 << 30,
) -> Path:
    """Fetch `url` to `target` and return `target`; the file appears only after its MD5 checksum has matched.

    `timeout` is the longest silence of the network in seconds. Without `progress`, every tenth part is logged.
    """
    report = progress or _log_progress(target.name)
    try:
        with atomic_file(target) as temporary:
            found = _fetch(url, temporary, report, timeout, max_bytes)
            if found != md5:
                raise DataError(f"{url} arrived with MD5 {found} instead of {md5}: try again")
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"{url} could not be downloaded ({error or type(error).__name__})") from error
    return target


def _fetch(url: str, path: Path, report: Progress, timeout: float, max_bytes: int) -> str:
    """Write the body of `url` to `path` and return its MD5 checksum."""
    digest = hashlib.md5(usedforsecurity=False)  # guards against accidents; no better sum is published
    received = 0
    # Addresses are constants of ours, and what arrives is bounded and checked.
    with urllib.request.urlopen(url, timeout=timeout) as response, path.open("wb") as file:  # nosec B310
        length = response.headers.get("Content-Length", "")
        total = int(length) if length.isdecimal() else None
        while chunk := response.read(CHUNK):
            received += len(chunk)
            if received > max_bytes:
                raise DataError(f"{url} is larger than the {max_bytes:,} bytes expected at most")
            file.write(chunk)
            digest.update(chunk)
            report(received, total)
    return digest.hexdigest()


def _log_progress(name: str) -> Progress:
    tenths = 0

    def report(received: int, total: int | None) -> None:
        nonlocal tenths
        if total and (done := 10 * received // total) > tenths:
            tenths = done
            log.info("downloading %s: %d %% of %.0f MB", name, 10 * done, total / 1e6)

    return report
