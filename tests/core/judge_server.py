"""A judge for tests: a scripted server whose replies may depend on the attempts that it is shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from art_core.judging.prompt import read_blocks
from tests.scripted_server import JSON, Reply, ScriptedServer

USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}


def refusal(status: int, message: str) -> Reply:
    """An HTTP error with the server's own words."""
    return Reply(status=status, code=message)


class JudgeServer(ScriptedServer):
    """A `ScriptedServer` that says the `code` of a failure as its message, as real servers do."""

    async def _answer(self, request: Request) -> Response:
        response = await super()._answer(request)
        if response.status_code == 200:
            return response
        body = json.loads(bytes(response.body))
        body["error"]["message"] = body["error"]["code"] or body["error"]["message"]
        headers = {name: value for name, value in response.headers.items() if name == "retry-after"}
        return JSONResponse(body, status_code=response.status_code, headers=headers)


def shown(body: JSON) -> dict[str, list[Any]]:
    """The attempts in a request by id, in the order shown."""
    return read_blocks(body["messages"][1]["content"])


def verdict(body: JSON, score: Callable[[int, list[Any]], Any]) -> Reply:
    """A reply that gives each attempt `score(place, lines)`."""
    scores = [
        {"trajectory_id": ident, "explanation": f"place {place}", "score": score(place, lines)}
        for place, (ident, lines) in enumerate(shown(body).items())
    ]
    return Reply(json.dumps({"scores": scores}), usage=USAGE)


def by_text(body: JSON) -> Reply:
    """An honest judge: the number in an attempt's last text is its score."""
    return verdict(body, lambda _, lines: float(lines[-1]["text"].split()[-1]))
