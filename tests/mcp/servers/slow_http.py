"""A FastMCP server over HTTP: `slow_http.py PORT [http|sse]`."""

import asyncio
import sys

from fastmcp import FastMCP

server = FastMCP("slow")


@server.tool
async def sleep(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return f"slept {seconds}"


if __name__ == "__main__":
    transport = sys.argv[2] if len(sys.argv) > 2 else "http"
    server.run(transport=transport, host="127.0.0.1", port=int(sys.argv[1]), show_banner=False)
