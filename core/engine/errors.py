"""Every exception that the engine raises on purpose: one sentence saying what is wrong and what would be right."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class EngineError(Exception):
    """Base of the engine's exceptions; `str(error)` is a sentence for a person."""


class FormatError(EngineError):
    """A model file or folder is damaged, incomplete or of a kind that is not supported."""


class TokenizerError(EngineError):
    """A tokenizer cannot be built from its description, or a text cannot be tokenized."""


class TemplateError(EngineError):
    """A chat template is invalid, or it refuses the messages it was given."""


class ModelError(EngineError):
    """A checkpoint's architecture is unknown, or its tensors do not fit its configuration."""


class BackendError(EngineError):
    """A backend is not available, or cannot be used as asked."""


class PlacementError(EngineError):
    """A program cannot be placed on a device as asked."""


class ConfigError(EngineError):
    """A setting is out of range or contradicts another."""


class RequestError(EngineError):
    """A request cannot be served; other requests are not affected. ``field``: what of it is at fault, by the engine's name."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class EngineStoppedError(EngineError):
    """The engine has been shut down or its step loop has failed for good."""


class KVCacheError(EngineError):
    """The KV cache is configured wrongly, or its bookkeeping was used against its rules."""


class SchedulerError(EngineError):
    """The scheduler is configured wrongly, or was called against its rules."""


class AdmissionError(EngineError):
    """A request can never run as it is: it is refused before it costs anything."""


class OpError(EngineError):
    """An op call asks for what the catalogue does not define."""


class HubError(EngineError):
    """A model cannot be had by its name: the hub does not have it, cannot be reached, or there is no room for it."""


class UsageError(EngineError):
    """A command line asks for what its command does not offer."""


@contextmanager
def library_errors(make: Callable[[str], EngineError]) -> Iterator[None]:
    """Turns whatever a native library raises, its panics included, into the exception that ``make`` gives for its message."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, EngineError):
        raise
    except BaseException as error:  # a panic derives from BaseException alone
        raise make(str(error)) from error
