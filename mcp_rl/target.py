"""Which MCP server a `--server` text means, and how to reach it.

A target is parsed before anything is started, so a wrong text fails at once with one sentence. Like other MCP clients
we give a server that we start only a few harmless environment variables (the SDK's list, proxies, certificates): what
else it needs stands under `env` in its `mcp.json` entry, where `${NAME}` is taken from our environment.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

from art_core.errors import ConfigError

TOKEN_VARIABLE = "ART_MCP_TOKEN"
_PASSED_ON = re.compile(r"(?i)(https?|no|all)_proxy|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|NODE_EXTRA_CA_CERTS")


class Transport(StrEnum):
    """How a server is spoken to."""

    STDIO = "stdio"
    """A process of our own, over its standard input and output."""
    HTTP = "http"
    """Streamable HTTP."""
    SSE = "sse"
    """The older HTTP transport; chosen for a URL whose path ends in /sse."""
    MEMORY = "memory"
    """A FastMCP server object in this process."""


@dataclass(frozen=True)
class Target:
    """One server. `label` names it in messages and holds no secret."""

    transport: Transport
    label: str
    command: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    url: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    server: Any = None

    def open(self, log: TextIO) -> Any:
        """A fresh fastmcp transport. The standard error of a process of ours goes to `log`."""
        from fastmcp.client.transports import SSETransport, StdioTransport, StreamableHttpTransport

        if self.transport is Transport.STDIO:
            env = {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)} | self.env
            return StdioTransport(self.command[0], list(self.command[1:]), env=env, keep_alive=False, log_file=log)
        if self.transport is Transport.MEMORY:
            return self.server
        kind = SSETransport if self.transport is Transport.SSE else StreamableHttpTransport
        return kind(self.url, headers=self.headers)


def parse_target(spec: Any, config: Path | None = None) -> Target:
    """The server that `spec` means. Raises ConfigError.

    `spec` is a URL, a `.py` file (with arguments, if any), a command line, `path/to/mcp.json#name`, `mcp.json` with one
    entry, the name of an entry of the file `config`, or a FastMCP server object.
    """
    if not isinstance(spec, str):
        return Target(Transport.MEMORY, f"in-memory server {getattr(spec, 'name', '')!r}", server=spec)
    spec = spec.strip()
    if config is not None:
        return _entry(config, spec)
    if re.match(r"[\w+.-]+://\S+$", spec):
        return _url(spec, {})
    path, _, name = spec.partition("#")
    if path.endswith(".json"):
        return _entry(Path(path).expanduser(), name)
    words = [spec] if Path(spec).expanduser().is_file() else _split(spec)
    return _process(words[0], words[1:], {}, label=spec)


def _split(spec: str) -> list[str]:
    try:
        words = shlex.split(spec)
    except ValueError as error:
        raise ConfigError(f"Cannot read the server command {spec!r}: {error}.") from None
    if not words:
        raise ConfigError("No MCP server given: pass a URL, a .py file, a command line, or mcp.json#name.")
    return words


def _process(program: str, args: list[str], env: dict[str, str], label: str) -> Target:
    if program.endswith(".py"):
        script = Path(program).expanduser()
        if not script.is_file():
            raise ConfigError(f"The server file {program} does not exist.")
        program, args = sys.executable, [str(script.resolve()), *args]
    elif shutil.which(program, path=env.get("PATH")) is None:
        raise ConfigError(
            f"{program!r} is no command on the PATH: an MCP server is given as a URL, a .py file, a command line, "
            "or mcp.json#name."
        )
    return Target(Transport.STDIO, label, command=(program, *args), env=env)


def _url(url: str, headers: dict[str, str]) -> Target:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{parts.scheme}:// is not supported for MCP servers: give an http:// or https:// URL.")
    token = os.environ.get(TOKEN_VARIABLE)
    if token and "authorization" not in {name.lower() for name in headers}:
        headers = {**headers, "Authorization": f"Bearer {token}"}
    transport = Transport.SSE if parts.path.rstrip("/").endswith("/sse") else Transport.HTTP
    label = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"  # no password, no query: may be secret
    return Target(transport, label, url=url, headers=headers)


def _entry(file: Path, name: str) -> Target:
    """An entry of an `mcp.json`; the only one when `name` is empty."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read {file}: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}.") from None
    content = content if isinstance(content, dict) else {}
    servers = content.get("mcpServers", content.get("servers"))
    if not isinstance(servers, dict) or not servers:
        raise ConfigError(f"{file} names no servers: it needs an object 'mcpServers'.")
    if not name and len(servers) == 1:
        name = next(iter(servers))
    if name not in servers:
        raise ConfigError(f"{file} has no server {name!r}: {choices(name, servers)}.")
    return _from_entry(servers[name], f"{file}#{name}")


def _from_entry(entry: Any, label: str) -> Target:
    if not isinstance(entry, dict) or not isinstance(entry.get("url", entry.get("command")), str):
        raise ConfigError(f"{label} needs a 'url' or a 'command'.")
    if "url" in entry:
        target = _url(_expand(entry["url"], label), _strings(entry, "headers", label))
        if entry.get("type", entry.get("transport")) == Transport.SSE:
            return Target(Transport.SSE, target.label, url=target.url, headers=target.headers)
        return target
    args = entry.get("args", [])
    if not isinstance(args, list):
        raise ConfigError(f"'args' of {label} must be a list.")
    words = [_expand(str(word), label) for word in args]
    return _process(_expand(entry["command"], label), words, _strings(entry, "env", label), label)


def _strings(entry: dict[str, Any], key: str, label: str) -> dict[str, str]:
    values = entry.get(key) or {}
    if not isinstance(values, dict):
        raise ConfigError(f"{key!r} of {label} must be an object.")
    return {name: _expand(str(value), label) for name, value in values.items()}


def _expand(text: str, label: str) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise ConfigError(f"{label} uses ${{{match[1]}}}, which is not set in the environment.")
        return os.environ[match[1]]

    return re.sub(r"\$\{(?:env:)?(\w+)\}", value, text)


def choices(wrong: str, names: Any) -> str:
    """What `wrong` may have meant, else all names: the end of an error message."""
    close = difflib.get_close_matches(wrong, list(names), n=3)
    return f"did you mean {', '.join(close)}?" if close else f"it has {', '.join(sorted(names))}"
