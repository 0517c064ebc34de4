"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from .errors import ApiError, named
from .fields import DetokenizeBody, Message, TokenizeBody, ending_of
from .keys import salt_of
from .lanes import beside
from .logprobs import token_text
from .model import ServedModel
from .models import Models
from .prompts import chat_prompt, encode
from .respond import written

_OF_CHATS = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


def routes(models: Models) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        """The token ids of a text or a conversation."""
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "Give either prompt or messages.", "prompt")
        if body.prompt is not None and (wrong := next((n for n in _OF_CHATS if getattr(body, n) is not None), None)):
            raise ApiError(400, f"{wrong} is for messages, and prompt is a text; leave one out.", wrong)
        model = await models.find(body.model)
        if body.messages is None:
            ids = await encode(model, body.prompt or "", body.add_special_tokens is not False)
        else:
            text, ids = await _conversation(model, body, body.messages, request.state.caller)
            if body.add_special_tokens:
                ids = await encode(model, text)
        tokenizer = model.llm.engine.tokenizer

        def answer() -> dict[str, Any]:
            texts = [token_text(tokenizer, token) for token in ids] if body.return_token_strs else None
            return {"count": len(ids), "max_model_len": model.max_model_len, "tokens": list(ids), "token_strs": texts}

        return await written(answer)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, str]:
        """The text of token ids."""
        engine = (await models.find(body.model)).llm.engine
        with named({"prompt": "tokens"}):
            ids = engine.encode(tuple(body.tokens))
        return {"prompt": await beside(lambda: engine.tokenizer.decode(ids, False))}

    return router


async def _conversation(
    model: ServedModel, body: TokenizeBody, messages: list[Message], caller: str
) -> tuple[str, tuple[int, ...]]:
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    ending = ending_of(body.add_generation_prompt, body.continue_final_message)
    templated = [message.templated() for message in messages]
    return await chat_prompt(model, templated, tools, body.chat_template_kwargs, ending, salt_of(caller, ""))
