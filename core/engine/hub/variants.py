"""What of a repository is one model: a GGUF file, the parts of a split one, or a folder of safetensors; and which to take."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from ..errors import HubError

FOLDER = "safetensors"
"""The label of a Hugging Face folder."""
_TYPE = re.compile(r"(?:^|[-._])((?:IQ|TQ|Q)\d(?:_[A-Z0-9]+)*|MXFP4|NVFP4|BF16|FP16|F16|F32)(?=$|[-._])", re.IGNORECASE)
_PROJECTOR, _IMATRIX = (re.compile(rf"(?:^|[-._]){word}(?=$|[-._])", re.IGNORECASE) for word in ("mmproj", "imatrix"))
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})")
BESIDE = (".json", ".model", ".txt", ".jinja")
"""How the files end that a folder has beside its weights."""
BELOW = (
    "additional_chat_templates/*.jinja",
    "*_Pooling/config.json",
    "*_Dense/config.json",
    "*_Dense/model.safetensors",
    "*_LogitScore/config.json",
)
"""What a folder's own folders may hold for it: templates with names, and how a text is embedded or ranked."""
_WIDE = {"BF16", "FP16", "F16", "F32", FOLDER}
_THOUSAND = 999.5  # in three digits
_OVERHEAD, _ROOM = 1.1, 1 << 30  # of the file, and bytes: KV cache, activations, the program


@dataclass(frozen=True)
class RepoFile:
    """A file of a repository: its path there, and its bytes."""

    path: str
    size: int


@dataclass(frozen=True)
class Variant:
    """One model among a repository's files. ``label``: its type, or the file's name where that names none."""

    label: str
    files: tuple[RepoFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def main(self) -> str:
        """The file that opens it, or a file of the folder that does."""
        return self.files[0].path

    def fits(self, free: int) -> bool:
        """Whether so many bytes of memory hold it, a cache and what runs it."""
        return self.size * _OVERHEAD + _ROOM <= free


def variants(files: Iterable[RepoFile]) -> list[Variant]:
    """All models of a repository that are complete, the smallest first."""
    files = list(files)
    found = _ggufs([file for file in files if file.path.lower().endswith(".gguf")])
    folder = _folder([file for file in files if "/" not in file.path or _is_below(PurePosixPath(file.path))])
    return sorted([*found, *folder], key=lambda variant: variant.size)


def _ggufs(files: Sequence[RepoFile]) -> list[Variant]:
    groups: dict[tuple[str, int], list[RepoFile]] = {}
    for file in files:
        name = PurePosixPath(file.path)
        if _is_no_model(name.stem):
            continue
        split = _SPLIT.fullmatch(name.stem)
        stem = str(name.parent / (name.stem if split is None else split["stem"]))
        groups.setdefault((stem, 1 if split is None else int(split["count"])), []).append(file)
    whole = {
        stem: sorted(group, key=lambda f: f.path) for (stem, count), group in groups.items() if len(group) == count
    }
    types = {stem: _type(PurePosixPath(stem).name) for stem in whole}
    names = list(types.values())
    return [
        Variant(label if label and names.count(label) == 1 else PurePosixPath(stem).name, tuple(whole[stem]))
        for stem, label in types.items()
    ]


def _is_no_model(stem: str) -> bool:
    """Whether a file is a projector of images, or an importance matrix; a model made with one may name its type and it."""
    return bool(_PROJECTOR.search(stem) or (_IMATRIX.search(stem) and not _type(stem)))


def _type(stem: str) -> str:
    found = _TYPE.findall(stem)
    return found[-1].upper() if found else ""


def _is_below(path: PurePosixPath) -> bool:
    return len(path.parts) == 2 and any(path.match(pattern) for pattern in BELOW)


def _folder(files: Sequence[RepoFile]) -> list[Variant]:
    """Files with settings come first: what a download has begun is then known to be incomplete."""
    weights = [file for file in files if file.path.endswith(".safetensors") and "/" not in file.path]
    named = [file for file in weights if file.path.startswith("model")]
    beside = [file for file in files if file.path.endswith(BESIDE) or "/" in file.path]
    config = [file for file in beside if file.path == "config.json"]
    if not config or not weights:
        return []
    others = [file for file in beside if file.path != "config.json"]
    return [Variant(FOLDER, (*config, *others, *(named or weights)))]


def named(found: Sequence[Variant], wanted: str, repo: str) -> Variant:
    """The variant that a person means by its label, or by its file. Raises HubError."""
    for variant in found:
        names = {variant.label, variant.main, PurePosixPath(variant.main).name, PurePosixPath(variant.main).stem}
        if wanted.lower() in {name.lower() for name in names}:
            return variant
    raise HubError(f"{repo} has no {wanted}; it has {', '.join(variant.label for variant in found)}.")


@dataclass(frozen=True)
class Choice:
    """What was chosen, and a sentence that says why."""

    variant: Variant
    why: str


def choose(found: Sequence[Variant], repo: str, free: int) -> Choice:
    """The best variant that ``free`` bytes of memory hold: GGUF before a folder, and what is quantized before 16 bits, which
    take twice the memory and time for what Q8_0 gives. Raises HubError where none fits."""
    files = [variant for variant in found if variant.label != FOLDER] or list(found)
    fitting = [variant for variant in files if variant.fits(free)]
    if not fitting:
        least = files[0]
        raise HubError(
            f"The smallest model of {repo}, {least.label}, takes {size(least.size)}, and {size(free)} of memory are free;"
            f" {repo}:{least.label} takes it all the same."
        )
    packed = [variant for variant in fitting if variant.label not in _WIDE]
    best = packed[-1] if packed else fitting[0]
    if len(files) == 1:
        return Choice(best, f"{best.label}, {size(best.size)}")
    smaller = next((v for v in fitting if v.label == "Q4_K_M" and v is not best), None)
    hint = "" if smaller is None else f", such as the smaller and faster Q4_K_M ({size(smaller.size)})"
    return Choice(
        best,
        f"{best.label}, {size(best.size)}: the best of {len(files)} for {size(free)} of free memory; {repo}:TYPE takes"
        f" another{hint}",
    )


def size(count: float) -> str:
    """Bytes for reading."""
    for unit in ("B", "KB", "MB"):
        if count < _THOUSAND:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB" if count < _THOUSAND else f"{count:.0f} GB"
