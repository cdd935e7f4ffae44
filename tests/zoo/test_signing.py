"""A signature holds for one card, byte for byte, and its files; old ones hold for ever."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

import zoo
from zoo import cards, signing
from zoo.cli import main
from zoo.errors import CardError, ConfigError, MissingPackageError, WeightsError

SIGNED = Path(__file__).parent / "fixtures" / "signed"  # a saved model, signed by refzoo 0.1.0
SEED = bytes(range(32))  # of the key that signed it; no secret
KEY = ed25519.Ed25519PrivateKey.from_private_bytes(SEED)
PUBLIC = KEY.public_key().public_bytes_raw()
OTHER = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32))
CARD = "bert-base-uncased.toml"


def pem(key: Any, encryption: Any = None) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption())


def public_pem(key: Any) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SIGNED, tmp_path / "signed"))


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(pem(KEY))
    return path


@pytest.fixture
def trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of trusted keys that holds the fixture's."""
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "refzoo.pub").write_bytes(public_pem(KEY))
    monkeypatch.setenv("ZOO_KEYS", str(keys))
    return keys


def test_an_old_signature_still_holds_and_its_model_loads(trusted: Path) -> None:
    assert signing.verify_signature(SIGNED / CARD, [PUBLIC]) == "56475aa75463474c"
    model = zoo.load(SIGNED)
    assert "the card is signed by trusted key 56475aa75463474c" in str(model.load_report)
    assert model.card.labels == ("no", "yes")


def test_signing_again_gives_the_same_bytes(folder: Path, key: Path) -> None:
    before = (folder / f"{CARD}.sig").read_bytes()
    (folder / f"{CARD}.sig").unlink()
    assert signing.sign(folder, key) == (folder / f"{CARD}.sig", signing.id_of(PUBLIC))
    assert (folder / f"{CARD}.sig").read_bytes() == before
    assert signing.sign(folder / CARD, key)[1] == signing.id_of(PUBLIC)


def test_what_is_signed_is_canonical_and_names_every_file() -> None:
    text = signing.statement(SIGNED / CARD)
    said = json.loads(text)
    files = {entry["name"]: (entry["size"], entry["sha256"]) for entry in said["files"]}
    assert set(files) == {
        CARD,
        "bert-base-uncased.saved.safetensors",
        "labels/bert-base-uncased.saved.txt",
    }
    for name, (size, sha256) in files.items():
        assert size == (SIGNED / name).stat().st_size
        assert sha256 == zoo_sha256(SIGNED / name)
    assert said["card"]["model"] == "nlp.bert:Bert"
    again = json.dumps(said, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    assert again.encode() == text


def zoo_sha256(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


def changes(raw: bytes, *, every: bool) -> Iterator[bytes]:
    """The bytes with each one changed: to every other value, or to one."""
    for at, octet in enumerate(raw):
        for other in range(256) if every else (octet ^ 1 << at % 8,):
            if other != octet:
                yield raw[:at] + bytes([other]) + raw[at + 1 :]


def assert_each_change_is_refused(path: Path, card: Path, *, every: bool) -> int:
    original = path.read_bytes()
    count = 0
    for changed in changes(original, every=every):
        path.write_bytes(changed)
        with pytest.raises((CardError, WeightsError)):
            signing.verify_signature(card, [PUBLIC])
        count += 1
        path.unlink()  # writing over a file makes some file systems flush it
        cards._parsed.cache_clear()
    path.write_bytes(original)
    signing.verify_signature(card, [PUBLIC])
    return count


FILES = [CARD, f"{CARD}.sig", "labels/bert-base-uncased.saved.txt"]
TENSORS = "bert-base-uncased.saved.safetensors"


@pytest.mark.parametrize("name", [*FILES, TENSORS])
def test_a_change_of_any_byte_is_refused(name: str, folder: Path) -> None:
    count = assert_each_change_is_refused(folder / name, folder / CARD, every=False)
    assert count == (SIGNED / name).stat().st_size


@pytest.mark.prove
@pytest.mark.parametrize("name", FILES)
def test_every_change_of_any_byte_is_refused(name: str, folder: Path) -> None:
    count = assert_each_change_is_refused(folder / name, folder / CARD, every=True)
    assert count == 255 * (SIGNED / name).stat().st_size


def test_loading_refuses_what_was_changed_where_a_key_is_trusted(
    folder: Path, trusted: Path
) -> None:
    zoo.load(folder)
    card = folder / CARD
    original = card.read_text("utf-8")
    card.write_text(original + "\n# a comment\n", "utf-8")
    with pytest.raises(CardError, match="changed after key"):
        zoo.load(folder)
    with pytest.raises(CardError, match="changed after key"):
        zoo.pipeline(folder)
    with pytest.raises(CardError, match="changed after key"):
        zoo.preprocess(folder)
    card.write_text(original, "utf-8")
    (folder / "labels" / "bert-base-uncased.saved.txt").write_text("yes\nno\n")
    with pytest.raises(CardError, match="changed after key"):
        zoo.load(folder)
    shutil.copy(SIGNED / FILES[2], folder / "labels")
    raw = bytearray((folder / TENSORS).read_bytes())
    raw[-1] ^= 1
    (folder / TENSORS).write_bytes(raw)
    with pytest.raises(WeightsError, match="sha256"):
        zoo.load(folder)
    with pytest.raises(WeightsError, match="sha256"):
        signing.verify_signature(card, [PUBLIC])


def test_a_missing_labels_file_is_refused(folder: Path, trusted: Path) -> None:
    (folder / FILES[2]).unlink()
    with pytest.raises(CardError, match="cannot be read"):
        zoo.load(folder)


def test_without_a_trusted_key_the_signature_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ZOO_KEYS", raising=False)
    report = zoo.load(folder).load_report
    assert "the card is signed by unknown key 56475aa75463474c" in str(report)
    (folder / f"{CARD}.sig").unlink()
    assert zoo.load(folder).load_report.notes == ()


def test_keys_lie_in_the_home_of_the_zoo(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ZOO_KEYS", raising=False)
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "keys").mkdir(parents=True)
    (tmp_path / "home" / "keys" / "a.pub").write_bytes(public_pem(KEY))
    assert "trusted key" in signing.signed_by(folder / CARD)


def test_another_key_is_refused_and_no_signature_is_said(folder: Path, trusted: Path) -> None:
    (trusted / "refzoo.pub").write_bytes(public_pem(OTHER))
    with pytest.raises(CardError, match="none of the 1 trusted"):
        zoo.load(folder)
    (folder / f"{CARD}.sig").unlink()
    assert "the card is not signed" in str(zoo.load(folder).load_report)
    (trusted / "refzoo.pub").unlink()
    with pytest.raises(ConfigError, match="holds no"):
        zoo.load(folder)


def test_a_signature_under_another_keys_id_is_refused(folder: Path, trusted: Path) -> None:
    (trusted / "other.pub").write_bytes(public_pem(OTHER))
    path = folder / f"{CARD}.sig"
    path.write_text(
        path.read_text().replace(
            signing.id_of(PUBLIC), signing.id_of(OTHER.public_key().public_bytes_raw())
        )
    )
    with pytest.raises(CardError, match="changed after key"):
        zoo.load(folder)


FIELDS = {"alg": "ed25519", "key_id": "56475aa75463474c", "signature": "00" * 64}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff",
        b"[" * 10_000,
        json.dumps({**FIELDS, "alg": "none"}, indent=1).encode() + b"\n",
        json.dumps({**FIELDS, "signature": "zz"}, indent=1).encode() + b"\n",
        json.dumps({**FIELDS, "signature": 1}, indent=1).encode() + b"\n",
        json.dumps({**FIELDS, "more": 1}, indent=1).encode() + b"\n",
        json.dumps(FIELDS).encode(),
        b'{"key_id": "x", "key_id": "56475aa75463474c"}',
        b" " * 100_000,
    ],
)
def test_what_is_no_signature_is_refused_with_keys_and_without(
    content: bytes, folder: Path, trusted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / f"{CARD}.sig").write_bytes(content)
    with pytest.raises(CardError, match="cannot be used"):
        zoo.load(folder)
    monkeypatch.delenv("ZOO_KEYS")
    with pytest.raises(CardError, match="cannot be used"):
        zoo.load(folder)


def test_saving_again_takes_the_signature_away(folder: Path, tmp_path: Path) -> None:
    zoo.save(zoo.load(folder), folder)
    assert not (folder / f"{CARD}.sig").exists()


def test_a_card_that_is_not_whole_is_not_signed(folder: Path, key: Path, tmp_path: Path) -> None:
    (folder / f"{CARD}.sig").unlink()
    (folder / TENSORS).write_bytes(b"other")
    with pytest.raises(WeightsError, match="5 bytes"):
        signing.sign(folder, key)
    resnet = zoo.card("resnet18")
    with pytest.raises(CardError, match="does not pin the size and sha256"):
        signing.sign(resnet.folder / "resnet18.toml", key)
    with pytest.raises(CardError, match="holds 0 cards"):
        signing.sign(tmp_path, key)
    assert not list(tmp_path.rglob("*.sig"))
    assert not list(resnet.folder.glob("*.sig"))


PRIVATE = {
    "nothing": (b"", "is no private key"),
    "text": (b"secret", "is no private key"),
    "damaged": (pem(KEY)[:60] + pem(KEY)[64:], "is no private key"),
    "public": (public_pem(KEY), "is no private key"),
    "elliptic": (pem(ec.generate_private_key(ec.SECP256R1())), "not an Ed25519 key"),
    "locked": (pem(KEY, BestAvailableEncryption(b"word")), "has a passphrase"),
}


@pytest.mark.parametrize("kind", PRIVATE)
def test_a_wrong_key_signs_nothing(kind: str, folder: Path, key: Path) -> None:
    content, words = PRIVATE[kind]
    before = (folder / f"{CARD}.sig").read_bytes()
    key.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as raised:
        signing.sign(folder, key)
    assert b"secret" not in str(raised.value).encode()
    assert (folder / f"{CARD}.sig").read_bytes() == before
    key.unlink()
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        signing.sign(folder, key)


@pytest.mark.parametrize(
    "content", [b"", b"key", pem(KEY), public_pem(ec.generate_private_key(ec.SECP256R1()))]
)
def test_a_wrong_public_key_is_never_passed_over(
    content: bytes, folder: Path, trusted: Path
) -> None:
    (trusted / "wrong.pub").write_bytes(content)
    with pytest.raises(ConfigError, match=r"wrong\.pub"):
        zoo.load(folder)


def test_keys_of_ssh_keygen_sign_and_verify(
    folder: Path, trusted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trusted / "refzoo.pub").unlink()
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(trusted / "mine")], check=True
    )
    with pytest.raises(SystemExit) as ended:
        main(["sign", str(folder), "--key", str(trusted / "mine")])
    assert ended.value.code == 0
    key_id = capsys.readouterr().out.split()[-1]
    assert f"signed by trusted key {key_id}" in str(zoo.load(folder).load_report)


def test_without_the_package_signed_cards_load_where_nobody_is_trusted(
    folder: Path, trusted: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signing, "_cryptography", lambda: signing.require("no_such_lib", "sign"))
    for call in (lambda: zoo.load(folder), lambda: signing.sign(folder, key)):
        with pytest.raises(MissingPackageError, match=r"refzoo\[sign\]"):
            call()
    monkeypatch.delenv("ZOO_KEYS")
    assert "unknown key" in str(zoo.load(folder).load_report)


def test_loading_an_unsigned_folder_imports_no_cryptography(
    fresh_python: Any, folder: Path
) -> None:
    (folder / f"{CARD}.sig").unlink()
    code = (
        "import sys, zoo; from pathlib import Path; zoo.load(Path(sys.argv[1]))\n"
        "print('cryptography' in sys.modules)"
    )
    assert fresh_python(code, str(folder), env={"ZOO_KEYS": ""}).strip() == "False"


def test_a_card_without_a_signature_does_not_verify(folder: Path) -> None:
    (folder / f"{CARD}.sig").unlink()
    with pytest.raises(CardError, match="cannot be opened"):
        signing.verify_signature(folder / CARD, [PUBLIC])
