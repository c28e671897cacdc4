"""Tools written in bash with the helpers of `tool-sdk.sh`, called as a server calls them: with jq, and without."""

from __future__ import annotations

import asyncio
import http.server
import json
import random
import shutil
import ssl
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import mcp_types as types
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from mcp import MCPError

from tests.test_workspace_environment import NASTY
from tidings.sources.workspace import environment as environment_module
from tidings.sources.workspace.call import call_executable
from tidings.sources.workspace.sdk import download, values

pytestmark = pytest.mark.anyio

DEADLINE = 20.0


class Tools:
    """A workspace whose tools are bash scripts, run as a server runs them."""

    def __init__(self, root: Path, own: dict[str, str]) -> None:
        self.root = root
        self.own = own
        self.said: list[dict[str, Any]] = []
        self.on_progress: Callable[[dict[str, Any]], None] = self.said.append

    async def call(self, text: str, arguments: dict[str, Any] | None = None, **options: Any) -> types.CallToolResult:
        path = self.root / "tool.sh"
        header = '#!/usr/bin/env bash\nset -euo pipefail\nsource "${MCP_SDK:?}/tool-sdk.sh"\n'
        path.write_text(header + textwrap.dedent(text), "utf-8")
        path.chmod(0o755)
        given: dict[str, Any] = {"root": self.root, "name": "tool", "timeout": DEADLINE, "most_output": 8 << 20}
        given |= {"own": self.own, "on_progress": self.on_progress} | options
        return await call_executable([str(path)], arguments or {}, **given)

    async def text(self, text: str, arguments: dict[str, Any] | None = None, **options: Any) -> str:
        result = await self.call(text, arguments, **options)
        content = result.content[0]
        assert isinstance(content, types.TextContent)
        assert not result.is_error, content.text
        return content.text


@pytest.fixture(params=["as found", "none"])
def tools(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tools]:
    """With the JSON tool of this machine, if there is one, and with none."""
    own = {}
    if request.param == "none":
        monkeypatch.setattr(environment_module, "json_tool", lambda path: None)
        own["MCPBASH_JSON_TOOL_BIN"] = ""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    root = tmp_path / "workspace"
    root.mkdir()
    yield Tools(root, own)
    assert list(scratch.iterdir()) == []  # a call leaves nothing behind


# Arguments


async def test_every_nastiness_passes_through_a_tool_unchanged(tools: Tools) -> None:
    pairs = " ".join(f'{case} "$(mcp_args_require .{case})"' for case in NASTY)
    result = await tools.call(f'mcp_result_success "$(mcp_json_obj {pairs})"', NASTY)

    # $(…) drops the line ends at the end of what it holds, here as everywhere.
    assert result.structured_content["result"] == {case: value.rstrip("\n") for case, value in NASTY.items()}
    assert not (tools.root / "owned").exists()


async def test_what_bash_reads_by_itself_is_what_json_says(tools: Tools) -> None:
    """Flat objects don't go through jq; here is what might differ."""
    chance = random.Random(4)
    letters = '\\"/bnut\n\t\x01\x7f{}[]:,0 ä🎉\u2028='
    texts = [*NASTY.values(), *("".join(chance.choices(letters, k=chance.randrange(12))) for _ in range(30))]
    values = [*texts, 0, -1, 12345678901234567890, 1.5e300, True, False, "null", "true", "0"]
    objects = [{"a": "x", "v": value, "V": 1, "v2": text} for value, text in zip(values, reversed(values), strict=True)]
    lines = [json.dumps(given, ensure_ascii=number % 8 == 0) for number, given in enumerate(objects)]
    (tools.root / "lines").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    text = """
        while IFS= read -r MCP_TOOL_ARGS_JSON; do
            value="$(mcp_args_require .v; echo .)"
            mcp_json_escape "${value%$'\\n.'}"
        done <lines
    """
    received = [json.loads(line) for line in (await tools.text(text)).split("\n")]

    assert received == [value if isinstance(value, str) else json.dumps(value) for value in values]


async def test_line_ends_at_the_end_are_there_for_who_wants_them(tools: Tools) -> None:
    text = """
        value="$(mcp_args_require .value; echo .)"
        mcp_result_success "$(mcp_json_obj value "${value%$'\\n.'}")"
    """
    result = await tools.call(text, {"value": "a\n\n"})

    assert result.structured_content["result"] == {"value": "a\n\n"}


async def test_a_megabyte_passes_through_a_tool_unchanged(tools: Tools) -> None:
    value = '"ä\\\n' * 200_000 + "."
    result = await tools.call('mcp_result_success "$(mcp_json_obj v "$(mcp_args_require .value)")"', {"value": value})

    assert result.structured_content["result"] == {"v": value}
    assert isinstance(result.content[0], types.TextContent)
    assert len(result.content[0].text) < 200


async def test_arguments_are_read_by_filter_with_defaults(tools: Tools) -> None:
    text = """
        mcp_args_get '.name // "World"'
        mcp_args_get '.absent' --default 'a default'
        mcp_args_get '.no' --default yes
        mcp_args_get '.list[1].x'
        mcp_args_get '.a.b // empty'
        mcp_args_get '.list | length'
        mcp_meta_get '.user'
        mcp_args_raw
    """
    arguments = {"no": False, "list": [0, {"x": "deep"}]}
    lines = (await tools.text(text, arguments, request_meta={"user": "ada"})).splitlines()

    assert lines[:6] == ["World", "a default", "false", "deep", "2", "ada"]
    assert json.loads(lines[6]) == arguments


async def test_booleans_and_integers_are_coerced(tools: Tools) -> None:
    text = """
        echo "$(mcp_args_bool .yes) $(mcp_args_bool .one) $(mcp_args_bool .no) $(mcp_args_bool .x --default true)"
        echo "$(mcp_args_int .n --min 1 --max 10) $(mcp_args_int .s) $(mcp_args_int .x --default 5)"
        mcp_args_int .m
    """
    given = {"yes": True, "one": 1, "no": False, "n": 10, "s": "007", "m": -3}

    assert await tools.text(text, given) == "true true false true\n10 7 5\n-3"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("mcp_args_require .x", ".x is required"),
        ("mcp_args_require .null 'give me that'", "give me that"),
        ("mcp_args_bool .x", ".x is required"),
        ("mcp_args_int .x", ".x is required"),
        ("mcp_args_int .word", ".word must be an integer"),
        ("mcp_args_int .half", ".half must be an integer"),
        ("mcp_args_int .n --min 6", ".n must be at least 6"),
        ("mcp_args_int .n --max 4", ".n must be at most 4"),
        ("mcp_require_path .outside", ".outside is outside the allowed roots"),
        ("mcp_require_path .up", ".up is outside the allowed roots"),
        ("mcp_require_path .x", ".x is required"),
        ("mcp_fail_invalid_args 'not so'", "not so"),
    ],
)
async def test_bad_arguments_are_invalid_params_even_from_inside_a_substitution(
    tools: Tools, line: str, said: str
) -> None:
    given = {"null": None, "word": "x", "half": 1.5, "n": 5, "outside": "/etc/passwd", "up": "a/../../b"}
    with pytest.raises(MCPError) as caught:
        await tools.call(f'value="$({line})"; mcp_result_success "never"', given)

    assert (caught.value.code, caught.value.message) == (-32602, said)


async def test_a_failure_has_code_message_and_data(tools: Tools) -> None:
    with pytest.raises(MCPError) as caught:
        await tools.call("""mcp_fail -32001 'Cancelled "now"' '{"detail":[1]}'""")
    assert (caught.value.code, caught.value.message, caught.value.data) == (-32001, 'Cancelled "now"', {"detail": [1]})

    with pytest.raises(MCPError) as caught:
        await tools.call("mcp_fail 'no code'")
    assert (caught.value.code, caught.value.message) == (-32603, "no code")


async def test_a_failure_that_the_tool_recovers_from_is_none(tools: Tools) -> None:
    assert await tools.text('value="$(mcp_args_require .x)" || value=other; mcp_emit_text "$value"') == "other"


# Results


async def test_results_have_an_envelope_and_end_the_tool(tools: Tools) -> None:
    good = await tools.call("""mcp_result_success '{"a": [1, null, "ä"]}'; echo never""")
    assert good.structured_content == {"success": True, "result": {"a": [1, None, "ä"]}}
    assert not good.is_error
    assert isinstance(good.content[0], types.TextContent)
    assert json.loads(good.content[0].text) == {"a": [1, None, "ä"]}

    bad = await tools.call("""mcp_result_error '{"type": "not_found"}'; echo never""")
    assert bad.structured_content == {"success": False, "error": {"type": "not_found"}}
    assert bad.is_error

    assert await tools.text("""mcp_result_success 'plain "words" {'""") == 'plain "words" {'
    assert await tools.text("mcp_result_text $'two\\nlines'; echo never") == "two\nlines"


async def test_an_error_has_a_type_a_hint_and_data(tools: Tools) -> None:
    result = await tools.call("""
        trap 'touch trapped' EXIT
        mcp_error validation_error 'Bad "date"' --hint 'Use 2025-01-15' --data "$(mcp_json_obj received 'x"y')"
        echo never
    """)

    assert result.is_error
    assert result.structured_content["error"] == {
        "type": "validation_error",
        "message": 'Bad "date"',
        "hint": "Use 2025-01-15",
        "data": {"received": 'x"y'},
    }
    assert (tools.root / "trapped").exists()


async def test_emitted_json_and_text_are_the_answer(tools: Tools) -> None:
    result = await tools.call("""mcp_emit_json '{"a": 1}'""")
    assert result.structured_content == {"a": 1}

    assert await tools.text("mcp_emit_text 'hi $(id)'") == "hi $(id)"


async def test_files_are_embedded_in_the_result(tools: Tools) -> None:
    result = await tools.call("""
        printf 'a report' >report.txt
        printf '\\xff\\xfe' >image.bin
        mcp_result_text_with_resource "Report ready" --path "$PWD/report.txt" --mime text/x \\
            --path "$PWD/image.bin" --path /etc/passwd
    """)
    text, report, image = result.content

    assert isinstance(text, types.TextContent)
    assert text.text == "Report ready"
    assert isinstance(report, types.EmbeddedResource)
    assert isinstance(report.resource, types.TextResourceContents)
    assert (report.resource.text, report.resource.mime_type) == ("a report", "text/x")
    assert isinstance(image, types.EmbeddedResource)
    assert isinstance(image.resource, types.BlobResourceContents)


async def test_json_is_built_and_measured(tools: Tools) -> None:
    text = r"""
        mcp_json_arr; mcp_json_arr a 'b "c"' ''
        mcp_json_obj
        mcp_json_escape $'tab\t bell\a & \\& end'
        mcp_byte_length 'ä🎉'
        for json in false null '"x"' '[1]' '' '{} {}' '{a}'; do
            mcp_is_valid_json "$json" && echo yes || echo no
        done | tr '\n' ' '
    """
    lines = (await tools.text(text)).splitlines()

    assert [json.loads(line) for line in lines[:4]] == [[], ["a", 'b "c"', ""], {}, "tab\t bell\a & \\& end"]
    assert lines[4:] == ["6", "yes yes yes yes no no no "]


async def test_an_object_with_a_key_too_many_is_an_error(tools: Tools) -> None:
    with pytest.raises(MCPError, match="a value for every key"):
        await tools.call("mcp_json_obj only >/dev/null")


@pytest.mark.parametrize(
    ("given", "most", "path", "expected"),
    [
        ("[1,2,3]", 100, "", {"result": [1, 2, 3], "truncated": False, "kept": 3, "total": 3}),
        ("[1,2,3,4]", 5, "", {"result": [1, 2], "truncated": True, "kept": 2, "total": 4}),
        ('{"results":[1,2]}', 15, "", {"result": {"results": [1]}, "truncated": True, "kept": 1, "total": 2}),
        (
            '{"a":{"b":[1],"c":0}}',
            20,
            ".a.b",
            {"result": {"a": {"b": [], "c": 0}}, "truncated": True, "kept": 0, "total": 1},
        ),
    ],
)
async def test_a_large_array_is_cut_to_size(
    tools: Tools, given: str, most: int, path: str, expected: dict[str, Any]
) -> None:
    option = f"--array-path '{path}'" if path else ""
    result = await tools.call(f"mcp_json_truncate '{given}' {most} {option}")

    assert result.structured_content == expected


@pytest.mark.parametrize(
    ("given", "path", "kind"),
    [
        ('{"a":1}', ".b", "path_not_found"),
        ('{"a":1}', ".a", "invalid_array_path"),
        ('{"a":1}', ".a[0]", "invalid_path_syntax"),
        ('{"a":[1],"b":"xxxxxxxxxxxxxxxxxxxxxxxxxx"}', ".a", "output_too_large"),
    ],
)
async def test_an_array_that_can_not_be_cut_says_why(tools: Tools, given: str, path: str, kind: str) -> None:
    result = await tools.call(f"mcp_json_truncate '{given}' 20 --array-path '{path}'")

    assert result.structured_content["error"]["type"] == kind


async def test_the_message_of_a_failed_command_is_found(tools: Tools) -> None:
    text = """
        mcp_extract_cli_error '{"error":{"message":"one"}}' noise 1
        mcp_extract_cli_error '{"error":"two"}' noise 1
        mcp_extract_cli_error '{"success":false,"message":"three"}' noise 1
        mcp_extract_cli_error '{"errors":[{"message":"four"}]}' noise 1
        mcp_extract_cli_error 'not json' five 1
        mcp_extract_cli_error '' '' 6
    """
    assert (await tools.text(text)).splitlines() == [
        "one", "two", "three", "four", "five", "the command failed with exit status 6",
    ]  # fmt: skip


# Progress, log, cancellation


async def test_progress_and_log_lines_are_told(tools: Tools) -> None:
    await tools.call("""
        mcp_progress 25 'a "quarter"' 50
        mcp_progress 250 'too much'
        mcp_progress oops ''
        mcp_log_info weather $'two\\nlines'
        mcp_log_warn weather '{"a": 1}'
        mcp_debug checkpoint one
    """)

    assert tools.said == [
        {"progress": 25, "total": 50, "message": 'a "quarter"'},
        {"progress": 100, "total": 100, "message": "too much"},
        {"progress": 0, "total": 100, "message": ""},
        {"level": "info", "logger": "weather", "data": "two\nlines"},
        {"level": "warning", "logger": "weather", "data": {"a": 1}},
        {"level": "debug", "logger": "tool", "data": "checkpoint one"},
    ]


async def test_progress_is_told_while_the_tool_runs(tools: Tools) -> None:
    tools.on_progress = lambda said: (tools.root / "heard").touch()

    assert await tools.text("mcp_progress 1 x; until [ -e heard ]; do sleep 0.01; done; echo done") == "done"


async def test_the_progress_of_a_command_is_passed_on(tools: Tools) -> None:
    result = await tools.text(r"""
        noisy() { printf '10%%\r20%%\r' >&2; echo "trouble" >&2; echo '30%' >&2; echo output; return 7; }
        status=0
        output="$(mcp_run_with_progress --pattern '([0-9]+)%' --extract match1 --stderr-file errors -- noisy)" ||
            status=$?
        mcp_run_with_progress --pattern '\[([0-9]+)/([0-9]+)\]' --extract ratio --stdout out -- \
            bash -c 'echo "[1/4] a" >&2; echo written'
        mcp_run_with_progress --pattern '"progress"' --quiet -- \
            bash -c 'echo "{\"progress\": 60.5, \"message\": \"j\\\"s\"}" >&2; echo "{\"type\":\"progress\"}" >&2'
        mcp_run_with_progress --pattern '^t=([0-9]+)' --extract match1 \
            --total 200 --progress-file file --interval 0.01 -- \
            bash -c 'echo t=150 >>file; printf t=200 >>file; echo >>file'
        echo "$output $status $(cat errors) $(cat out)"
    """)

    assert result == "output 7 trouble written"
    assert [(said["progress"], said["message"]) for said in tools.said] == [
        (10, "10%"), (20, "20%"), (30, "30%"), (25, "[1/4] a"), (60, 'j"s'), (75, "t=150"), (100, "t=200"),
    ]  # fmt: skip


async def test_a_cancelled_tool_can_see_it(tools: Tools) -> None:
    under_way = asyncio.Event()
    tools.on_progress = lambda said: under_way.set()
    task = asyncio.create_task(
        tools.call("""
            mcp_is_cancelled && exit 9
            trap 'mcp_is_cancelled && touch seen; exit' TERM
            mcp_progress 1 started
            while :; do sleep 0.01; done
        """)
    )
    async with asyncio.timeout(DEADLINE):
        await under_way.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert (tools.root / "seen").exists()


async def test_a_command_is_tried_again_when_it_may_help(tools: Tools) -> None:
    text = """
        try() { echo x >>"$1"; [ "$(wc -l <"$1")" -ge 3 ] || return "$2"; }
        status=0
        mcp_with_retry 5 0.001 -- try transient 3
        mcp_with_retry 5 0.001 -- try permanent 2 || status=$?
        mcp_with_retry 2 0 -- try exhausted 9 || status="$status $?"
        echo "$(wc -l <transient) $(wc -l <permanent) $(wc -l <exhausted) $status"
    """
    assert (await tools.text(text)).split() == ["3", "1", "2", "2", "9"]


# Roots, configuration, questions


async def test_paths_are_held_to_the_roots(tools: Tools) -> None:
    (tools.root / "in side").mkdir()
    (tools.root / "out").symlink_to("/etc")
    text = """
        mcp_roots_count; mcp_roots_list
        for path in . 'in side/x' absent/../y / .. out/passwd "${PWD}x"; do
            mcp_roots_contains "$path" && echo yes || echo no
        done
        mcp_require_path .path --default-to-single-root
        echo "[$(mcp_require_path .path --allow-empty)]"
        mcp_require_path .given
    """
    root = str(tools.root.resolve())
    lines = (await tools.text(text, {"given": "in side/../in side"})).splitlines()

    assert lines == ["1", root, "yes", "yes", "yes", "no", "no", "no", "no", root, "[]", f"{root}/in side"]


async def test_configuration_is_merged_and_the_nearest_wins(tools: Tools) -> None:
    (tools.root / "config.json").write_text('{"b": 2, "c": {"d": "file"}}')
    (tools.root / "example.json").write_text('{"a": 9, "b": 9}')
    (tools.root / "broken.json").write_text("{")
    text = """
        mcp_config_load --env CONFIG --file config.json --example example.json \\
            --defaults '{"a": 1, "z": false, "n": null}'
        for key in .a .b .c.d .e .z; do mcp_config_get "$key"; done
        mcp_config_get .n --default fallback
        mcp_config_get .absent.deep || echo none
        mcp_config_load --env ABSENT --file broken.json --example absent.json --defaults '{"only": 1}'
        mcp_emit_text "$MCP_CONFIG_JSON"
    """
    tools.own["CONFIG"] = '{"e": "env"}'
    lines = (await tools.text(text)).splitlines()

    assert lines == ["9", "2", "file", "env", "false", "fallback", "none", '{"only":1}']
    assert tools.said[0]["data"] == "broken.json is not a JSON object, and is left out"


async def test_a_question_to_the_user_is_declined(tools: Tools) -> None:
    text = """
        for ask in mcp_elicit mcp_elicit_string mcp_elicit_confirm mcp_elicit_choice mcp_elicit_titled_choice \\
            mcp_elicit_multi_choice mcp_elicit_titled_multi_choice mcp_elicit_url; do
            "$ask" "Really?" yes no
        done | sort -u
        echo "$MCP_ELICIT_SUPPORTED"
    """
    answer, supported = (await tools.text(text)).splitlines()

    assert (json.loads(answer), supported) == ({"action": "decline", "content": None}, "0")


# Downloads


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
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "example.com")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("example.com")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.Encoding.PEM
    (tmp_path / "certificate").write_bytes(certificate.public_bytes(form))
    (tmp_path / "key").write_bytes(
        key.private_bytes(form, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate"))
    monkeypatch.setattr(download, "resolve", lambda host, port: "127.0.0.1")
    Site.requests.clear()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
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


# Without jq

FILTERS = [
    (".", {"a": 1}, '{"a":1}'),
    (".a.b", {"a": {"b": "x"}}, "x"),
    ('.["a b"].c', {"a b": {"c": 1}}, "1"),
    ('."a b"', {"a b": True}, "true"),
    (".a[-1]", {"a": [1, 2]}, "2"),
    (".a[]", {"a": [1, "x"]}, "1\nx"),
    (".a.b.c", {}, "null"),
    (".a // .b // 5", {"b": False}, "5"),
    ('.a // "d"', {"a": False}, "d"),
    (".a // empty", {}, ""),
    (".a.b? // 1", {"a": 3}, "1"),
    ('if .a == "x" then 1 else .b end', {"a": "y", "b": 2}, "2"),
    ('(.a | tostring) + "!"', {"a": [1]}, "[1]!"),
    (".a | keys | length", {"a": {"x": 1, "y": 2}}, "2"),
    (".a | type", {"a": 1.5}, "number"),
    (".a | not", {"a": None}, "true"),
    ('.a != "x"', {"a": "x"}, "false"),
]


@pytest.mark.parametrize(("text", "given", "expected"), FILTERS, ids=[text for text, _, _ in FILTERS])
def test_filters_mean_without_jq_what_they_mean_with_it(text: str, given: Any, expected: str) -> None:
    assert values.run("get", [text], json.dumps(given)) == (expected, 0)


@pytest.mark.parametrize("text", ["", ".a |", ".a[", "map(.x)", ".a as $x | $x", "@tsv", "(.a", "if .a then 1"])
def test_a_filter_beyond_that_is_refused(text: str) -> None:
    with pytest.raises((values.Unreadable, IndexError)):
        values.run("get", [text], "{}")


def test_the_helpers_need_no_tool_but_bash() -> None:
    assert shutil.which("bash"), "bash is needed for these tests and for tools that use the helpers"
