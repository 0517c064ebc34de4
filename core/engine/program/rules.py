"""Rules that say which parts of a program run on which device: ``layers 0-13: opencl; experts: cpu; rest: cuda:1``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..backend.v1 import Call
from ..errors import ConfigError
from ..ops import OPS

GRAMMAR = '"WHAT: DEVICE; ..." with layers A-B, an op, experts, head, embed or rest as WHAT'
_DEVICE = re.compile(r"[A-Za-z][\w.-]*(:\d{1,4})?")
_LAYERS = re.compile(r"layers? (\d{1,6})(?:-(\d{1,6}))?")
_PARTS = ("experts", "head", "embed", "rest")
_FOLLOWS = {"kv_write": "attention", "kv_copy": "attention", "step_expand": "sample", "process_logits": "sample"}
"""Ops on a state that another op decides the place of."""


@dataclass(frozen=True)
class Selector:
    """Some of a program's calls: the layers of an inclusive range, or an op, or a part (see ``Call.scope``)."""

    text: str
    first: int = -1
    last: int = -1

    def fits(self, call: Call) -> bool:
        if self.first >= 0:
            scope = call.scope.split(".")
            return scope[0] == "layers" and self.first <= int(scope[1]) <= self.last
        if self.text in _PARTS:
            return self.text == "rest" or call.scope.rpartition(".")[2] == self.text
        return call.op == self.text


@dataclass(frozen=True)
class Rules:
    """Selectors with their devices; the first that fits a call places it, and ``default`` takes the others."""

    rules: tuple[tuple[Selector, str], ...] = ()
    default: str = "device"

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices that may be given something, without repetition."""
        named = [device for _, device in self.rules]
        return tuple(dict.fromkeys(named if self.complete else [*named, self.default]))

    @property
    def complete(self) -> bool:
        """Nothing is left for ``default``."""
        return any(selector.text == "rest" for selector, _ in self.rules)

    def place(self, call: Call) -> str:
        """The device of a call, by itself; a fused one goes where its first part goes."""
        while call.parts:
            call = call.parts[0]
        return next((device for selector, device in self.rules if selector.fits(call)), self.default)

    def check(self, calls: Sequence[Call]) -> None:
        """ConfigError where a rule places nothing in a program, or names layers that it does not have."""
        layers = 1 + max(
            (int(call.scope.split(".")[1]) for call in calls if call.scope.startswith("layers.")), default=-1
        )
        for selector, _ in self.rules:
            if selector.last >= layers:
                raise ConfigError(f"--place: {selector.text!r}, but this model has the layers 0 to {layers - 1}.")
        taken = {next((selector for selector, _ in self.rules if selector.fits(call)), None) for call in calls}
        for selector, _ in self.rules:
            if selector.text != "rest" and selector not in taken:
                raise ConfigError(
                    f"--place: nothing in this model is left for {selector.text!r}; a call goes where the first rule that"
                    " fits it says."
                )


def parse_rules(text: str, default: str = "device") -> Rules:
    """Rules from text. Raises ConfigError, in a sentence that says what is wrong."""
    rules: list[tuple[Selector, str]] = []
    for part in filter(None, map(str.strip, text.split(";"))):
        selectors, colon, device = part.partition(":")
        device = device.strip()
        if not colon or not _DEVICE.fullmatch(device):
            raise ConfigError(f"--place: {part!r} names no device; write {GRAMMAR}.")
        rules += [(_selector(" ".join(one.split())), device) for one in selectors.split(",")]
    if not rules:
        raise ConfigError(f"--place is empty; write {GRAMMAR}.")
    names = [selector.text for selector, _ in rules]
    if "rest" in names[:-1]:
        raise ConfigError("--place: 'rest' takes all that is left, so it must come last, and once.")
    return Rules(tuple(rules), default)


def _selector(text: str) -> Selector:
    layers = _LAYERS.fullmatch(text)
    if layers:
        first, last = int(layers[1]), int(layers[2] or layers[1])
        if first > last:
            raise ConfigError(f"--place: {text!r} ends before it begins; write the lower layer first.")
        return Selector(text, first, last)
    if text in _FOLLOWS:
        raise ConfigError(
            f"--place: {text} works on the state of {_FOLLOWS[text]} and goes where that goes; name that."
        )
    if text not in _PARTS and text not in OPS:
        raise ConfigError(f"--place: there is nothing called {text!r}; write {GRAMMAR}.")
    return Selector(text)
