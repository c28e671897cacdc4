"""Downloads with `mcp_download_safe`: which are refused, what is written, and how failures are reported."""

from __future__ import annotations

import http.server
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from mcp import MCPError

from tests.support.addresses import REFUSED
from tests.support.bash_tools import BashTools
from tests.support.certificates import make_certificates
from tidings.workspace.sdk import download

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("options", "error_type"),
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
def test_unsafe_download_is_refused(tmp_path: Path, options: str, error_type: str) -> None:
    with pytest.raises(download.DownloadError) as caught:
        download.main(options.replace("--out f", f"--out {tmp_path}/f").split())
    assert caught.value.error_type == error_type
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("address", REFUSED)
def test_download_goes_to_no_address_that_a_webhook_must_not_reach(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 443)) for each in ("93.184.215.14", address)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: entries)
    with pytest.raises(download.DownloadError, match="not public") as caught:
        download.main(["--url", "https://example.com/", "--out", str(tmp_path / "f"), "--allow", "example.com"])
    assert caught.value.error_type == "host_blocked"


class Site(http.server.BaseHTTPRequestHandler):
    """A site with every path but /absent. It answers the first request for /busy with 503, and redirects /old."""

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
    """Serve example.com over HTTPS. Replace the check for a public address, because the server is local."""
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


def test_download_is_written_to_the_file(site: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    for path in ("/page?q=1", "/busy"):
        answer = download.main(["--url", site + path, "--out", out, "--allow", "example.com"])
        assert answer == {"success": True, "bytes": len(f"content of {path}"), "path": out}
        assert Path(out).read_text() == f"content of {path}"
    assert Site.requests == ["/page?q=1", "/busy", "/busy"]


@pytest.mark.parametrize(
    ("path", "error_type", "details"),
    [
        ("/old", "redirect", {"location": "https://elsewhere.example/new"}),
        ("/absent", "network_error", {}),
        ("/busy", "network_error", {}),
        ("/a-page-with-a-long-name", "size_exceeded", {}),
    ],
)
def test_failed_download_has_a_reason(
    site: str, tmp_path: Path, path: str, error_type: str, details: dict[str, str]
) -> None:
    given = ["--url", site + path, "--out", str(tmp_path / "out"), "--allow", "example.com", "--max-bytes", "20"]
    with pytest.raises(download.DownloadError, match=r"example\.com") as caught:
        download.main([*given, "--retries", "-1"])

    assert (caught.value.error_type, caught.value.details) == (error_type, details)
    assert not (tmp_path / "out").exists()


async def test_refused_download_is_a_result_or_a_failure(bash: BashTools) -> None:
    result = await bash.call("mcp_download_safe --url https://127.0.0.1/ --out f --allow 127.0.0.1")
    assert result.structured_content["error"]["type"] == "host_blocked"
    assert not result.is_error

    with pytest.raises(MCPError, match="not among the allowed hosts") as caught:
        await bash.call('path="$(mcp_download_safe_or_fail --url https://example.com/ --out f)"')
    assert caught.value.code == -32602
