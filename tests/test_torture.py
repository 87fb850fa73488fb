"""The crash matrix in brief; `make torture` is the whole of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedu2.files import seal, unseal

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(sys.platform != "linux", reason="counts on Linux: namespaces, capabilities, limits on files")
def test_whatever_befalls_a_run_it_ends_the_same_or_says_why_not() -> None:
    """Fifteen kills, and a seeded sample of damaged files, small disks, read-only directories and rivals."""
    command = [sys.executable, "-m", "torture", "--brief", "--kills", "15", "--method", "fedema", "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(
        r"^fedema: (killed|.* of a checkpoint|disk full|file too large|.* read-only|second process).*? +(\d+) ",
        done.stdout,
        re.MULTILINE,
    )
    assert sum(int(times) for kind, times in rows if kind == "killed") == 15
    assert len({kind for kind, _ in rows}) >= 6, done.stdout


def test_a_seal_notices_every_changed_byte() -> None:
    sealed = seal("rounds: 4\n")
    assert unseal(sealed) == "rounds: 4\n"
    assert unseal("rounds: 4\n") == "rounds: 4\n"  # of an earlier version
    for place, letter in enumerate(sealed):
        for change in range(1, 128):
            with pytest.raises(ValueError, match="checksum"):
                unseal(sealed[:place] + chr(ord(letter) ^ change) + sealed[place + 1 :])
