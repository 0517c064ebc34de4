"""``engine pull``, ``list``, ``show``, ``rm`` and ``ps``: models by name, in Hugging Face's own cache."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.console.notes import note, visible
from engine.console.options import AsJson, Model
from engine.console.progress import Wait

if TYPE_CHECKING:
    from engine.formats.checkpoint import Checkpoint

Name = Annotated[str, typer.Argument(metavar="NAME", help="owner/repo, owner/repo:TYPE, or an address on the hub.")]


def pull(
    name: Name,
    *,
    backend: Annotated[
        str, typer.Option(help="Choose a type for the memory of this backend's device; auto takes the best backend.")
    ] = "auto",
) -> None:
    """Download a model from the Hugging Face hub.

    It goes into Hugging Face's own cache, where other programs find it, too. An interrupted download goes on where it was,
    and what has come is checked by the hub's digests. Without a type, the best that the device's memory holds is taken.

    \b
    Examples:
      engine pull Qwen/Qwen3-0.6B-GGUF
      engine pull bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M
      engine pull https://huggingface.co/owner/repo/resolve/main/model.gguf
    """
    from engine.backend.registry import open_device
    from engine.hub import pull as fetch
    from engine.hub.names import required_name

    wanted = required_name(name)
    free = open_device(backend, {}).memory_info().free
    with Wait("Asking the hub") as wait:
        pulled = fetch(wanted, wait.update, note, free)
    print(f"{pulled.name} is here: engine chat {pulled.name}")


def list_models(as_json: AsJson = False) -> None:
    """List the models that are here.

    They are those in Hugging Face's cache that can be opened, whichever program downloaded them.

    \b
    Examples:
      engine list
      engine list --json
    """
    from engine.hub.cache import cache_folder, cached_models
    from engine.hub.variants import size

    found = cached_models()
    if as_json:
        print(json.dumps([_listed(one) for one in found], ensure_ascii=False))
        return
    if not found:
        note(f"There is no model in {cache_folder()}; engine pull OWNER/REPO gets one.")
    wide = max((len(str(one.name)) for one in found), default=0)
    for one in found:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.since))
        print(f"{one.name!s:<{wide}}  {size(one.variant.size):>8}  {when}")


def _listed(one: Any) -> dict[str, Any]:
    return {"name": str(one.name), "bytes": one.variant.size, "path": str(one.path), "since": one.since}


def rm(name: Name) -> None:
    """Take a model out of the cache.

    Without a type, all of its repository goes.

    \b
    Examples:
      engine rm owner/repo:Q4_K_M
      engine rm owner/repo
    """
    from engine.hub.cache import remove
    from engine.hub.names import required_name
    from engine.hub.variants import size

    wanted = required_name(name)
    print(f"{wanted} is gone; {size(remove(wanted))} are free again.")


def show(model: Model, *, as_json: AsJson = False) -> None:
    """Show what a model is, without loading it. A name's model has to be here: engine pull gets it.

    \b
    Examples:
      engine show model.gguf
      engine show owner/repo:Q4_K_M --json
    """
    from engine.formats import open_checkpoint
    from engine.hub import located_here

    path = located_here(model)
    found = _described(path, open_checkpoint(path))
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
        return
    from engine.hub.variants import size

    formats = ", ".join(f"{count} {name}" for name, count in found["formats"].items())
    lines = {
        "path": found["path"],
        "architecture": f"{found['architecture']} ({found['format']})",
        "parameters": f"{found['parameters'] / 1e6:,.1f} million, {size(found['bytes'])}",
        "tensors": formats,
        "context": f"{found['context']} tokens",
        "chat template": "yes" if found["chat_template"] else "none: engine generate completes texts with it",
        "license": found["license"] or "not told",
    }
    for key, value in lines.items():
        print(f"{key:<14} {visible(value)}")


def _described(path: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    from engine.models import load_model

    tensors = checkpoint.tensors.values()
    template = checkpoint.chat_template()
    return {
        "path": str(path),
        "architecture": checkpoint.architecture,
        "format": checkpoint.kind,
        "parameters": sum(prod(tensor.shape) for tensor in tensors),
        "bytes": sum(tensor.nbytes for tensor in tensors),
        "formats": dict(Counter(tensor.format.name for tensor in tensors).most_common()),
        "context": load_model(checkpoint).config.max_context,
        "chat_template": template is not None,
        "license": checkpoint.metadata.get("general.license"),
    }


def ps(as_json: AsJson = False) -> None:
    """List the engine's processes that have a model loaded.

    \b
    Examples:
      engine ps
      engine ps --json
    """
    from engine.console.processes import running
    from engine.hub.variants import size

    found = running()
    if as_json:
        print(json.dumps([asdict(one) for one in found]))
        return
    if not found:
        note("No process of yours has a model loaded.")
    for one in found:
        minutes = (time.time() - one.since) / 60
        memory = f"weights {size(one.weights)}, KV {size(one.kv)}"
        print(f"{one.pid:>7}  {one.command:<10}{one.backend:<11}{memory:<32}{minutes:>6.0f} min  {one.model}")
