"""Keys: formats, modes, names, and that nothing is replaced or left half-written."""

from __future__ import annotations

import os
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedu2.errors import UsageError
from fedu2.federation.flower import keys as module
from fedu2.federation.flower.keys import Keys, make_keys, make_node_keys


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _handshake(keys: Keys, ca: Path, host: str) -> None:
    """A TLS connection in memory, to the server of `keys`, by someone who trusts `ca` and calls it `host`."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(keys.certificate, keys.certificate_key)
    client = ssl.create_default_context(cafile=ca)
    client.verify_flags |= ssl.VERIFY_X509_STRICT  # Python 3.13's default
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(down, up, server_hostname=host), server.wrap_bio(up, down, server_side=True)]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                pass


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "fed.example.org", "10.0.0.7", "::1"])
def test_a_client_that_trusts_the_authority_accepts_the_server_by_each_of_its_names(tmp_path: Path, host: str) -> None:
    keys = make_keys(tmp_path / "k", ["a"], ["127.0.0.1", "localhost", "fed.example.org", "10.0.0.7", "::1"])
    _handshake(keys, keys.ca, host)


def test_another_name_or_another_authority_is_refused(tmp_path: Path) -> None:
    keys, others = make_keys(tmp_path / "k", []), make_keys(tmp_path / "o", [])
    with pytest.raises(ssl.SSLCertVerificationError, match=r"not valid for .fed\.example\.org"):
        _handshake(keys, keys.ca, "fed.example.org")
    with pytest.raises(ssl.SSLCertVerificationError):
        _handshake(keys, others.ca, "127.0.0.1")


def test_certificates_are_valid_from_now_for_as_long_as_asked(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "k", [], days=3)
    for path in (keys.ca, keys.certificate):
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        now = datetime.now(UTC)
        assert certificate.not_valid_before_utc < now
        assert abs(certificate.not_valid_after_utc - now - timedelta(days=3)) < timedelta(minutes=5)


def test_node_keys_are_p384_pairs_in_openssh_format_and_all_different(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "k", ["site-1", "site_2"])
    publics = set()
    for node, path in keys.nodes.items():
        private = load_ssh_private_key(path.read_bytes(), None)
        public = load_ssh_public_key(keys.public(node).read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert private.curve.name == "secp384r1"
        assert private.public_key() == public
        assert path.read_bytes().startswith(b"-----BEGIN OPENSSH PRIVATE KEY-----")
        assert keys.public(node).read_text().endswith(f" {node}\n")
        publics.add(keys.public(node).read_text().split()[1])
    assert len(publics) == 2


def test_private_files_and_their_folder_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)  # the worst
    try:
        keys = make_keys(tmp_path / "k", ["a"])
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in keys.folder.iterdir()}
    assert modes == {
        "a": 0o600, "ca.key": 0o600, "server.key": 0o600, "a.pub": 0o644, "ca.crt": 0o644, "server.pem": 0o644
    }  # fmt: skip
    assert keys.folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_with_other_files_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    tmp_path.chmod(0o755)
    make_keys(tmp_path, ["a"])
    assert tmp_path.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_no_keys_where_others_may_replace_them(tmp_path: Path, mode: int) -> None:
    (tmp_path / "notes").write_text("mine")
    tmp_path.chmod(mode)
    with pytest.raises(UsageError, match="others may write to"):
        make_keys(tmp_path, ["a"])
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_nothing_is_replaced_without_force(tmp_path: Path) -> None:
    folder = tmp_path / "k"
    make_node_keys(folder, ["a"])
    before = _contents(folder)
    with pytest.raises(UsageError, match=r"already has a, a\.pub"):
        make_keys(folder, ["a", "b"])
    assert _contents(folder) == before
    make_keys(folder, ["a", "b"], force=True)
    after = _contents(folder)
    assert set(after) == {"a", "a.pub", "b", "b.pub", "ca.crt", "ca.key", "server.pem", "server.key"}
    assert all(after[name] != before[name] for name in before)


def test_a_site_joins_beside_those_that_are_there(tmp_path: Path) -> None:
    folder = tmp_path / "k"
    make_keys(folder, ["a"])
    before = _contents(folder)
    keys = make_node_keys(folder, ["late"])
    after = _contents(folder)
    assert set(after) - set(before) == {"late", "late.pub"}
    assert {name: after[name] for name in before} == before
    assert list(keys.nodes) == ["late"]


def test_a_full_disk_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really, opened = os.open, []

    def full(path: Path, flags: int, mode: int = 0o777) -> int:
        opened.append(path)
        if len(opened) == 4:
            raise OSError(28, "No space left on device")
        return really(path, flags, mode)

    monkeypatch.setattr(module.os, "open", full)
    with pytest.raises(UsageError, match="No space left on device"):
        make_keys(tmp_path / "k", ["a"])
    assert len(opened) == 4
    assert _contents(tmp_path / "k") == {}


def test_what_keys_say_of_themselves_is_no_secret(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "k", ["a"])
    told = repr(keys)
    for path in (keys.nodes["a"], keys.ca_key, keys.certificate_key):
        assert not any(line in told for line in path.read_text().splitlines())
    assert str(keys.folder) in told


@pytest.mark.parametrize(
    ("arguments", "options", "why"),
    [
        ([["../a"]], {}, "letters, digits"),
        ([["ca.key"]], {}, "letters, digits"),
        ([[""]], {}, "letters, digits"),
        ([["-a"]], {}, "letters, digits"),
        ([["a", "A"]], {}, "a name of its own"),
        ([["a"], []], {}, "at least one"),
        ([["a"], ["https://fed.example.org"]], {}, "neither a host's name"),
        ([["a"], ["10.0.0.7:8000"]], {}, "neither a host's name"),
        ([["a"], ["-x.org"]], {}, "neither a host's name"),
        ([["a"]], {"days": 0}, "1 to 3650 days"),
    ],
)
def test_impossible_wishes_are_refused_before_anything_is_written(
    tmp_path: Path, arguments: list[list[str]], options: dict[str, int], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        make_keys(tmp_path / "k", *arguments, **options)
    assert not (tmp_path / "k").exists()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="keys cannot be written to"):
        make_keys(tmp_path / "file" / "k", ["a"])


@pytest.mark.parametrize("days", [0, 3_000_000])
def test_a_validity_that_makes_no_sense_is_refused(tmp_path: Path, days: int) -> None:
    with pytest.raises(UsageError, match="days"):
        make_keys(tmp_path / "keys", ["a"], days=days)
    assert not (tmp_path / "keys").exists()


def test_a_folder_in_the_place_of_a_key_leaves_all_others_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "north").mkdir()
    with pytest.raises(UsageError, match="folders in the place of keys: north"):
        make_keys(tmp_path, ["north", "south"], force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["north"]
