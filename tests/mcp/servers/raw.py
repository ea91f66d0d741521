"""A scripted MCP server over stdio, in plain Python so that it starts at once and can misbehave at will.

Its one argument is a JSON object:
    tools: list of tool objects; without it the tools method is unknown
    results: tool name -> the result of a call, verbatim
    banner: a line printed before the handshake
    stderr: a line printed to standard error at the start
    die: exit before the handshake
Tools with a behaviour of their own, if listed: echo, pid, sleep, crash, chatter, refuse, count.
"""

import json
import os
import sys
import threading
import time

script = json.loads(sys.argv[1])
lock = threading.Lock()
count = 0


def send(message):
    with lock:
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        sys.stdout.flush()


def text(value):
    return {"content": [{"type": "text", "text": value}]}


def call(name, arguments):
    global count
    if name in script.get("results", {}):
        return script["results"][name]
    if name == "pid":
        return text(str(os.getpid()))
    if name == "count":
        count += 1
        return text(str(count))
    if name == "sleep":
        time.sleep(arguments["seconds"])
        return text(f"slept {arguments['seconds']}")
    if name == "crash":
        print("fatal: out of cheese", file=sys.stderr, flush=True)
        os._exit(3)
    if name == "chatter":
        print("debug: in a call", flush=True)
        return text("still here")
    return text(json.dumps(arguments))


def answer(request):
    method, params = request["method"], request.get("params", {})
    if method == "initialize":
        info = {"name": "raw", "version": "7"}
        capabilities = {"tools": {}} if "tools" in script else {"prompts": {}}
        version = params["protocolVersion"]
        return {"result": {"protocolVersion": version, "capabilities": capabilities, "serverInfo": info}}
    if method == "tools/list" and "tools" in script:
        return {"result": {"tools": script["tools"]}}
    if method == "tools/call" and params["name"] == "refuse":
        return {"error": {"code": -32602, "message": "no such luck"}}
    if method == "tools/call":
        return {"result": call(params["name"], params.get("arguments") or {})}
    return {"error": {"code": -32601, "message": "Method not found"}}


if "stderr" in script:
    print(script["stderr"], file=sys.stderr, flush=True)
if "banner" in script:
    print(script["banner"], flush=True)
if script.get("die"):
    sys.exit(1)
for line in sys.stdin:
    request = json.loads(line)
    if "id" in request and "method" in request:
        threading.Thread(target=lambda r=request: send({"id": r["id"], **answer(r)}), daemon=True).start()
os._exit(0)
