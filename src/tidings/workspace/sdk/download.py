"""`mcp_download_safe` of tool-sdk.sh: download a file over HTTPS from an allowed host.

A model often chooses the URL, and it must not reach the private network of this process. So the host name is resolved
once, every address must be public, and the connection uses one of them. Redirects are not followed.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import ipaddress
import json
import os
import re
import socket
import ssl
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

MAX_SECONDS = 60
MAX_BYTES = 20 * 1024 * 1024
_TRANSIENT = frozenset({429, 500, 502, 503, 504})


def _load_address_check() -> Any:
    """Return `tidings.wire.addresses`, loaded by its path: this Python has no site-packages, and importing the package
    would take most of the time of a call."""
    path = Path(__file__).parents[2] / "wire" / "addresses.py"
    spec = importlib.util.spec_from_file_location("tidings_addresses", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_addresses = _load_address_check()


class DownloadError(Exception):
    """An error of a download that was refused or failed. `details` are further members of the JSON error."""

    def __init__(self, error_type: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.error_type = error_type
        self.details = details


class _Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DownloadError("invalid_params", message)


class _PinnedConnection(http.client.HTTPSConnection):
    """A connection to a checked address. It verifies the certificate for the host name."""

    def __init__(self, host: str, port: int, address: str, timeout: float) -> None:
        self._ssl_context = ssl.create_default_context()
        super().__init__(host, port, timeout=timeout, context=self._ssl_context)
        self._address = address

    def connect(self) -> None:
        connection = socket.create_connection((self._address, self.port), self.timeout)
        self.sock = self._ssl_context.wrap_socket(connection, server_hostname=self.host)


def download(url: str, out: str, allow: list[str], deny: list[str], timeout: float, max_bytes: int, agent: str) -> int:
    """Download to `out`, and return the number of bytes."""
    host, port = check_url(url, allow, deny)
    address = resolve(host, port)
    target = urlsplit(url)
    deadline = time.monotonic() + timeout
    body = bytearray()
    connection = _PinnedConnection(host, port, address, timeout)
    try:
        path = (target.path or "/") + (f"?{target.query}" if target.query else "")
        connection.request("GET", path, headers={"User-Agent": agent, "Accept-Encoding": "identity"})
        with connection.getresponse() as response:
            if 300 <= response.status < 400:
                location = response.headers.get("Location", "")
                raise DownloadError(
                    "redirect", f"{url} redirects to {location}; download that instead", location=location
                )
            if response.status >= 400:
                error_type = "transient" if response.status in _TRANSIENT else "network_error"
                raise DownloadError(error_type, f"{host} answered {response.status} {response.reason}")
            while chunk := response.read1(65536):
                body += chunk
                if len(body) > max_bytes:
                    raise DownloadError("size_exceeded", f"{url} has more than {max_bytes} bytes")
                if time.monotonic() > deadline:
                    raise DownloadError("transient", f"{host} did not finish within {timeout:g} s")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DownloadError("transient", f"{host} could not be read: {error}") from error
    finally:
        connection.close()
    try:
        Path(out).write_bytes(body)
    except OSError as error:
        raise DownloadError("write_error", f"{out} could not be written: {error.strerror}") from error
    return len(body)


def check_url(url: str, allow: list[str], deny: list[str]) -> tuple[str, int]:
    """Return the host and port of a URL. Raises `DownloadError` if the URL is not allowed."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower().rstrip("."), parts.port or 443
    except ValueError as error:
        raise DownloadError("invalid_url", f"{url!r} is not a URL: {error}") from error
    if parts.scheme != "https" or not host or parts.username is not None or re.search(r"[\x00-\x20\x7f]", url):
        raise DownloadError("invalid_url", f"{url!r} is not a https:// URL without user name and spaces")
    if re.fullmatch(r"(0x[0-9a-f]*|\d+)(\.(0x[0-9a-f]*|\d+))*", host) and str(_addresses.parse_address(host)) != host:
        raise DownloadError("host_blocked", f"{host} is an obfuscated IP address")
    if host in deny:
        raise DownloadError("host_blocked", f"{host} is denied")
    if host not in allow and os.environ.get("MCPBASH_HTTPS_ALLOW_ALL", "").lower() not in ("true", "1"):
        raise DownloadError("host_blocked", f"{host} is not among the allowed hosts: {', '.join(allow) or 'none'}")
    return host, port


def resolve(host: str, port: int) -> str:
    """Return an address of the host. All of its addresses must be public."""
    try:
        addresses = [entry[4][0] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        raise DownloadError("transient", f"{host} could not be resolved: {error}") from error
    for text in addresses:
        reason = _addresses.reason_not_public(ipaddress.ip_address(str(text).partition("%")[0]))
        if reason is not None:
            raise DownloadError("host_blocked", f"{host} has the address {text}, which is not public: it is {reason}")
    return str(addresses[0])


def _parse_hosts(*texts: str) -> list[str]:
    return [host.lower().rstrip(".") for text in texts for host in re.split(r"[\s,]+", text) if host]


def main(arguments: list[str]) -> dict[str, Any]:
    parser = _Arguments(add_help=False, allow_abbrev=False)
    parser.add_argument("--url", default="")
    parser.add_argument("--out", default="")
    parser.add_argument("--allow", action="append", default=[])
    parser.add_argument("--deny", action="append", default=[])
    parser.add_argument("--timeout", type=float, default=float(os.environ.get("MCPBASH_HTTPS_TIMEOUT") or 15))
    parser.add_argument("--max-bytes", type=int, default=int(os.environ.get("MCPBASH_HTTPS_MAX_BYTES") or 10485760))
    parser.add_argument("--retries", type=int, default=2)
    parser.add_argument("--user-agent", default=os.environ.get("MCPBASH_HTTPS_USER_AGENT") or "tidings (tool-sdk)")
    options = parser.parse_args(arguments)
    if not options.out:
        raise DownloadError("invalid_params", "--out is missing")
    allow = _parse_hosts(*options.allow, os.environ.get("MCPBASH_HTTPS_ALLOW_HOSTS", ""))
    deny = _parse_hosts(*options.deny, os.environ.get("MCPBASH_HTTPS_DENY_HOSTS", ""))
    timeout, max_bytes = min(options.timeout, MAX_SECONDS), min(options.max_bytes, MAX_BYTES)
    retries, pause = options.retries, 0.2
    while True:
        try:
            size = download(options.url, options.out, allow, deny, timeout, max_bytes, options.user_agent)
            return {"success": True, "bytes": size, "path": options.out}
        except DownloadError as error:
            if error.error_type != "transient":
                raise
            if retries <= 0:
                raise DownloadError("network_error", str(error)) from error
        threading.Event().wait(pause)
        retries, pause = retries - 1, 2 * pause


if __name__ == "__main__":
    try:
        result = main(sys.argv[1:])
    except DownloadError as error:
        result = {"success": False, "error": {"type": error.error_type, "message": str(error), **error.details}}
    except ValueError as error:
        result = {"success": False, "error": {"type": "invalid_params", "message": str(error)}}
    sys.stdout.write(json.dumps(result) + "\n")
