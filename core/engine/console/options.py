"""Options that several commands share, and how a command takes a group of them as one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from engine.console.texts import read_text_file
from engine.errors import RequestError, UsageError

if TYPE_CHECKING:
    from engine import BeamSearchParams, SamplingParams, StructuredOutputs

MODEL_HELP = "A GGUF file, a folder with config.json and safetensors, or a name on the hub: owner/repo[:TYPE]"
Model = Annotated[str, typer.Argument(metavar="MODEL", help=f"{MODEL_HELP}.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
ENGINE, SAMPLING = "Engine", "Sampling"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How a model is run; the fields are options of every command that loads one."""

    backend: Annotated[
        str,
        typer.Option(
            help="Backend by name, or one of its devices, as in cuda:1; auto takes the best that can run here."
        ),
    ] = "auto"
    place: Annotated[
        str | None,
        typer.Option(
            metavar="RULES",
            help='Share the model out among devices, such as "layers 0-13: opencl; rest: cpu" or "experts: cpu"; what no rule'
            " names is the backend's.",
        ),
    ] = None
    threads: Annotated[
        int | None, typer.Option(help="Threads of the CPU, for each rank; one for each fast core if not given.")
    ] = None
    pin_threads: Annotated[
        bool, typer.Option("--pin-threads", help="Keep each thread of the CPU but one on a core of its own.")
    ] = False
    tensor_parallel: Annotated[
        int, typer.Option(metavar="RANKS", help="Share each layer among so many ranks, processes of this machine.")
    ] = 1
    collectives: Annotated[
        str, typer.Option(help="How ranks exchange values: auto, or by name, such as gloo or a plugin's.")
    ] = "auto"
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of the KV cache: f32, f16, bf16, int16 (whole numbers with a scale), int8 or fp8. [default: f16, or"
            " int16 on processors that multiply it faster; of engine perplexity f32]"
        ),
    ] = None
    block_size: Annotated[int, typer.Option(help="Tokens in a block of the KV cache.")] = 16
    max_batch_tokens: Annotated[
        int | None, typer.Option(help="Most tokens that one step computes; 512, or what the device proposes.")
    ] = None
    max_context: Annotated[
        int | None, typer.Option(help="Most tokens of a sequence; the model's own context if not given.")
    ] = None
    kv_allocator: Annotated[
        str, typer.Option(help="How sequences get room in the KV cache: paged, contiguous, virtual, or a plugin's.")
    ] = "paged"
    preemption: Annotated[
        str, typer.Option(help="What becomes of a sequence that must make room: recompute, or swap to host memory.")
    ] = "recompute"
    swap_space: Annotated[float, typer.Option(help="GiB of host memory for swapped sequences.")] = 4.0
    speculate: Annotated[
        int,
        typer.Option(
            metavar="TOKENS",
            help="Guess so many tokens from what came before and check them in one step, which is faster where a text repeats"
            " itself; the tokens stay the same. 0 is off.",
        ),
    ] = 0
    strict: Annotated[bool, typer.Option("--strict", help="Refuse to run an op on the reference.")] = False
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", help="Refuse ops by which tokens may depend on what else is in the batch."),
    ] = False
    without: Annotated[
        list[str] | None,
        typer.Option(metavar="OP", help="Run this op on the reference, to find a faulty kernel; may be repeated."),
    ] = None

    def settings(self, kv_dtype: str = "auto") -> dict[str, Any]:
        """The same as keywords of ``LLM``, for one conversation at a time; ``kv_dtype`` where none is given. BackendError
        for collectives that there are not, which one rank alone would never ask for."""
        from ..backend.joining import check_name
        from ..runtime.config import USUAL_POOL_TOKENS

        check_name(self.collectives)
        return {
            "backend": self.backend,
            "place": self.place,
            "threads": self.threads,
            "pin_threads": self.pin_threads,
            "tensor_parallel_size": self.tensor_parallel,
            "collectives": self.collectives,
            "kv_cache_dtype": self.kv_dtype or kv_dtype,
            "block_size": self.block_size,
            "max_num_batched_tokens": self.max_batch_tokens,
            "kv_cache_tokens": USUAL_POOL_TOKENS,
            "max_model_len": self.max_context,
            "kv_allocator": self.kv_allocator,
            "preemption": self.preemption,
            "swap_space": self.swap_space,
            "speculate": self.speculate,
            "strict": self.strict,
            "deterministic": self.deterministic,
            "without": tuple(self.without or ()),
        }


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen. Where an option is not given it is as the model's makers recommend, else its default here, with
    which tokens are sampled from the model's own distribution."""

    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token; 1 samples from the model's own distribution.")
    ] = 1.0
    top_k: Annotated[int, typer.Option(help="Sample among so many likeliest tokens; 0 is all.")] = 0
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens of this total probability.")] = 1.0
    min_p: Annotated[float, typer.Option(help="Leave out tokens below this part of the likeliest's probability.")] = 0.0
    typical_p: Annotated[
        float, typer.Option(help="Sample among the tokens nearest to the expected surprise, of this total probability.")
    ] = 1.0
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 makes tokens seen before less likely.")] = 1.0
    frequency_penalty: Annotated[float, typer.Option(help="Taken off a logit for each time its token came.")] = 0.0
    presence_penalty: Annotated[float, typer.Option(help="Taken off a logit once its token came.")] = 0.0
    no_repeat_ngram_size: Annotated[int, typer.Option(help="No run of so many tokens comes twice; 0 is off.")] = 0
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be repeated.")] = (
        None
    )
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same tokens; drawn if not given.")] = None

    def params(self, **others: Any) -> SamplingParams:
        """As sampling parameters, with ``others`` that are no shared options."""
        from engine import SamplingParams

        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return SamplingParams(**{**own, "stop": tuple(self.stop or ())}, **others)

    def beam_params(self, **others: Any) -> BeamSearchParams:
        """As parameters of beam search, which takes no options of how to sample."""
        from engine import BeamSearchParams

        own = {field.name: getattr(self, field.name) for field in fields(self)}
        shared = {field.name for field in fields(BeamSearchParams)}
        wrong = [f.name for f in fields(self) if f.name not in shared and own[f.name] != f.default]
        if wrong:
            raise UsageError(
                f"--{wrong[0].replace('_', '-')} is for sampling, and --beams samples nothing; leave one out."
            )
        kept = {name: value for name, value in own.items() if name in shared}
        return BeamSearchParams(**{**kept, "stop": tuple(self.stop or ())}, **others)


@dataclass(frozen=True, kw_only=True)
class FormOptions:
    """The form that a text must have."""

    schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Generate JSON that is valid by this JSON schema.")
    ] = None
    regex: Annotated[str | None, typer.Option(metavar="REGEX", help="Generate a text that this matches.")] = None
    grammar: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Generate a text of this grammar, in Lark or GBNF.")
    ] = None

    def outputs(self) -> StructuredOutputs | None:
        """As a sampling parameter, the files read; None where no form is asked for."""
        given = [name for name in ("schema", "regex", "grammar") if getattr(self, name) is not None]
        if len(given) > 1:
            raise UsageError(f"Give one of --schema, --regex and --grammar, not {len(given)}.")
        if self.regex is not None:
            return _form("--regex", regex=self.regex)
        if self.schema is not None:
            return _form(f"--schema {self.schema}", json=read_text_file(self.schema, _MAX_FORM_FILE))
        return (
            None
            if self.grammar is None
            else _form(f"--grammar {self.grammar}", grammar=read_text_file(self.grammar, _MAX_FORM_FILE))
        )


def _form(option: str, **given: Any) -> StructuredOutputs:
    from engine import StructuredOutputs

    try:
        return StructuredOutputs(**given)
    except RequestError as error:  # which calls it as requests do
        raise UsageError(str(error).replace(str(error.field), option)) from error


_MAX_FORM_FILE = 1 << 20  # bytes


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each parameter whose type is a dataclass of options replaced by the dataclass's fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += _options(groups[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name]))

    @wraps(command)
    def run(**given: Any) -> None:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **made)

    run.__signature__ = inspect.Signature(sorted(parameters, key=lambda p: p.kind))  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(group)
    ]


def given_options(context: typer.Context, names: Iterable[str]) -> dict[str, Any]:
    """Those of these options that are on the command line."""
    source = context.get_parameter_source
    wanted = set(names) & context.params.keys()
    return {name: context.params[name] for name in wanted if getattr(source(name), "name", "") == "COMMANDLINE"}


def parse_integers(text: str, name: str, separator: str | None = None) -> list[int]:
    """Whole numbers, not negative, from an option's value: separated by spaces, or by ``separator``."""
    parts = text.split(separator)
    wrong = next((part for part in parts if not (part.strip().isascii() and part.strip().isdigit())), None)
    if wrong is not None or not parts:
        example = "1,4,8" if separator else "1 403 407"
        raise UsageError(f'{name} is "{text}"; it must be whole numbers such as "{example}".')
    return [int(part) for part in parts]
