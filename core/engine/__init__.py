"""engine: large language models on any device, from one Python package."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import EngineError as EngineError
    from .runtime.async_llm import AsyncLLM as AsyncLLM
    from .runtime.llm import LLM as LLM
    from .runtime.outputs import CompletionOutput as CompletionOutput
    from .runtime.outputs import RequestOutput as RequestOutput
    from .sampling import BeamSearchParams as BeamSearchParams
    from .sampling import SamplingParams as SamplingParams
    from .sampling import StructuredOutputs as StructuredOutputs

__version__ = "0.1.0"

_LAZY = {
    "LLM": ".runtime.llm",
    "AsyncLLM": ".runtime.async_llm",
    "BeamSearchParams": ".sampling",
    "SamplingParams": ".sampling",
    "StructuredOutputs": ".sampling",
    "RequestOutput": ".runtime.outputs",
    "CompletionOutput": ".runtime.outputs",
    "EngineError": ".errors",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # Loaded on first use: `import engine` stays quick, and the CLI's help, too.
    if name in _LAZY:
        return getattr(import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
