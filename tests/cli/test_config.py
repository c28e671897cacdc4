from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from tests.support.command import tidings
from tidings.client.hosts import HOSTS


@pytest.mark.parametrize("client", HOSTS)
@pytest.mark.parametrize(
    "options", [[], ["--http", "http://127.0.0.1:8765/mcp"], ["--http", "https://x/mcp", "--auth"]]
)
def test_config_prints_settings_that_the_client_can_read(client: str, options: list[str], tmp_path: Path) -> None:
    folder = tmp_path / 'a "b" \\ ü'
    folder.mkdir()
    command = ["config", folder, "--client", client, "--name", "it", *options]

    printed = tidings(*command)

    assert printed.status == 0
    settings = tomllib.loads(printed.stdout) if client == "codex" else json.loads(printed.stdout)
    entry = settings[HOSTS[client].member]["it"]
    text = json.dumps(entry, ensure_ascii=False)
    if options:
        assert options[1] in text
        assert ("Bearer" in text or "bearer_token_env_var" in text) is ("--auth" in options)
    else:
        words = entry["command"] if client == "opencode" else [entry["command"], *entry["args"]]
        assert words[-3:] == ["serve", str(folder), "--stdio"]
        assert Path(words[0]).is_absolute()
    assert printed.stderr.startswith("For ")
    as_json = json.loads(tidings(*command, "--json").stdout)
    assert as_json["settings"] == settings
    assert as_json["where"] in printed.stderr


@pytest.mark.parametrize(("options", "message"), [(["--auth"], "--http"), (["--http", "localhost"], "whole URL")])
def test_config_refuses_contradictory_options(board: Path, options: list[str], message: str) -> None:
    tidings("config", board, "--client", "cursor", *options).check_error(message)
