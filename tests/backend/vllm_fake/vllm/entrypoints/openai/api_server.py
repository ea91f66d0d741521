"""A scripted server under vLLM's module name and with its paths, for tests of everything around it. No model.

It says what the last user message says; a message "wait N" takes N seconds, "hang" for ever, "die" ends the process,
"break" makes it answer 500 for ever, once.
`$FAKE_VLLM` names faults, separated by spaces. Like vLLM it has a subprocess, which does not end by itself.
"""

import argparse
import asyncio
import importlib
import json
import os
import subprocess
import sys
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

FAULTS = os.environ.get("FAKE_VLLM", "").split()
loaded: dict[str, str] = {}
steps = 0
broken = False
arguments = argparse.Namespace()


def error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "E", "param": None, "code": status}}, status)


async def health(_: Request) -> Response:
    return Response(status_code=503 if broken or os.path.exists(os.environ["FAKE_VLLM_DEAD"]) else 200)


async def models(_: Request) -> Response:
    root = "/elsewhere" if "other_model" in FAULTS else arguments.model
    listed = [{"id": arguments.served_model_name, "root": root}]
    return JSONResponse({"data": listed + [{"id": name, "root": root} for name, root in loaded.items()]})


async def load(request: Request) -> Response:
    global broken
    asked = await request.json()
    if "no_lora" in FAULTS:
        return JSONResponse({"detail": "Not Found"}, 404)
    if "refuse" in FAULTS:
        return error(400, "LoRA rank 64 is greater than max_lora_rank 16.")
    if "die_on_load" in FAULTS and not os.path.exists(os.environ["FAKE_VLLM_ONCE"]):
        os.mkdir(os.environ["FAKE_VLLM_ONCE"])
        os._exit(3)
    if "engine_dies_on_load" in FAULTS and not os.path.exists(os.environ["FAKE_VLLM_ONCE"]):
        os.mkdir(os.environ["FAKE_VLLM_ONCE"])
        broken = True
        await asyncio.sleep(3600)
    loaded[asked["lora_name"]] = asked["lora_path"]
    print(f"loaded {asked['lora_name']}", flush=True)
    return PlainTextResponse("Success")


async def unload(request: Request) -> Response:
    name = (await request.json())["lora_name"]
    loaded.pop(name, None)
    print(f"unloaded {name}", flush=True)
    return PlainTextResponse("Success")


async def metrics(_: Request) -> Response:
    return PlainTextResponse(f"vllm:steps {steps}\n")


async def chat(request: Request) -> Response:
    global steps, broken
    body = await request.json()
    text = body["messages"][-1]["content"]
    if body["model"] not in (*loaded, arguments.served_model_name):
        return error(404, "no such model")
    if len(text) > 1000:
        return error(400, "This model's maximum context length is 512 tokens. However, you asked for more.")
    if text == "break" and not os.path.exists(os.environ["FAKE_VLLM_ONCE"]):
        os.mkdir(os.environ["FAKE_VLLM_ONCE"])
        broken = True
    if broken:
        return error(500, "EngineCore encountered an issue.")
    if text == "die":
        os._exit(1)
    if text == "hang":
        await asyncio.sleep(3600)
    if text.startswith("wait "):
        await asyncio.sleep(float(text[5:]))
    if text == "seen":
        text = json.dumps(body)
    steps += 1
    head: Any = {"id": "c", "object": "chat.completion", "created": 1, "model": body["model"]}
    choice: Any = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    if body.get("logprobs") and "no_logprobs" not in FAULTS:
        choice["logprobs"] = {"content": [{"token": "x", "logprob": -0.5, "bytes": [], "top_logprobs": []}]}
    if body.get("return_token_ids") and "no_token_ids" not in FAULTS:
        choice["token_ids"], head["prompt_token_ids"] = [7], [1, 2, 3]
    if body.get("stream"):
        return StreamingResponse(events(head, text), media_type="text/event-stream")
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    return JSONResponse(head | {"choices": [choice], "usage": usage})


async def events(head: Any, text: str) -> Any:
    for index, word in enumerate(text.split()):
        delta = {"content": word} | ({"role": "assistant"} if index == 0 else {})
        chunk = head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        yield f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n"
        await asyncio.sleep(0.01)
    yield "data: [DONE]\n\n"


def main() -> None:
    global arguments
    parser = argparse.ArgumentParser()
    for name in ("--host", "--port", "--model", "--served-model-name", "--middleware"):
        parser.add_argument(name)
    arguments, _ = parser.parse_known_args()
    if "no_start" in FAULTS:
        raise ValueError("the weights are made of cheese")
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    paths = {"/v1/load_lora_adapter": load, "/v1/unload_lora_adapter": unload, "/v1/chat/completions": chat}
    routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in paths.items()]
    routes += [Route("/health", health), Route("/v1/models", models), Route("/metrics", metrics)]
    app = Starlette(routes=routes)
    module, _, name = arguments.middleware.rpartition(".")
    app.add_middleware(getattr(importlib.import_module(module), name))
    uvicorn.run(app, host=arguments.host, port=int(arguments.port), log_level="warning")


if __name__ == "__main__":
    main()
