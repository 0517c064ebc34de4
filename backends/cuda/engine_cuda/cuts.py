"""How products are cut on this card: as was measured on it, by ``engine tune``, and where nothing was, as ``tiles`` says."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

import platformdirs
import torch
from triton.testing import do_bench

from engine.backend.v1 import Tuned, Tuning

from .kernels.common import INTERPRETED, only_compiled, power_of_two
from .tiles import Tiles, near, near_few, near_tiled, of_few, of_matmul, of_tiled
from .weights import FP8_GROUP

SHIPPED = Path(__file__).parent / "tables"
MOST_ROWS = 4096
"""More rows are cut as so many."""
Seconds = Callable[[Callable[[], None]], float]


@dataclass(frozen=True)
class Shape:
    """A product: its kernel with the types in it, rows, outputs and columns, and bytes of a number in the product. ``block``:
    the rows of a program, where they are given."""

    kernel: str
    rows: int
    outputs: int
    depth: int
    bytes_: int
    block: int | None = None

    @property
    def name(self) -> str:
        """What a table calls it. Rows count up to the next power of two."""
        rows = power_of_two(min(self.rows, MOST_ROWS))
        return f"{self.kernel} {self.outputs}x{self.depth} {rows if self.block is None else f'in {self.block}'}"

    def usual(self) -> Tiles:
        if self._tiled:
            return of_tiled(self.rows, self.outputs, self.bytes_, self.kernel == "tiled.int8")
        if self._few_group:
            return of_few(self.rows, self.outputs, self._few_group, self.block)
        columns = FP8_GROUP if self.kernel == "e4m3" else None
        return of_matmul(self.rows, self.outputs, self.bytes_, self.block, self.kernel.startswith("codes"), columns)

    def ways(self) -> list[Tiles]:
        """The usual one and those near to it."""
        usual = self.usual()
        if self._tiled:
            return near_tiled(usual, self.rows, self.bytes_)
        return near_few(usual, self._few_group) if self._few_group else near(usual, self.rows, self.block)

    @property
    def _tiled(self) -> bool:
        return self.kernel.startswith("tiled.")

    @property
    def _few_group(self) -> int:
        """The columns of a group where the kernel is that of few rows with codes, else 0."""
        found = re.match(r"few\dg(\d+)\.", self.kernel)
        return int(found[1]) if found else 0


class Cuts:
    """``found``: the tiles of shapes by name. ``path``: where those that are tuned are kept. ``seconds`` measures a launch."""

    def __init__(self, found: Mapping[str, Tiles], path: Path, device: str, seconds: Seconds) -> None:
        self._found, self._path, self._device, self._seconds = dict(found), path, device, seconds
        self._tuning: Tuning | None = None
        self._taken: dict[Shape, Tiles] = {}

    def launch(self, shape: Shape, start: Callable[[Tiles], None]) -> None:
        """``start`` with the tiles of this shape."""
        tiles = self._taken.get(shape)  # to look for them costs as much as a small launch
        if tiles is None:
            tiles = self._found.get(shape.name)
            if tiles is None:
                tiles = shape.usual() if self._tuning is None else self._fastest(shape, start, self._tuning.found)
            if self._tuning is None:
                self._taken[shape] = tiles
        start(tiles)

    @contextmanager
    def tuning(self) -> Iterator[Tuning]:
        """Within it shapes without figures are measured; at its end all are kept."""
        self._tuning = Tuning(str(self._path), [])
        self._taken.clear()
        try:
            yield self._tuning
        finally:
            tuned, self._tuning = self._tuning, None
            if tuned.found:
                self._keep()

    def _fastest(self, shape: Shape, start: Callable[[Tiles], None], found: list[Tuned]) -> Tiles:
        taken: dict[Tiles, float] = {}
        usual, *_ = ways = shape.ways()
        failed = {} if INTERPRETED else _compile(ways, start)
        for tiles in ways:
            if tiles in failed:
                continue
            try:
                taken[tiles] = self._seconds(lambda tiles=tiles: start(tiles))  # type: ignore[misc]
            except Exception as error:  # what Triton's passes and the card refuse, each says in its own way
                failed[tiles] = error
        if not taken:
            raise failed[usual]
        best = min(taken, key=taken.__getitem__)
        self._found[shape.name] = best
        how = f"tiles of {best.bm} x {best.bn}, {best.warps} warps, {best.stages} stages"
        how += f"; {len(failed)} of {len(ways)} ways failed" if failed else ""
        found.append(Tuned(f"{shape.name}: {how}", taken.get(usual, float("inf")), taken[best]))
        return best

    def _keep(self) -> None:
        about = {"device": self._device, "triton": version("triton"), "date": date.today().isoformat()}
        cuts = {name: astuple(tiles) for name, tiles in sorted(self._found.items())}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(about | {"cuts": cuts}, indent=0))
        part.replace(self._path)


def cuts_of(where: torch.device) -> Cuts:
    """Those of a device: a person's own table, or the one that comes with the package, or none. ValueError for one that is
    damaged."""
    device = "triton's interpreter" if INTERPRETED else str(torch.cuda.get_device_properties(where).name)
    file = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"
    own = platformdirs.user_data_path("engine") / "cuts" / file
    found: dict[str, Tiles] = {}
    for path in (SHIPPED / file, own):
        if path.exists():
            found |= read(path)
    return Cuts(found, own, device, _once if INTERPRETED else _on_gpu)


def read(path: Path) -> dict[str, Tiles]:
    """A table. ValueError for what is none."""
    try:
        cuts = json.loads(path.read_bytes())["cuts"]
        return {str(name): Tiles(*_numbers(numbers)) for name, numbers in cuts.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no table of cuts ({error}); remove it, and run engine tune again.") from error


def _numbers(given: object) -> list[int]:
    sizes = given if isinstance(given, list) else []
    if len(sizes) != 5 or not all(type(size) is int and 1 <= size <= 512 for size in sizes):
        raise ValueError(f"{given} are not five numbers from 1 to 512")
    if any(size & (size - 1) for size in sizes[:4]):
        raise ValueError(f"{given} are not powers of two")
    return sizes


def _compile(ways: list[Tiles], start: Callable[[Tiles], None]) -> dict[Tiles, Exception]:
    """By all processors, since each takes most of a second on one: those that cannot be compiled, and why. What does not fit the
    card is found when it is launched."""

    def one(tiles: Tiles) -> Exception | None:
        try:
            with only_compiled():
                start(tiles)
        except Exception as error:
            return error
        return None

    here = torch.cuda.current_device()
    with ThreadPoolExecutor(os.cpu_count(), initializer=torch.cuda.set_device, initargs=(here,)) as pool:
        errors = zip(ways, pool.map(one, ways), strict=True)
        return {tiles: error for tiles, error in errors if error is not None}


def _on_gpu(start: Callable[[], None]) -> float:
    """Seconds of a launch, whose weights are not in the cache when it begins."""
    return float(do_bench(start, warmup=5, rep=25, return_mode="median")) / 1e3


def _once(start: Callable[[], None]) -> float:
    begun = time.perf_counter()
    start()
    return time.perf_counter() - begun
