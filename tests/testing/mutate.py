"""Automatic mutations of a reference: one small change to the source of an op or of what it calls in its module."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from engine.ops.spec import OpSpec

_SWAPS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


def called(tree: ast.Module, name: str) -> list[ast.FunctionDef]:
    """The function and those of its module that it calls, however far."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    found, waiting = [], [name]
    while waiting:
        function = functions.pop(waiting.pop(), None)
        if function is not None:
            found.append(function)
            waiting += [node.id for node in ast.walk(function) if isinstance(node, ast.Name)]
    return found


def _changes(function: ast.FunctionDef) -> Iterator[tuple[str, Callable[[], None]]]:
    """What can be changed in a function: a description, and what does it in place."""
    needless = {id(part) for node in ast.walk(function) for part in _needless(node)}
    for node in ast.walk(function):
        if id(node) in needless:
            continue
        if isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)) and type(node.op) in _SWAPS:
            yield (
                _named(node, f"{type(node.op).__name__} swapped"),
                lambda n=node: setattr(n, "op", _SWAPS[type(n.op)]()),
            )
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
            yield _named(node, "comparison"), lambda n=node: n.ops.__setitem__(0, _SWAPS[type(n.ops[0])]())
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield _named(node, f"{node.value} + 1"), lambda n=node: setattr(n, "value", n.value + 1)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield _named(node, "sign lost"), lambda n=node: setattr(n, "op", ast.UAdd())
        if isinstance(node, (ast.If, ast.IfExp)):
            yield _named(node, "condition turned"), lambda n=node: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))


def _needless(node: ast.AST) -> Iterator[ast.AST]:
    """What no input reaches or no output shows: annotations, documentation, what is raised, keywords of layout."""
    if isinstance(node, ast.arg) and node.annotation is not None:
        yield from ast.walk(node.annotation)
    if isinstance(node, ast.AnnAssign):
        yield from ast.walk(node.annotation)
    if isinstance(node, ast.FunctionDef):
        for part in (node.returns, *node.args.defaults, *node.args.kw_defaults):
            if part is not None:
                yield from ast.walk(part)
    if isinstance(node, ast.If) and all(isinstance(inner, ast.Raise) for inner in node.body):
        yield from ast.walk(node)
    if isinstance(node, ast.keyword) and node.arg in ("axis", "keepdims", "dtype", "invalid"):
        yield from ast.walk(node)  # the last axis is often the second one, too
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("reshape", "swapaxes")
    ):
        yield from (part for arg in node.args for part in ast.walk(arg))
    if isinstance(node, ast.With):
        for item in node.items:
            yield from ast.walk(item)


def _named(node: ast.AST, what: str) -> str:
    return f"line {node.lineno}: {what}: {ast.unparse(node)[:60]}"


@dataclass(frozen=True)
class Mutation:
    """A change of one function, and the ops whose references call it with this change."""

    name: str
    make: Callable[[], list[tuple[OpSpec, OpSpec]]]


def mutations(specs: Sequence[OpSpec]) -> list[Mutation]:
    """Every single change of the references' sources, each once, whatever ops share it."""
    found = []
    for module in {spec.reference.__module__: None for spec in specs}:
        own = [spec for spec in specs if spec.reference.__module__ == module]
        source = inspect.getsource(sys.modules[module])
        tree = ast.parse(source)
        users = {spec.name: {f.name for f in called(tree, spec.reference.__name__)} for spec in own}
        for function in sorted(set().union(*users.values())):
            those = [spec for spec in own if function in users[spec.name]]
            for n, (what, _) in enumerate(_changes(_function(tree, function))):
                found.append(Mutation(f"{module} {what}", partial(_mutated, module, source, function, n, those)))
    return found


def _function(tree: ast.Module, name: str) -> ast.FunctionDef:
    return next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)


def _mutated(
    module: str, source: str, function: str, number: int, specs: Sequence[OpSpec]
) -> list[tuple[OpSpec, OpSpec]]:
    """The specs as they are and with the change."""
    tree = ast.parse(source)
    list(_changes(_function(tree, function)))[number][1]()
    space = {**vars(sys.modules[module])}
    kept = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    exec(compile(ast.fix_missing_locations(ast.Module(kept, [])), module, "exec"), space)
    return [(spec, replace(spec, reference=space[spec.reference.__name__])) for spec in specs]
