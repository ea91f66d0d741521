"""What the engine says to its vLLM server over HTTP, apart from the chat requests of clients."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx

from art_backend.vllm.inside.art_in_vllm.names import BASE
from art_core.errors import EngineError

LOAD_SECONDS = 300.0
ASK_SECONDS = 30.0


class Health(StrEnum):
    """What a server says of itself."""

    OK = "ok"
    DEAD = "dead"
    """Nobody listens, or the HTTP server says that the engine behind it is gone."""
    SILENT = "silent"
    """No answer in time."""


class Api:
    """A server at `url` (without `/v1`). Methods raise `httpx.TransportError` when it is gone, except `health`."""

    def __init__(self, url: str, api_key: str) -> None:
        headers = {"Authorization": f"Bearer {api_key}"}
        limits = httpx.Limits(max_keepalive_connections=0)  # a kept connection may lead to a server that is gone
        self.finding: str | None = None
        """What the server last said to have noticed about its tool parser."""
        self._http = httpx.Client(base_url=url, headers=headers, timeout=ASK_SECONDS, limits=limits, trust_env=False)

    def close(self) -> None:
        """Close the client."""
        self._http.close()

    def health(self, timeout: float = 10.0) -> Health:
        """How it is, SILENT after `timeout` seconds. Never raises."""
        try:
            status = self._http.get("/health", timeout=timeout).status_code
        except httpx.ConnectError:
            return Health.DEAD
        except httpx.TransportError:
            return Health.SILENT
        return Health.OK if status == 200 else Health.DEAD

    def load(self, name: str, adapter: Path) -> None:
        """Load the PEFT folder `adapter` as `name` and see that it is listed. Raises EngineError when it is refused."""
        body = {"lora_name": name, "lora_path": str(adapter)}
        answer = self._http.post("/v1/load_lora_adapter", json=body, timeout=LOAD_SECONDS)
        if answer.status_code == 404 and "lora" not in answer.text.lower():
            raise EngineError(
                "vLLM cannot take adapters while it runs: start it with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."
            )
        if answer.status_code != 200:
            raise EngineError(f"vLLM refused the adapter in {adapter}: {_reason(answer)}")
        if name not in self.models():
            raise EngineError(
                f"vLLM took the adapter in {adapter} but does not list {name}: use another version of vLLM."
            )

    def unload(self, name: str) -> None:
        """Forget the adapter `name`, if it is known."""
        self._http.post("/v1/unload_lora_adapter", json={"lora_name": name})

    def models(self) -> dict[str, str]:
        """The models that it knows, each with the folder it was loaded from."""
        listed = self._http.get("/v1/models").raise_for_status().json()["data"]
        return {model["id"]: model.get("root") or "" for model in listed}

    def put_names(self, names: dict[str, str]) -> dict[str, int]:
        """Serve exactly `names` (published name -> name in vLLM); returns the requests in flight by published name."""
        return self._told(self._http.put("/art/names", json=names))

    def in_flight(self) -> dict[str, int]:
        """Requests in flight by published name."""
        return self._told(self._http.get("/art/names"))

    def _told(self, answer: httpx.Response) -> dict[str, int]:
        told = answer.raise_for_status().json()
        self.finding = told["finding"] or self.finding
        return dict(told["in_flight"])

    def counters(self) -> str:
        """vLLM's own counters as text, which changes with every step of its engine."""
        lines = self._http.get("/metrics").raise_for_status().text.splitlines()
        return "\n".join(line for line in lines if line.startswith("vllm:"))

    def sleep(self) -> None:
        """Give the GPU's memory back: weights to main memory, caches to nothing."""
        self._http.post("/sleep", params={"level": 1, "mode": "wait"}, timeout=LOAD_SECONDS)

    def wake(self) -> None:
        """Take the memory again."""
        self._http.post("/wake_up", timeout=LOAD_SECONDS)

    def sample(self, model: str, timeout: float) -> dict[str, Any]:
        """One token of `model`, asked for as training asks. Raises EngineError when it is refused."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "Hi."}],
            "max_tokens": 1,
            "logprobs": True,
            "return_token_ids": True,
        }
        answer = self._http.post("/v1/chat/completions", json=body, timeout=timeout)
        if answer.status_code != 200:
            raise EngineError(f"vLLM cannot answer a request for one token: {_reason(answer)}")
        return dict(answer.json())


def check_served(api: Api, folder: Path) -> None:
    """Raise EngineError unless the server serves the base model in `folder`."""
    root = api.models().get(BASE)
    if root is None or Path(root) != folder:
        raise EngineError(
            f"vLLM serves {root or 'another model'} instead of {folder}: give no model in extra_args, and stop whatever "
            "else uses its port."
        )


def check_reply(reply: dict[str, Any]) -> None:
    """Raise EngineError, naming what is missing, unless `reply` has what training needs."""
    choice = reply["choices"][0]
    content = (choice.get("logprobs") or {}).get("content") or []
    needed = {
        "the ids of the sampled tokens (`return_token_ids`): use vLLM 0.30 or newer": choice.get("token_ids"),
        "the ids of the prompt's tokens (`return_token_ids`): use vLLM 0.30 or newer": reply.get("prompt_token_ids"),
        "logprobs: take --max-logprobs 0 out of extra_args": content,
    }
    for what, found in needed.items():
        if not found:
            raise EngineError(f"vLLM's replies lack {what}.")
    if len(content) != len(choice["token_ids"]):
        raise EngineError(
            f"vLLM reports {len(content)} logprobs for {len(choice['token_ids'])} sampled tokens: use another version."
        )


def _reason(answer: httpx.Response) -> str:
    """What an error reply says, with the option of the engine that helps where one does."""
    try:
        error = answer.json()["error"]
        message = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        message = answer.text[:300] or f"HTTP {answer.status_code}"
    if "max_lora_rank" in message or "max-lora-rank" in message:
        message += " (raise max_lora_rank of the engine, which is --max-lora-rank)"
    return message
