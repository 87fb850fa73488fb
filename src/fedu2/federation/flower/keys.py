"""Certificates and node keys for trying a deployment out, in the formats that Flower takes.

    ca.crt, ca.key          a development authority: every site is given ca.crt, and nobody ca.key
    server.pem, server.key  what the SuperLink shows to the sites, signed by the authority, for the names of its host
    NODE, NODE.pub          a site's key pair (ECDSA P-384, OpenSSH): the site keeps NODE, the server registers NODE.pub

Real sites make their pair at home, with `make_node_keys`, and send the .pub file only.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedu2.errors import UsageError
from fedu2.files import atomic_file

__all__ = ["LOOPBACK", "Keys", "make_keys", "make_node_keys"]

LOOPBACK = ("127.0.0.1", "localhost")
LONGEST = 3650  # days
PUBLIC = (".crt", ".pem", ".pub")  # everybody may read these; the others are their owner's alone

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")  # without a dot, so that no node is called like another file
_LABEL = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)")  # of a host's name


@dataclass(frozen=True)
class Keys:
    """Where the files lie; never what is in them."""

    folder: Path
    nodes: Mapping[str, Path]  # the private keys, by name

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def ca_key(self) -> Path:
        return self.folder / "ca.key"

    @property
    def certificate(self) -> Path:
        return self.folder / "server.pem"

    @property
    def certificate_key(self) -> Path:
        return self.folder / "server.key"

    def public(self, node: str) -> Path:
        """What is registered at the server."""
        return self.nodes[node].with_suffix(".pub")


def make_keys(
    folder: Path, nodes: Sequence[str], hosts: Sequence[str] = LOOPBACK, *, days: int = 365, force: bool = False
) -> Keys:
    """An authority, the server's certificate for `hosts` (names or addresses), and a key pair for each node.

    A file that is there already is an error, unless `force`; then nothing is written.
    """
    if not 1 <= days <= LONGEST:
        raise UsageError(f"days={days}: a certificate is valid for 1 to {LONGEST} days")
    names = _alternative_names(hosts)
    keys = Keys(folder, _node_paths(folder, nodes))
    authority, server = _new_key(), _new_key()
    root = _root(authority, days)
    contents = _node_contents(keys) | {
        keys.ca: root.public_bytes(Encoding.PEM),
        keys.ca_key: _private(authority, PrivateFormat.PKCS8),
        keys.certificate: _leaf(server, names, root, authority, days).public_bytes(Encoding.PEM),
        keys.certificate_key: _private(server, PrivateFormat.PKCS8),
    }
    _write(folder, contents, force)
    return keys


def make_node_keys(folder: Path, nodes: Sequence[str], *, force: bool = False) -> Keys:
    """Key pairs alone: for a site that joins later, or that shows its private key to nobody."""
    keys = Keys(folder, _node_paths(folder, nodes))
    _write(folder, _node_contents(keys), force)
    return keys


def _node_paths(folder: Path, nodes: Sequence[str]) -> dict[str, Path]:
    for node in nodes:
        if not _NODE.fullmatch(node):
            raise UsageError(f"a node is called by letters, digits, - and _, not {node!r}")
    if len({node.lower() for node in nodes}) < len(nodes):  # some file systems see no difference
        raise UsageError("every node has a name of its own, in capitals or not")
    return {node: folder / node for node in nodes}


def _node_contents(keys: Keys) -> dict[Path, bytes]:
    contents = {}
    for node, path in keys.nodes.items():
        key = _new_key()
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        contents[path] = _private(key, PrivateFormat.OpenSSH)
        contents[keys.public(node)] = public + b" " + node.encode() + b"\n"
    return contents


def _alternative_names(hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    """The addresses and names by which sites may call the server."""
    if not hosts:
        raise UsageError("a server's certificate needs at least one name or address")
    return x509.SubjectAlternativeName([_alternative_name(host) for host in hosts])


def _alternative_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not all(_LABEL.fullmatch(label) for label in host.split(".")) or len(host) > 253:
            raise UsageError(f"{host!r} is neither a host's name nor an address (no port, no https://)") from None
        return x509.DNSName(host)


def _root(key: ec.EllipticCurvePrivateKey, days: int) -> x509.Certificate:
    """The authority's certificate, which it signs itself."""
    name = _name("fedu2 development authority")
    builder = _builder(name, name, key.public_key(), days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return builder.sign(key, hashes.SHA384())


def _leaf(
    key: ec.EllipticCurvePrivateKey,
    names: x509.SubjectAlternativeName,
    root: x509.Certificate,
    authority: ec.EllipticCurvePrivateKey,
    days: int,
) -> x509.Certificate:
    """The server's certificate."""
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    builder = _builder(_name("fedu2 server"), root.subject, key.public_key(), days)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    builder = builder.add_extension(names, critical=False).add_extension(issuer_key, critical=False)
    return builder.sign(authority, hashes.SHA384())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(hours=1))  # the clocks of sites may be slow
    builder = builder.not_valid_after(now + timedelta(days=days))
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates, key_cert_sign=signs_certificates, crl_sign=signs_certificates,
        content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _private(key: ec.EllipticCurvePrivateKey, form: PrivateFormat) -> bytes:
    return key.private_bytes(Encoding.PEM, form, NoEncryption())


def _write(folder: Path, contents: Mapping[Path, bytes], force: bool) -> None:
    """Write all files; those that fail to be written leave none behind."""
    if folders := sorted(path.name for path in contents if path.is_dir() and not path.is_symlink()):
        raise UsageError(f"{folder} has folders in the place of keys: {', '.join(folders)}")
    there = sorted(path.name for path in contents if os.path.lexists(path))
    if there and not force:
        raise UsageError(f"{folder} already has {', '.join(there)}: keys are replaced only with --force")
    try:
        _private_folder(folder)
        with ExitStack() as files:
            for path, content in contents.items():
                temporary = files.enter_context(atomic_file(path))
                mode = 0o644 if path.suffix in PUBLIC else 0o600
                with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                    file.write(content)
    except OSError as error:
        raise UsageError(f"keys cannot be written to {folder}: {error.strerror or error}") from None


def _private_folder(folder: Path) -> None:
    """A folder that only its owner enters; one that has other files in it stays as it is, if it is his to write."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not any(folder.iterdir()):
        folder.chmod(0o700)
    elif folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(f"others may write to {folder}, and so replace keys in it: chmod go-w it, or choose another")
