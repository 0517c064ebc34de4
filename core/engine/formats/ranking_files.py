"""What a model's files say of how it ranks: sentence-transformers' settings and its module LogitScore, or GGUF's keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import FormatError, TemplateError
from engine.formats.chat_template import ChatTemplate
from engine.formats.jsonfile import is_plain_name, read_list, read_object


@dataclass(frozen=True)
class RankingFiles:
    """``act``: the name of the function that a score goes through, None where no file names one. ``answers``: tokens of the usual
    head, of which the first one's logit is the score, less that of the second if there is one. ``template``: a text in which
    {query} and {document} stand for what is ranked; or these are messages of the chat template (``by_messages``), which gets
    ``variables``. ``prompt`` comes before the query, as a system's message or as its beginning. ``types``: whether
    the tokenizer tells the tokens of two texts apart, for a model that has types of tokens."""

    act: Any = None
    answers: tuple[int, ...] = ()
    template: str | None = None
    by_messages: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    prompt: str = ""
    types: bool = True


def of_gguf(architecture: str, metadata: Mapping[str, Any]) -> RankingFiles:
    """FormatError for a template that is no text."""
    template = metadata.get("tokenizer.chat_template.rerank")
    if not isinstance(template, str | None):
        raise FormatError("tokenizer.chat_template.rerank must be a string.")
    return RankingFiles(metadata.get(f"{architecture}.classifier.activation"), template=template)


def of_folder(folder: Path, config: Mapping[str, Any]) -> RankingFiles:
    """By config.json, and by what sentence-transformers has beside it. FormatError where that is damaged."""
    own = config.get("sentence_transformers")
    act = own.get("activation_fn") if isinstance(own, dict) else None
    act = act or config.get("sbert_ce_default_activation_function")
    inputs = _object(folder / "tokenizer_config.json").get("model_input_names")
    types = not isinstance(inputs, list) or "token_type_ids" in inputs
    if not (folder / "modules.json").is_file():
        return RankingFiles(act, types=types)
    settings, transformer = (
        _object(folder / f"{name}.json") for name in ("config_sentence_transformers", "sentence_bert_config")
    )
    answers = _answers(folder)
    modalities, processing = transformer.get("modality_config"), transformer.get("processing_kwargs")
    given = processing.get("chat_template") if isinstance(processing, dict) else None
    return RankingFiles(
        settings.get("activation_fn") or act,
        answers,
        by_messages="message" in modalities if isinstance(modalities, dict) else bool(answers),
        variables=given if isinstance(given, dict) else {},
        prompt=_prompt(folder, settings),
        types=types,
    )


def pair_text(files: RankingFiles, template: ChatTemplate | None, query: str, document: str) -> str:
    """What the chat template makes of a query and a document, each a message of its own role. TemplateError where there is none,
    or it leaves one of them out."""
    if template is None:
        raise TemplateError("the model ranks by its chat template, and its files have none.")
    text = _rendered(files, template, query, document)
    if query.strip() not in text or document.strip() not in text:  # left out, or perhaps written in another way
        trial = _rendered(files, template, "query", "document")
        for role, other in (("query", ("", "document")), ("document", ("query", ""))):
            if _rendered(files, template, *other) == trial:
                raise TemplateError(f"the chat template has no place for a {role}, which a ranking needs.")
    return text


def _rendered(files: RankingFiles, template: ChatTemplate, query: str, document: str) -> str:
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    if files.prompt:
        messages.insert(0, {"role": "system", "content": files.prompt})
    return template.render(messages, **{"add_generation_prompt": False, **files.variables})


def _object(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _answers(folder: Path) -> tuple[int, ...]:
    """The tokens that the module LogitScore names, if there is one."""
    for module in read_list(folder / "modules.json"):
        kind = module.get("type") if isinstance(module, dict) else None
        if not isinstance(kind, str) or kind.rpartition(".")[2] != "LogitScore":
            continue
        if not is_plain_name(module.get("path")):
            raise FormatError(
                f"{folder / 'modules.json'} names {module.get('path')!r}, which is no plain name of a folder."
            )
        path = folder / module["path"] / "config.json"
        settings = read_object(path)
        told = [settings.get("true_token_id"), settings.get("false_token_id")]
        tokens = tuple(token for token in told if type(token) is int and token >= 0)
        if len(tokens) != (1 if told[1] is None else 2):
            raise FormatError(f"{path} must name a token in true_token_id, and one or null in false_token_id.")
        return tokens
    return ()


def _prompt(folder: Path, settings: Mapping[str, Any]) -> str:
    """That of the name default_prompt_name."""
    name, prompts = settings.get("default_prompt_name"), settings.get("prompts")
    found = prompts.get(name, "") if isinstance(name, str) and isinstance(prompts, dict) else ""
    if not isinstance(found, str):
        raise FormatError(f"{folder / 'config_sentence_transformers.json'} has the prompt {found!r}, which is no text.")
    return found
