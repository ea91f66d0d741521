"""vLLM's OpenAI server on a port that this project holds.

While vLLM loads, the port is answered by the engine's stand-in, so that clients wait instead of being refused. Both may
hold it at once only if both ask for that before they bind, and vLLM does not; an audit hook sees its socket in time,
whatever vLLM calls the function that binds it.

Usage: `python serve.py PORT VLLM_ARGUMENTS...`
"""

from __future__ import annotations

import runpy
import socket
import sys
from typing import Any

SERVER = "vllm.entrypoints.openai.api_server"
"""Not `vllm serve`: that command fails in the CPU build, which is installed under another name."""


def share_port(port: int) -> None:
    """Let sockets that this process binds to `port` share it with other processes of this user."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.bind" and _is_server(*arguments):
            arguments[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)

    def _is_server(bound: socket.socket, address: Any) -> bool:
        internet = bound.family in (socket.AF_INET, socket.AF_INET6)
        return internet and bound.type == socket.SOCK_STREAM and address[1] == port

    sys.addaudithook(hook)


if __name__ == "__main__":
    served = sys.argv.pop(1)
    share_port(int(served))
    sys.argv[1:1] = ["--port", served]
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
