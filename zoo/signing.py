"""Signatures: who vouches for a card and its files.

A signature lies beside its card as ``<card>.sig``. It is Ed25519 over one canonical JSON text: what
the card says, and the name, size and SHA-256 of the card and of every file that belongs to it. Keys
are trusted by their files: ``*.pub`` in ``ZOO_KEYS``, else in ``keys/`` of `zoo.files.home`.

Source: RFC 8032 (Ed25519); a key's id is the first half of the SHA-256 of its 32 bytes, cut to 16
hex digits.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zoo import files
from zoo.cards import Card, File, read_card
from zoo.errors import CardError, ConfigError, WeightsError, require, shown

FORMAT = "refzoo card signature 1"  # what is signed: another text, another number
ALGORITHM = "ed25519"
MAX_BYTES = 1 << 14  # of a signature or a key
HOW = "ssh-keygen -t ed25519 -N '' -f KEY makes KEY and KEY.pub"


def sign(card_path: Path, key: Path) -> tuple[Path, str]:
    """Sign a card and its files.

    Args:
        card_path: The card, or a folder that holds one.
        key: Ed25519 private key without a passphrase, in PEM (PKCS 8) or in OpenSSH's form.

    Returns:
        The signature's path, ``<card>.sig``, and the id of the key.

    Raises:
        CardError: The card is damaged, or pins no hash of a file.
        WeightsError: A file beside the card is not what the card says.
        ConfigError: The key is none.
    """
    path = _the_card(card_path)
    private = _private_key(key)
    _check_files(path)
    signature = private.sign(statement(path))
    key_id = id_of(private.public_key().public_bytes_raw())
    target = signature_path(path)
    files.write_atomically(target, _spelled(key_id, signature))
    return target, key_id


def verify_signature(card_path: Path, public_keys: Iterable[bytes]) -> str:
    """Check the signature of a card, and every file that lies beside it.

    Args:
        card_path: The card.
        public_keys: The keys that are trusted, 32 bytes each.

    Returns:
        Id of the key that signed.

    Raises:
        CardError: There is no signature, none by these keys, or the card was changed since.
        WeightsError: A file beside the card is not what the card says.
    """
    key_id = _verify_card(card_path, public_keys)
    _check_files(card_path)
    return key_id


def signed_by(card_path: Path) -> str:
    """Who signed a card, in words; empty where there is no signature and no key is trusted.

    The weights themselves are not read: the card pins their hashes, and opening them checks those.

    Raises:
        CardError: Keys are trusted, and the signature is not by one of them or does not hold.
        ConfigError: A key cannot be read.
    """
    keys = trusted_keys()
    if not signature_path(card_path).exists():
        return "not signed" if keys else ""
    if not keys:
        return f"signed by unknown key {_read(card_path)[0]}"
    return f"signed by trusted key {_verify_card(card_path, keys)}"


def trusted_keys() -> list[bytes]:
    """The public keys in the folder ``ZOO_KEYS``, else in ``keys/`` of the zoo's home.

    Raises:
        ConfigError: ``ZOO_KEYS`` holds no key, or a file is no Ed25519 public key.
    """
    given = os.environ.get("ZOO_KEYS")
    try:
        folder = Path(given) if given else files.home() / "keys"
        found = sorted(folder.glob("*.pub"))
    except (OSError, RuntimeError):  # a user without a home trusts nobody
        found = []
    if given and not found:
        raise ConfigError(f"ZOO_KEYS is {shown(given)}, which holds no *.pub; {HOW}")
    return [_public_key(path) for path in found]


def id_of(public_key: bytes) -> str:
    """The id of a key: 16 hex digits."""
    return hashlib.sha256(public_key).hexdigest()[:16]


def signature_path(card_path: Path) -> Path:
    """Where the signature of a card lies."""
    return card_path.with_name(f"{card_path.name}.sig")


def statement(card_path: Path) -> bytes:
    """The text that is signed: JSON with sorted keys, no spaces, in UTF-8.

    Raises:
        CardError: The card is damaged, or does not pin the size and SHA-256 of a file.
    """
    card = read_card(card_path)
    raw = card_path.read_bytes()
    listed = [File(name=card_path.name, size=len(raw), sha256=hashlib.sha256(raw).hexdigest())]
    listed += [*_pinned(card), *(_described(card.folder, name) for name in _beside(card))]
    entries = {file.name: {"name": file.name, "size": file.size, "sha256": file.sha256}
               for file in listed}  # fmt: skip
    try:
        said = {
            "format": FORMAT,
            "card": tomllib.loads(raw.decode()),
            "files": [entries[name] for name in sorted(entries)],
        }
        text = json.dumps(
            said, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False,
            default=lambda moment: moment.isoformat(),
        )  # fmt: skip
    except ValueError as error:  # not a number, or changed since it was read
        raise CardError(f"card {shown(card_path.name)} cannot be signed: {error}") from error
    return text.encode()


def _verify_card(card_path: Path, public_keys: Iterable[bytes]) -> str:
    key_id, signature = _read(card_path)
    known = {id_of(key): key for key in public_keys}
    if key_id not in known:
        raise CardError(
            f"card {shown(card_path.name)} is signed by key {key_id}, which is none of the "
            f"{len(known)} trusted; put its .pub into ZOO_KEYS if you trust it"
        )
    _, ed25519 = _cryptography()
    broken = require("cryptography.exceptions", "sign").InvalidSignature
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(known[key_id]).verify(
            signature, statement(card_path)
        )
    except broken:
        raise CardError(
            f"card {shown(card_path.name)} or a file of it was changed after key {key_id} signed "
            "it; get it again, or have it signed again",
            str(card_path),
        ) from None
    return key_id


def _check_files(card_path: Path) -> None:
    """See that each file beside a card is the one that the card pins."""
    card = read_card(card_path)
    for file in _pinned(card):
        path = card.folder / file.name
        if path.exists() and (size := path.stat().st_size) != file.size:
            raise WeightsError(f"{file.name} has {size:,} bytes, and the card says {file.size:,}")
        if path.exists() and (found := files.sha256_of(path)) != file.sha256:
            raise WeightsError(
                f"{file.name} has sha256 {found[:12]}…, and the card says {file.sha256:.12}…"
            )


def _pinned(card: Card) -> list[File]:
    """Files whose hashes a card holds: all of its weights."""
    listed = [file for weights in card.weights.values() for file in weights.files]
    for file in listed:
        if file.sha256 is None or file.size is None:
            raise CardError(
                f"card {card.name} cannot be signed: it does not pin the size and sha256 of "
                f"{shown(file.name)}"
            )
    return listed


def _beside(card: Card) -> list[str]:
    """Names of the small files that a card uses without pinning them."""
    names = {f"labels/{w.labels}.txt" for w in card.weights.values() if w.labels}
    return sorted(names | {w.golden for w in card.weights.values() if w.golden})


def _described(folder: Path, name: str) -> File:
    path = folder / name
    try:
        return File(name=name, size=path.stat().st_size, sha256=files.sha256_of(path))
    except OSError as error:
        raise CardError(f"{name} cannot be read: {error.strerror}", str(path)) from error


def _the_card(path: Path) -> Path:
    found = sorted(path.glob("*.toml")) if path.is_dir() else [path]
    if len(found) != 1:
        raise CardError(f"{shown(str(path))} holds {len(found)} cards; give the path of one")
    return found[0]


def _spelled(key_id: str, signature: bytes) -> bytes:
    fields = {"alg": ALGORITHM, "key_id": key_id, "signature": signature.hex()}
    return json.dumps(fields, indent=1).encode() + b"\n"


def _read(card_path: Path) -> tuple[str, bytes]:
    """Id of the key, and signature; only the spelling of them that `sign` writes is read."""
    path = signature_path(card_path)
    reason = "it is no signature as zoo sign writes it"
    try:
        with files.open_file(path) as file:
            raw = file.read(MAX_BYTES)
        fields: Any = json.loads(raw)
        key_id, signature = fields["key_id"], bytes.fromhex(fields["signature"])
        if raw == _spelled(key_id, signature):
            return key_id, signature
    except WeightsError as error:
        reason = error.line
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise CardError(f"{shown(path.name)} cannot be used: {reason}", str(path))


def _private_key(path: Path) -> Any:
    raw = _key_bytes(path)
    form = "ssh" if b"OPENSSH PRIVATE KEY" in raw else "pem"
    serialization, ed25519 = _cryptography()
    try:
        key = getattr(serialization, f"load_{form}_private_key")(raw, None)
    except TypeError:
        raise ConfigError(f"{path.name} has a passphrase; zoo sign takes a key without") from None
    except Exception as error:  # its own classes, and whatever a damaged file makes of the reader
        raise ConfigError(f"{path.name} is no private key: {error}; {HOW}") from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ConfigError(f"{path.name} is not an Ed25519 key; {HOW}")
    return key


def _public_key(path: Path) -> bytes:
    raw = _key_bytes(path)
    serialization, ed25519 = _cryptography()
    form = "ssh" if raw.startswith(b"ssh-") else "pem"
    try:
        found = getattr(serialization, f"load_{form}_public_key")(raw)
    except Exception as error:  # its own classes, and whatever a damaged file makes of the reader
        raise ConfigError(f"{path.name} is no public key: {error}", str(path)) from error
    if not isinstance(found, ed25519.Ed25519PublicKey):
        raise ConfigError(f"{path.name} is not an Ed25519 public key; {HOW}", str(path))
    return bytes(found.public_bytes_raw())


def _cryptography() -> tuple[Any, Any]:
    """The two modules that are needed, imported only where something is signed or verified."""
    primitives = "cryptography.hazmat.primitives"
    names = f"{primitives}.serialization", f"{primitives}.asymmetric.ed25519"
    serialization, ed25519 = (require(name, "sign") for name in names)
    return serialization, ed25519


def _key_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"the key {shown(str(path))} cannot be read: {error.strerror}") from error
