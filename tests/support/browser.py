"""Chromium, which Playwright drives, for the tests of the console's page."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright, expect

from tests.support.waiting import DEADLINE

__all__ = ["chromium", "needs_browser", "open_page"]

CHROMIUM = Path(os.environ.get("TIDINGS_CHROMIUM", "/usr/bin/chromium"))
OPTIONS = [
    "--no-sandbox",  # it refuses to run as root with one
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

needs_browser = pytest.mark.skipif(
    not CHROMIUM.exists(), reason=f"needs {CHROMIUM}: install Chromium, or name it in TIDINGS_CHROMIUM"
)

expect.set_options(timeout=DEADLINE * 1000)


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        await browser.close()


@asynccontextmanager
async def open_page(browser: Browser, url: str, *, is_interrupted: bool = False, **options: Any) -> AsyncIterator[Page]:
    """Open a page in a context of its own, with the options of that context.

    At the end, check that the page had no error or warning, that nothing was refused by the Content-Security-Policy,
    and that it asked no other host. With `is_interrupted`, requests may have failed.
    """
    context = await browser.new_context(**options)
    context.set_default_timeout(DEADLINE * 1000)
    page = await context.new_page()
    problems: list[str] = []
    hosts: set[str] = set()

    def note(message: ConsoleMessage) -> None:
        url = message.location["url"]
        # Chromium without a window may ask for this file, whatever icon the page names.
        failed = "Failed to load resource" in message.text and (is_interrupted or url.endswith("/favicon.ico"))
        if message.type in ("error", "warning") and not failed:
            problems.append(f"{message.text} ({url})")

    page.on("console", note)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    await page.goto(url)
    yield page
    hosts.discard("")  # images in `data:` URLs
    await context.close()
    assert not problems, problems
    assert hosts == {urlsplit(url).netloc}, hosts
