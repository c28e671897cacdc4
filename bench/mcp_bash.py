"""Serve projects with mcp-bash-framework and with Tidings, and print what differs.

    python bench/mcp_bash.py CHECKOUT [PROJECT …]

CHECKOUT is a checkout of mcp-bash-framework; nothing of it is part of this repository. Without PROJECT, all its
examples are compared. Each server gets its own copy of the project, at the same path, and the same requests: the lists,
two calls of each tool (without arguments, and with values made from its schema), each resource, and each prompt. The
members that MCP does not define and the wording of errors are not compared. Needs bash and jq.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

DEADLINE = 60.0
"""Seconds for one response: mcp-bash-framework starts several processes for each request."""

LISTS = {
    "tools/list": ("tools", "name"),
    "prompts/list": ("prompts", "name"),
    "resources/list": ("resources", "uri"),
    "resources/templates/list": ("resourceTemplates", "name"),
}
EXTRA_MEMBERS = frozenset(
    {"path", "provider", "role", "size", "timeoutSecs", "timeoutHint", "progressExtendsTimeout", "maxTimeoutSecs"}
)
SAMPLES: dict[str, Any] = {"string": "example", "integer": 1, "number": 1, "boolean": True}
UNANSWERED = {"error": "unanswered"}


class Client:
    """A client on standard input and output that accepts every question."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._last_id = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. If the server has ended, its requests count as unanswered."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
            self._process.stdin.flush()

    def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Return the `result` or the `error` of a request."""
        self._last_id += 1
        try:
            self.send({"id": self._last_id, "method": method, "params": params})
            while line := self._lines.get(timeout=DEADLINE):
                message = json.loads(line)
                if message.get("method") == "elicitation/create":
                    content = make_sample(message["params"].get("requestedSchema", {}))
                    self.send({"id": message["id"], "result": {"action": "accept", "content": content}})
                elif message.get("id") == self._last_id:
                    return {key: message[key] for key in ("result", "error") if key in message}
        except queue.Empty:
            pass
        return UNANSWERED

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            self._process.kill()


def make_sample(schema: dict[str, Any]) -> Any:
    """Return a value that matches a schema, for the simple schemas of tools and questions."""
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("enum", "oneOf", "anyOf"):
        if schema.get(key):
            first = schema[key][0]
            return first if key == "enum" else make_sample(first)
    kind = schema.get("type", "object")
    if kind == "object":
        return {name: make_sample(value) for name, value in schema.get("properties", {}).items()}
    return [make_sample(schema.get("items", {}))] if kind == "array" else SAMPLES.get(kind)


def collect(command: list[str], env: dict[str, str]) -> dict[str, Any]:
    """Return what a server answers to each request, by a description of the request."""
    client = Client(command, env)
    capabilities: dict[str, Any] = {"elicitation": {}}
    info = {"name": "compare", "version": "1"}
    found: dict[str, Any] = {}
    try:
        hello = client.request(
            "initialize", {"protocolVersion": "2025-11-25", "capabilities": capabilities, "clientInfo": info}
        )
        server = hello.get("result", {}).get("serverInfo", {})
        found["initialize"] = {key: server.get(key) for key in ("name", "version")}
        client.send({"method": "notifications/initialized"})
        items: dict[str, list[dict[str, Any]]] = {}
        for method, (member, key) in LISTS.items():
            response = client.request(method, {})
            items[member] = [
                item for item in response.get("result", {}).get(member, []) if item.get("uri") != "tidings://errors"
            ]
            found[method] = response if "error" in response else "answered"
            found |= {f"{method} {item[key]}": item for item in items[member]}
        found["logging/setLevel"] = client.request("logging/setLevel", {"level": "info"})
        arguments: dict[str, Any]
        for tool in items["tools"]:
            for arguments in ({}, make_sample(tool["inputSchema"])):
                params = {"name": tool["name"], "arguments": arguments}
                found[f"call {tool['name']} {json.dumps(arguments)}"] = client.request("tools/call", params)
        for resource in items["resources"]:
            found[f"read {resource['uri']}"] = client.request("resources/read", {"uri": resource["uri"]})
        for prompt in items["prompts"]:
            params = {"name": prompt["name"], "arguments": {each["name"]: "x" for each in prompt.get("arguments", [])}}
            found[f"get {prompt['name']}"] = client.request("prompts/get", params)
    finally:
        client.close()
    return {request: simplify(response) for request, response in found.items()}


def simplify(value: Any) -> Any:
    """Remove the members that MCP does not define, final line ends, and the wording of errors."""
    if isinstance(value, list):
        return [simplify(each) for each in value]
    if isinstance(value, str):
        return value.rstrip("\n")
    if not isinstance(value, dict):
        return value
    if value == UNANSWERED:
        return value
    if "error" in value or value.get("isError"):
        return "error"
    if "result" in value:
        return simplify(value["result"])
    ignored = EXTRA_MEMBERS | {"_meta"}
    if "content" in value:
        ignored |= {"name"}
    if "messages" in value:
        ignored |= {"text", "arguments"}
    kept = {key: simplify(each) for key, each in value.items() if key not in ignored and each is not None}
    ui = (value.get("_meta") or {}).get("ui")
    return kept | ({"ui": simplify(ui)} if ui else {})


def compare(checkout: Path, project: Path, folder: Path) -> tuple[int, list[str], int]:
    """Return the number of equal responses, the requests that differ, and how many mcp-bash-framework left open."""
    results = []
    for kind in ("mcp-bash", "tidings"):
        root = folder / project.name
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(project, root, symlinks=True)
        for name in ("tools", "resources", "prompts", "server.d"):
            (root / name).mkdir(exist_ok=True)
        env = os.environ | {
            "MCPBASH_PROJECT_ROOT": str(root),
            "MCPBASH_TOOL_ALLOWLIST": "*",
            "MCPBASH_ALLOW_PROJECT_HOOKS": "true",
        }
        own = [sys.executable, "-m", "tidings", "serve", "--stdio", "--state", "none"]
        results.append(collect([str(checkout / "bin" / "mcp-bash")] if kind == "mcp-bash" else own, env))
    theirs, ours = results
    answered = [key for key in dict.fromkeys([*theirs, *ours]) if theirs.get(key) != UNANSWERED]
    differing = [key for key in answered if theirs.get(key) != ours.get(key)]
    return len(answered) - len(differing), differing, len(theirs.keys() - set(answered))


def main() -> None:
    checkout, *names = (Path(name).resolve() for name in sys.argv[1:])
    examples = [*(checkout / "examples").iterdir(), *(checkout / "examples" / "advanced").iterdir()]
    projects = names or sorted(path for path in examples if path.is_dir() and path.name != "advanced")
    print("| project | equal | different | not answered by mcp-bash |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for project in projects:
            equal, differing, unanswered = compare(checkout, project, Path(folder).resolve())
            print(f"| {project.name} | {equal} | {'; '.join(differing)} | {unanswered} |", flush=True)


if __name__ == "__main__":
    main()
