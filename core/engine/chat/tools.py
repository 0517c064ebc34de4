"""Tools that a person has registered: each call is shown, approved, and only then run."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.console.notes import note, visible
from engine.errors import UsageError

from .conversation import ToolCall

if TYPE_CHECKING:
    from .settings import ToolSetting

_MOST = 16 << 10  # characters of a result
DECLINED = "The person declined to run this."


@dataclass(frozen=True)
class Result:
    """What the model is told; ``stopped``: the person wants the turn to end."""

    text: str
    stopped: bool = False


@dataclass(frozen=True)
class Tool:
    """``described`` in OpenAI's form; ``shown``: what a person approves; ``run`` takes the checked arguments."""

    described: dict[str, Any]
    shown: str
    run: Callable[[dict[str, Any]], str]


def declined(call: ToolCall, stopped: bool) -> Result:
    """The result of a call that the person does not want run."""
    note(f"{call.name} is not run.")
    return Result(DECLINED, stopped)


class Tools:
    """Tools by name."""

    def __init__(self, settings: Mapping[str, ToolSetting] | None = None) -> None:
        self._tools = {name: _tool(name, setting) for name, setting in (settings or {}).items()}

    def described(self) -> list[dict[str, Any]]:
        return [tool.described for tool in self._tools.values()]

    def run(self, call: ToolCall, choose: Callable[[str, Sequence[str]], str]) -> Result:
        """The result of a call that the person approves; what is wrong with it is told to the model."""
        tool = self._tools.get(call.name)
        if tool is None:
            return Result(f"There is no tool {call.name}; there are {', '.join(self._tools) or 'none'}.")
        try:
            arguments = json.loads(call.arguments or "{}")
        except ValueError as error:
            return Result(f"The arguments of {call.name} are no JSON: {error}.")
        wrong = _wrong(arguments, tool.described["function"]["parameters"])
        if wrong:
            return Result(f"The arguments of {call.name} are wrong: {wrong}.")
        shown = "; ".join(f"{name} = {json.dumps(value)}" for name, value in arguments.items())
        question = f"The model asks for the tool {call.name}({shown})\n  {tool.shown}"
        choice = choose(question, ("yes", "no", "stop"))
        if choice != "yes":
            return declined(call, stopped=choice == "stop")
        return self._run(call.name, tool, arguments)

    def _run(self, name: str, tool: Tool, arguments: dict[str, Any]) -> Result:
        try:
            text = tool.run(arguments)
        except KeyboardInterrupt:
            note(f"{name} is stopped.")
            return Result("The person stopped it.", stopped=True)
        except Exception as error:  # a person's own function may fail in any way
            note(f"{name} failed: {type(error).__name__}: {error}")
            return Result(f"{name} failed: {type(error).__name__}: {error}")
        if len(text) > _MOST:
            note(f"{name} gave {len(text)} characters; the model is shown the first {_MOST}.")
            text = f"{text[:_MOST]}\n[cut after {_MOST} of {len(text)} characters]"
        lines = visible(text).splitlines() or ["(nothing)"]
        more = f" ... ({len(lines)} lines)" if len(lines) > 1 else ""
        note(f"{name}: {lines[0][:200]}{more}")
        return Result(text)


def _wrong(arguments: Any, parameters: Mapping[str, Any]) -> str:
    """What is wrong with the names of the arguments; empty if nothing."""
    if not isinstance(arguments, dict):
        return "they must be a JSON object"
    unknown = [name for name in arguments if name not in parameters["properties"]]
    missing = [name for name in parameters.get("required", ()) if name not in arguments]
    if unknown:
        return f"there is no {unknown[0]}"
    return f"{missing[0]} is missing" if missing else ""


def _tool(name: str, setting: ToolSetting) -> Tool:
    if (setting.command is None) == (setting.function is None):
        raise UsageError(f"The tool {name} must have either a command or a function.")
    if setting.function is not None:
        return _function_tool(name, setting, setting.function)
    command = str(setting.command)
    properties = {each: {"type": "string", "description": what} for each, what in setting.parameters.items()}
    wrong = next((each for each in properties if not each.isidentifier()), None)
    if wrong is not None:
        raise UsageError(f"The tool {name} has a parameter {wrong!r}; it must be a name that the shell can use.")
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    described = _described(name, setting.description or command, parameters)
    return Tool(described, command, lambda arguments: _shell(command, arguments, setting.timeout))


def _described(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _function_tool(name: str, setting: ToolSetting, path: str) -> Tool:
    from pydantic import create_model

    module, _, attribute = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
        signature = inspect.signature(function, eval_str=True)
    except Exception as error:
        raise UsageError(f"The function {path} of the tool {name} cannot be loaded: {error}.") from error
    fields: dict[str, Any] = {
        each.name: (
            str if each.annotation is each.empty else each.annotation,
            ... if each.default is each.empty else each.default,
        )
        for each in signature.parameters.values()
    }
    model = create_model(name, **fields)
    schema = model.model_json_schema()
    parameters = {key: schema[key] for key in ("type", "properties", "required", "$defs") if key in schema}
    described = _described(
        name, setting.description or inspect.getdoc(function) or name, {"properties": {}, **parameters}
    )

    def run(arguments: dict[str, Any]) -> str:
        checked = model.model_validate(arguments)
        result = function(**{each: getattr(checked, each) for each in fields})
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)

    return Tool(described, path, run)


def _shell(command: str, arguments: Mapping[str, Any], timeout: float) -> str:
    """What a command writes, its exit status if that is not 0. The arguments are variables of its environment, so that
    none can become part of the command."""
    given = {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}
    with subprocess.Popen(
        command,
        shell=True,
        env={**os.environ, **given},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C and the timeout reach what the command has started, too
    ) as process:
        try:
            out, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            _kill(process)
            raise TimeoutError(f"it took longer than {timeout:g} s") from error
        except BaseException:
            _kill(process)
            raise
    text = out.decode("utf-8", errors="replace")
    return text if process.returncode == 0 else f"{text}\n[exit status {process.returncode}]"


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
