"""The helpers of `tool-sdk.sh` for downloads: which are refused, what is written, and how a failure is told."""

from __future__ import annotations

import http.server
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from mcp import MCPError

from tests.support.bash_tools import Tools, tools
from tests.support.certificates import make_certificates
from tidings.workspace.sdk import download

__all__ = ["tools"]

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ("--url http://example.com/ --out f --allow example.com", "invalid_url"),
        ("--url https://user@example.com/ --out f --allow example.com", "invalid_url"),
        ("--out f", "invalid_url"),
        ("--url https://example.com/", "invalid_params"),
        ("--url https://example.com/ --out f --timeout soon", "invalid_params"),
        ("--url https://example.com/ --out f", "host_blocked"),
        ("--url https://example.com/ --out f --allow example.org", "host_blocked"),
        ("--url https://127.0.0.1/ --out f --allow 127.0.0.1", "host_blocked"),
        ("--url https://[::1]/ --out f --allow ::1", "host_blocked"),
        ("--url https://[::ffff:10.0.0.1]/ --out f --allow ::ffff:10.0.0.1", "host_blocked"),
        ("--url https://[64:ff9b::7f00:1]/ --out f --allow 64:ff9b::7f00:1", "host_blocked"),
        ("--url https://localhost/ --out f --allow localhost", "host_blocked"),
        ("--url https://2130706433/ --out f --allow 2130706433", "host_blocked"),
        ("--url https://0x7f.1/ --out f --allow 0x7f.1", "host_blocked"),
        ("--url https://169.254.169.254/latest --out f --allow 169.254.169.254", "host_blocked"),
    ],
)
def test_a_download_that_must_not_be_is_refused(tmp_path: Path, options: str, kind: str) -> None:
    with pytest.raises(download.Refused) as caught:
        download.main(options.replace("--out f", f"--out {tmp_path}/f").split())
    assert caught.value.kind == kind
    assert not (tmp_path / "f").exists()


class Site(http.server.BaseHTTPRequestHandler):
    """Says 503 to every first request for /busy, redirects /old, and has something at any other path."""

    requests: ClassVar[list[str]] = []

    def do_GET(self) -> None:  # the base class's name
        self.requests.append(self.path)
        busy = self.path == "/busy" and self.requests.count("/busy") == 1
        self.send_response(503 if busy else 302 if self.path == "/old" else 404 if self.path == "/absent" else 200)
        self.send_header("Location", "https://elsewhere.example/new")
        self.end_headers()
        self.wfile.write(b"content of " + self.path.encode())

    def log_message(self, format: str, *args: Any) -> None:  # the base class's name
        pass


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An HTTPS server for example.com, where only the check of its address is left out: it is not a public one."""
    authority, certificate = make_certificates(tmp_path, "example.com")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    monkeypatch.setattr(download, "resolve", lambda host, port: "127.0.0.1")
    Site.requests.clear()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"https://example.com:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_download_is_written_and_counted(site: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    for path in ("/page?q=1", "/busy"):
        answer = download.main(["--url", site + path, "--out", out, "--allow", "example.com"])
        assert answer == {"success": True, "bytes": len(f"content of {path}"), "path": out}
        assert Path(out).read_text() == f"content of {path}"
    assert Site.requests == ["/page?q=1", "/busy", "/busy"]


@pytest.mark.parametrize(
    ("path", "kind", "more"),
    [
        ("/old", "redirect", {"location": "https://elsewhere.example/new"}),
        ("/absent", "network_error", {}),
        ("/a-page-with-a-long-name", "size_exceeded", {}),
    ],
)
def test_a_download_that_fails_says_how(site: str, tmp_path: Path, path: str, kind: str, more: dict[str, str]) -> None:
    given = ["--url", site + path, "--out", str(tmp_path / "out"), "--allow", "example.com", "--max-bytes", "20"]
    with pytest.raises(download.Refused) as caught:
        download.main(given)

    assert (caught.value.kind, caught.value.more) == (kind, more)
    assert not (tmp_path / "out").exists()


async def test_a_refused_download_is_told_and_does_not_fail(tools: Tools) -> None:
    result = await tools.call("mcp_download_safe --url https://127.0.0.1/ --out f --allow 127.0.0.1")

    assert result.structured_content["error"]["type"] == "host_blocked"
    assert not result.is_error


async def test_a_refused_download_may_fail_the_tool(tools: Tools) -> None:
    with pytest.raises(MCPError, match="not among the allowed hosts") as caught:
        await tools.call('path="$(mcp_download_safe_or_fail --url https://example.com/ --out f)"')

    assert caught.value.code == -32602
