"""Make the pictures in docs/console.md: `make screenshot`, or `python docs/console_screenshots.py [FOLDER]`.

Runs the real `tidings serve`, connects clients, changes files, and takes pictures of the console in Chromium, in light
and in dark. The browser is /usr/bin/chromium, or the one that TIDINGS_CHROMIUM names.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from mcp.client.client import Client
from mcp_types import Implementation
from playwright.async_api import Browser, Page, async_playwright, expect

CHROMIUM = os.environ.get("TIDINGS_CHROMIUM", "/usr/bin/chromium")
DEADLINE = 60.0
SIZE = {"width": 1120, "height": 640}
PHONE = {"width": 390, "height": 640}
TIDINGS = Path(sys.executable).with_name("tidings")

CLIENTS = [("claude-code", "2.1.40"), ("cursor", "3.2"), ("inspector", "1.4"), ("release-bot", "0.9")]
OLD_CLIENTS = [("desk", "1.0"), ("editor", "5.11")]

FORECAST = '''def forecast(city: str, days: int = {days}) -> str:
    """{description}"""
    return f"{{city}}: sunny for {{days}} days"
'''


@asynccontextmanager
async def serving(workspace: Path) -> AsyncIterator[str]:
    """Serve a workspace, and return the URL of its endpoint."""
    process = await asyncio.create_subprocess_exec(
        *(TIDINGS, "serve", workspace, "--port", "0", "--console=write", "--quiet", "--json"),
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        url: str = json.loads(await process.stdout.readline())["url"]
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[list[Client]]:
    """Connect the clients; the modern ones listen."""
    async with AsyncExitStack() as stack:
        clients = []
        for name, version in CLIENTS:
            info = Implementation(name=name, version=version)
            client = await stack.enter_async_context(Client(url, client_info=info))
            await stack.enter_async_context(
                client.listen(
                    tools_list_changed=True,
                    prompts_list_changed=name == "cursor",
                    resource_subscriptions=["workspace:///sprint.md"],
                )
            )
            clients.append(client)
        for name, version in OLD_CLIENTS:
            info = Implementation(name=name, version=version)
            clients.append(await stack.enter_async_context(Client(url, client_info=info, mode="legacy")))
        yield clients


async def change(workspace: Path, page: Page, clients: list[Client]) -> None:
    """Change files, and let some clients fetch what changed."""
    tool = workspace / "tools/forecast.py"
    changes = page.get_by_role("table", name="Changes").locator("tbody tr")
    for number, (days, description) in enumerate(
        [(3, "Forecast the weather."), (3, "Forecast the weather of a city."), (7, "Forecast the weather of a city.")]
    ):
        tool.write_text(FORECAST.format(days=days, description=description))
        await expect(changes).to_have_count(2 * number + 1)
        for client in clients[:3]:
            await client.list_tools(cache_mode="bypass")
        await clients[0].call_tool("add_task", {"title": f"Task {number}"})
        await expect(changes).to_have_count(2 * number + 2)
    (workspace / "prompts/review.md").write_text(
        "---\ndescription: Review the sprint\n---\nReview workspace:///sprint.md.\n"
    )
    await expect(changes).to_have_count(7)
    (workspace / "tools/backup.py").write_text("def backup(target: str -> str:\n    return target\n")


async def take(browser: Browser, url: str, folder: Path) -> None:
    """Take the pictures."""
    page = await browser.new_page(viewport=SIZE)
    await page.goto(f"{url}#/changes")
    row = page.get_by_role("table", name="Changes").locator("tbody tr", has_text="updated forecast inputSchema")
    change_id = (await row.locator("a").get_attribute("href") or "").rpartition("/")[2]
    await page.close()
    for scheme in ("light", "dark"):
        context = await browser.new_context(color_scheme=scheme, viewport=SIZE)
        page = await context.new_page()
        await page.goto(f"{url}#/overview")
        await expect(page.get_by_text("tools/backup.py:1")).to_be_visible()
        await page.screenshot(path=folder / f"console-overview-{scheme}.png")
        await page.goto(f"{url}#/changes/{change_id}")
        await expect(page.get_by_role("table", name="Deliveries").locator("tbody tr").first).to_be_visible()
        await page.screenshot(path=folder / f"console-changes-{scheme}.png")
        await page.goto(f"{url}#/clients")
        row = page.get_by_role("table", name="Clients").locator("tbody tr", has_text="claude-code")
        await expect(row).to_be_visible()
        await page.screenshot(path=folder / f"console-clients-{scheme}.png")
        await page.goto(f"{url}#/catalog/tools/forecast")
        await page.get_by_label("city").fill("Lisbon")
        await page.get_by_role("button", name="Call").click()
        await expect(page.get_by_role("region", name="Result")).to_contain_text("sunny")
        await page.screenshot(path=folder / f"console-catalog-{scheme}.png")
        await context.close()
    context = await browser.new_context(viewport=PHONE)
    page = await context.new_page()
    await page.goto(f"{url}#/changes/{change_id}")
    await expect(page.get_by_role("table", name="Deliveries").locator("tbody tr").first).to_be_visible()
    await page.screenshot(path=folder / "console-phone.png")
    await context.close()


async def make(workspace: Path, folder: Path) -> None:
    expect.set_options(timeout=DEADLINE * 1000)
    async with serving(workspace) as endpoint, async_playwright() as playwright:
        url = f"{endpoint.removesuffix('/mcp')}/console"
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"],
        )
        page = await browser.new_page()
        await page.goto(f"{url}#/changes")
        await expect(page.locator(".status")).to_have_text("Live")
        async with connected(endpoint) as clients:
            await change(workspace, page, clients)
            await page.close()
            await take(browser, url, folder)
        await browser.close()


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    temporary = Path(tempfile.mkdtemp())
    try:
        workspace = Path(shutil.copytree(Path(__file__).parents[1] / "examples/workspace", temporary / "board"))
        asyncio.run(make(workspace, folder))
    finally:
        shutil.rmtree(temporary)


if __name__ == "__main__":
    main()
