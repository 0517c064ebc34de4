"""Who asks: bearer keys, of which only hashes are kept."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from hashlib import blake2b, sha256
from hmac import compare_digest
from pathlib import Path

from engine.errors import ConfigError

VARIABLE = "ENGINE_SERVE_KEYS"
ANYONE = "-"
"""The caller where no key is asked for."""
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_NAME = re.compile(r"[\w.@-]{1,64}")


class Keys:
    """Digests of keys, each with the name that logs have for it. Without any, everybody may ask."""

    def __init__(self, digests: Mapping[bytes, str]) -> None:
        self._digests = dict(digests)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def caller(self, key: str | None) -> str | None:
        """The name of a key's owner; None for a key that is not known. How long it takes tells nothing of the keys."""
        if not self._digests:
            return ANYONE
        given = sha256((key or "").encode("utf-8", "surrogateescape")).digest()
        matches = [name for digest, name in self._digests.items() if compare_digest(digest, given)]
        return matches[0] if matches and key else None


def salt_of(caller: str, given: str) -> bytes:
    """What keeps callers from probing each other's cached prompts; the same for all where no keys are used."""
    if caller == ANYONE and not given:
        return b""
    return blake2b(f"{caller}\0{given}".encode("utf-8", "replace"), digest_size=16).digest()


def load_keys(file: Path | None, environment: Mapping[str, str] = os.environ) -> Keys:
    """Keys of ``ENGINE_SERVE_KEYS``, separated by spaces or commas, and those whose hashes a file has. ConfigError if it
    cannot be read."""
    digests = {}
    for key in environment.get(VARIABLE, "").replace(",", " ").split():
        digest = sha256(key.encode("utf-8", "surrogateescape")).digest()
        digests[digest] = f"key-{digest.hex()[:8]}"
    if file is not None:
        try:
            lines = file.read_text("utf-8").splitlines()
        except OSError as error:
            raise ConfigError(f"The keys of {file} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"The keys of {file} cannot be read: {error}.") from error
        digests |= dict(_parsed(lines, file))
    return Keys(digests)


def _parsed(lines: Iterable[str], file: Path) -> Iterable[tuple[bytes, str]]:
    for number, line in enumerate(lines, start=1):
        digest, *rest = line.partition("#")[0].split() or [""]
        if not digest:
            continue
        name = rest[0] if rest else f"key-{digest[:8].lower()}"
        if not _DIGEST.fullmatch(digest) or len(rest) > 1 or not _NAME.fullmatch(name):
            raise ConfigError(
                f"Line {number} of {file} is wrong; it must be a key's SHA-256 in 64 hex digits, and after a space a name of"
                " letters, digits and . _ @ - if it has one."
            )
        yield bytes.fromhex(digest), name
