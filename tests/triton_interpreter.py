"""Triton's interpreter without what it does over and over: it looks through all of its language for builtins, and replaces them,
in each launch and in each call of a function within one, where they are replaced already."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def hasten() -> None:
    """Nothing changes where the installed Triton's interpreter has other parts."""
    from triton import language
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, part) for part in ("_patch_builtin", "_patch_attr", "_patch_lang")):
        return
    is_builtin = language.core.is_builtin
    call, patch = interpreter.InterpretedFunction.__call__, interpreter._patch_lang
    calls: list[Callable[..., Any]] = []

    @functools.cache
    def builtins(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    @functools.cache
    def languages(fn: Callable[..., Any]) -> list[Any]:
        return [value for value in fn.__globals__.values() if value is language or value is language.core]

    def patch_builtin(package: Any, builder: Any, *scope: Any) -> None:
        for name in builtins(package):
            member = getattr(package, name)
            if is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, *scope)

    def patch_lang(fn: Callable[..., Any]) -> Any:
        within = bool(calls) and calls.pop() is fn
        if within and not any(is_builtin(getattr(lang, builtins(lang)[0])) for lang in languages(fn)):
            return None
        return patch(fn)

    def hastened(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self.fn)
        return call(self, *args, **kwargs)

    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch_lang
    interpreter.InterpretedFunction.__call__ = hastened
