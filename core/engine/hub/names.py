"""Names of models on the Hugging Face hub: ``owner/repo``, ``owner/repo:Q4_K_M``, and addresses of the hub's pages."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..errors import HubError

_PART = r"[A-Za-z0-9_][\w.-]{0,95}"
_NAME = re.compile(rf"(?P<repo>{_PART}/{_PART})(?::(?P<variant>[\w.-]+))?", re.ASCII)
_ADDRESS = re.compile(r"[A-Za-z]+://\S+")
_HOSTS = {"huggingface.co", "hf.co", "www.huggingface.co"}
CACHE_PREFIX = "models--"
"""Of folders in Hugging Face's cache: owner--repo follows."""
_FORMS = "owner/repo, owner/repo:Q4_K_M, or the address of a model's page or file on the hub"


@dataclass(frozen=True)
class HubName:
    """A repository of the hub; ``variant`` is a type such as Q4_K_M, ``file`` one of its files, ``revision`` a branch or
    a commit."""

    repo: str
    variant: str | None = None
    file: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo + (f":{self.variant}" if self.variant else f"/{self.file}" if self.file else "")


def parse_name(text: str) -> HubName | None:
    """What a name means; None if it can only be a path. HubError if it is an address, but none of a model."""
    if _ADDRESS.fullmatch(text):
        return _parse_address(text)
    host, _, rest = text.partition("/")
    if host in _HOSTS:
        return _parse_address(f"https://{host}/{rest}")
    found = _NAME.fullmatch(text)
    if found is None or (found["repo"].lower().endswith(".gguf") and found["variant"] is None):
        return None
    return HubName(found["repo"], found["variant"])


def short_name(path: Path) -> str:
    """What a model is called by its path: a file's or a folder's name, or the repository's in Hugging Face's cache."""
    if path.suffix == ".gguf":
        return path.stem
    path = path.absolute()
    if path.parent.name == "snapshots" and path.parents[1].name.startswith(CACHE_PREFIX):
        return path.parents[1].name.removeprefix(CACHE_PREFIX).replace("--", "/", 1)
    return path.name


def required_name(text: str) -> HubName:
    """The same where nothing but a name will do. Raises HubError."""
    name = parse_name(text)
    if name is None:
        raise HubError(f'"{text}" is no name of a model on the hub; give {_FORMS}.')
    return name


def _parse_address(text: str) -> HubName:
    """``https://HOST/owner/repo[:type]``, or ``.../resolve/REVISION/FILE`` (blob, raw and tree, too)."""
    address = urlsplit(text)
    hosts = _HOSTS | {urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc}
    if address.scheme not in ("http", "https") or address.netloc not in hosts:
        raise HubError(f"{text} is no address of the hub; give {_FORMS}, or download the file and give its path.")
    parts = unquote(address.path).strip("/").split("/")
    found = _NAME.fullmatch("/".join(parts[:2]))
    kind, rest = parts[2:3], parts[3:]
    if found is None or (kind and kind[0] not in ("blob", "resolve", "raw", "tree")) or ".." in parts:
        raise HubError(f"{text} is no model's address; give {_FORMS}.")
    file = "/".join(rest[1:]) if kind and kind[0] != "tree" else ""
    return HubName(found["repo"], found["variant"], file or None, rest[0] if rest else None)
