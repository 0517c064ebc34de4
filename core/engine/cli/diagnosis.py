"""What ``engine doctor`` finds, as plain data."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Any

from engine import __version__
from engine.backend.joining import discover_collectives
from engine.backend.registry import discover
from engine.backend.v1 import Call, Device, Segment, Value, providers_of
from engine.cli import hardware
from engine.cli.machine import describe_machine
from engine.console.opening import open_loaded
from engine.ops import OPS
from engine.program.transfers import transfers

if TYPE_CHECKING:
    from engine.console.options import EngineOptions
    from engine.program.place import PlacedCall
    from engine.runtime.load import Loaded


def installation() -> dict[str, Any]:
    """Version, and each backend that is installed, and each kind of collectives, with why it can be used or not."""
    found = discover()
    usable = [backend.name for backend in found if backend.probe.available]
    accelerators = hardware.accelerators()
    return {
        "version": __version__,
        "packages": _packages(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if _told(name)},
        "instruction_sets": hardware.instruction_sets(),
        "accelerators": accelerators,
        "advice": hardware.advice(accelerators, usable),
        "backends": [
            {"name": b.name, "available": b.probe.available, "reason": b.probe.reason, "score": b.probe.score}
            for b in found
        ],
        "collectives": [
            {"name": c.name, "available": c.probe.available, "reason": c.probe.reason} for c in discover_collectives()
        ],
    }


_PACKAGES = ("numpy", "tokenizers", "llguidance", "huggingface_hub", "torch", "triton", "mlx", "jax", "pyopencl")


def _packages() -> dict[str, str]:
    """Versions of what the engine stands on, where it is installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _told(name: str) -> bool:
    """Whether a variable changes what the engine does; keys are nobody's business."""
    ours = name.startswith(("ENGINE_", "HF_", "CUDA_VISIBLE", "HIP_VISIBLE", "OMP_NUM_THREADS", "TRITON_"))
    return ours and not name.endswith(("TOKEN", "KEY", "KEYS", "SECRET", "PASSWORD"))


def describe_device(device: Device) -> dict[str, Any]:
    """The device, and op -> names of its providers in the order tried."""
    info, memory, offered = device.describe(), device.memory_info(), providers_of(device)
    return {
        "device": {
            "name": info.name,
            "backend": info.backend,
            "machine": describe_machine(),
            "memory_free": memory.free,
            "memory_total": memory.total,
            "kv_layouts": [layout.name for layout in info.kv_layouts],
            "roles": dict(info.roles),
            "max_in_flight": info.max_in_flight,
            "details": dict(info.details),
        },
        "ops": {op: [*(p.name for p in offered.get(op, ())), "reference"] for op in OPS},
    }


def model_report(model: str, engine: EngineOptions) -> dict[str, Any]:
    """The device, and the model as it would be run: loaded; of steps only the largest run, where memory is measured."""
    loaded = open_loaded(model, engine.settings())
    loaded.close()
    config = loaded.model.config
    sizes = {name: value for name, value in vars(config).items() if isinstance(value, (int, float, str))}
    report = {
        "path": str(loaded.config.model),
        "family": loaded.model.family,
        "format": loaded.checkpoint.kind,
        "config": sizes,
        "weights": _weights(loaded),
        "context": loaded.max_model_len,
        "memory": asdict(loaded.memory),
        "places": {place: device.describe().name for place, device in loaded.devices.items()},
        "segments": _segments(loaded),
        "fallbacks": _fallbacks(loaded),
        "notices": list(loaded.notices),
        "program": program_lines(loaded),
    }
    return {**describe_device(loaded.device), "model": report}


def _weights(loaded: Loaded) -> dict[str, dict[str, int]]:
    """Format -> how many tensors of it the files hold, and their bytes there."""
    found: dict[str, dict[str, int]] = {}
    for tensor in loaded.checkpoint.tensors.values():
        entry = found.setdefault(tensor.format.name, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += tensor.nbytes
    return found


def _segments(loaded: Loaded) -> list[dict[str, Any]]:
    """Each segment with the values that are copied to its place from another, besides the step inputs. The last ones run
    for embeddings only."""
    segments: list[Segment] = [*loaded.plan.body, *loaded.plan.head, *loaded.plan.embedding]
    return [
        {
            "name": segment.name,
            "place": segment.place,
            "calls": len(segment.calls),
            "transfers": [one.value.name for one in entering if not one.step_input],
            "transfer_bytes_a_token": sum(one.bytes_a_token for one in entering if not one.step_input),
        }
        for segment, entering in zip(segments, transfers(segments), strict=True)
    ]


def _fallbacks(loaded: Loaded) -> list[dict[str, Any]]:
    counts = Counter((placed.call.op, str(placed.why)) for placed in loaded.placement.fallbacks())
    return [{"op": op, "reason": why, "count": count} for (op, why), count in counts.items()]


def program_lines(loaded: Loaded) -> list[str]:
    """One op call a line: ``%12 = linear(%10; blk.0.attn_q.weight Q4_K) @ cpu/avx512``. Between the brackets, apart by
    semicolons where they are: inputs (step inputs by name), weights with formats, states, attributes."""
    inputs = {value.id for value in loaded.program.inputs}
    backends = {place: device.describe().backend for place, device in loaded.devices.items()}
    return [_line(placed, inputs, backends) for placed in loaded.placement.calls]


def _line(placed: PlacedCall, inputs: set[int], backends: Mapping[str, str]) -> str:
    call = placed.call

    def name(value: Value) -> str:
        return value.name if value.id in inputs else f"%{value.id}"

    results = ", ".join(map(name, call.outputs))
    backend = backends.get(placed.place, "host")
    where = backend if placed.place == "device" else placed.place
    provider = f"{where}/{placed.provider.name.removeprefix(f'{backend}/')}"
    arguments = "; ".join(filter(None, (", ".join(map(name, call.inputs.values())), *_details(call))))
    return f"{results}{' = ' if results else ''}{call.op}({arguments}) @ {provider}"


def _details(call: Call) -> tuple[str, str, str]:
    weights = ", ".join(f"{ref.name} {ref.format}" for ref in call.weights.values())
    return weights, ", ".join(call.states.values()), ", ".join(f"{k}={number(v)}" for k, v in call.attrs.items())


def number(value: object) -> str:
    """A value for reading: floats in six digits."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
