"""``engine doctor``: what is installed here, and for a model what runs where and why."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer

from engine.console.options import AsJson, EngineOptions
from engine.errors import UsageError


def doctor(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Show how this model would be run.")] = None,
    *,
    program: Annotated[bool, typer.Option("--program", help="List the model's op calls, one a line.")] = False,
    as_json: AsJson = False,
    engine: EngineOptions,
) -> None:
    """Show what runs where, and why.

    Backends, the device that would be used, the providers of each op; for a model its placement, program and memory. What
    it prints is what a report of a fault needs, and holds no keys.

    \b
    Examples:
      engine doctor
      engine doctor model.gguf --program
      engine doctor owner/repo:Q4_K_M --backend opencl --json
    """
    from engine.cli.diagnosis import installation, model_report

    if program and model is None:
        raise UsageError("--program needs a model: engine doctor MODEL --program.")
    failure: Exception | None = None
    report = installation()
    try:
        report |= model_report(model, engine) if model else device_report(engine)
    except Exception as error:  # a backend may fail in any way, and what is known is worth showing
        failure = error
        report["error"] = str(error)
    if "device" in report:
        report["device"]["why"] = _why(engine.backend)
    if not program and "model" in report:
        del report["model"]["program"]
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        print("\n".join(_lines(report)), flush=True)
    if failure is not None:
        raise failure


def _why(backend: str) -> str:
    """Why the device's backend was taken."""
    if backend != "auto":
        return "--backend names it."
    if os.environ.get("ENGINE_BACKEND", "auto") != "auto":
        return "ENGINE_BACKEND names it."
    return "It is the best that can run here."


def device_report(engine: EngineOptions) -> dict[str, Any]:
    """The device that would be used, without a model."""
    from engine.backend.registry import open_device
    from engine.cli.diagnosis import describe_device

    return describe_device(open_device(engine.backend, {"threads": engine.threads, "pin_threads": engine.pin_threads}))


def _lines(report: dict[str, Any]) -> list[str]:
    lines = [f"engine {report['version']}, {', '.join(f'{name} {v}' for name, v in report['packages'].items())}"]
    lines += [f"  {name}={value}" for name, value in report["environment"].items()]
    lines += ["", "Backends, the best first", *map(_state, report["backends"]), *map("  {}".format, report["advice"])]
    lines += ["", "Collectives over the host, for ranks", *map(_state, report["collectives"])]
    if "device" in report:
        lines += ["", *_device_lines(report["device"])]
        lines += [f"  {'has':<12}{', '.join((*report['instruction_sets'], *report['accelerators']))}"]
        lines += ["", "Providers of each op, in the order tried"]
        lines += [f"  {op:<20}{', '.join(names)}" for op, names in report["ops"].items()]
    if "model" in report:
        lines += ["", *_model_lines(report["model"])]
    return lines


def _state(found: dict[str, Any]) -> str:
    state = "available" if found["available"] else "not available"
    return f"  {found['name']:<12}{state}: {found['reason']}"


def _device_lines(device: dict[str, Any]) -> list[str]:
    machine = device["machine"]
    return [
        f"Device: {device['name']} of backend {device['backend']}. {device['why']}",
        f"  processor   {machine['cpu']}, {machine['cores']} cores; {machine['os']}",
        f"  memory      {_size(device['memory_free'])} free of {_size(device['memory_total'])}",
        f"  KV layouts  {', '.join(device['kv_layouts']) or 'the reference layout'}",
        *(f"  {name:<12}{value}" for name, value in device["details"].items()),
    ]


def _model_lines(model: dict[str, Any]) -> list[str]:
    from engine.cli.diagnosis import number

    config, memory = model["config"], model["memory"]
    lines = [f"Model: {model['path']}", f"  family      {model['family']} ({model['format']})"]
    lines.append("  config      " + ", ".join(f"{name} {number(value)}" for name, value in config.items()))
    weights = (f"{found['tensors']} {name} ({_size(found['bytes'])})" for name, found in model["weights"].items())
    lines += [
        "  weights     " + ", ".join(weights),
        f"  context     {model['context']} of {config['max_context']} tokens",
    ]
    lines += ["", "Memory"]
    lines += [f"  {name:<12}{_size(memory[name])}" for name in ("weights", "kv", "history")]
    if memory["steps"]:
        lines.append(f"  {'steps':<12}{_size(memory['steps'])}, which the largest were seen to take")
    if memory["swap"]:
        lines.append(f"  {'swap':<12}{_size(memory['swap'])} of the host's at most, as sequences are swapped out")
    for group in memory["groups"]:
        pages = f"; memory comes {group['page']} at a time" if group["page"] > 1 else ""
        lines.append(
            f"  {group['name']:<12}{group['blocks']} blocks of {group['block_size']} tokens, {group['bytes_a_token']} B a"
            f" token, {_size(group['bytes'])}; at most {group['sequence_blocks']} a sequence{pages}"
        )
    whole, most = memory["sequence_kv"], memory["sequence_kv_unwindowed"]
    windows = f" ({_size(most)} without windows)" if whole < most else ""
    lines.append(f"  {'a sequence':<12}{_size(whole)} at {model['context']} tokens{windows}")
    if len(model["places"]) > 1:
        lines += ["", "Devices", *(f"  {place:<12}{name}" for place, name in model["places"].items())]
    lines += ["", "Segments"]
    for segment in model["segments"]:
        entering = f"; transfers {', '.join(segment['transfers'])}" if segment["transfers"] else ""
        lines.append(f"  {segment['name']:<11} {segment['place']:<8} {segment['calls']} ops{entering}")
    steps = [segment for segment in model["segments"] if not segment["name"].startswith("embedding.")]
    count = sum(len(segment["transfers"]) for segment in steps)
    if count:
        moved = sum(segment["transfer_bytes_a_token"] for segment in steps)
        lines.append(f"  {count} transfers a step, {_size(moved)} a token")
    lines += ["", "Fallbacks to the reference" if model["fallbacks"] else "No op falls back to the reference."]
    lines += [f"  {fall['count']} {fall['op']}: {fall['reason']}" for fall in model["fallbacks"]]
    lines += [f"  {notice}" for notice in model["notices"]]
    if "program" in model:
        lines += ["", "Program", *model["program"]]
    return lines


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"
