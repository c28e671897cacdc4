"""The page of the console in Chromium, with a real server, real clients and real files."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from mcp.client.client import Client
from mcp.server import Server
from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult, Implementation, ListToolsResult, TextContent, Tool
from playwright.async_api import Browser, Locator, Page, expect
from pydantic import BaseModel

from tests.support.browser import chromium, needs_browser, open_page
from tests.support.command import DEADLINE, EXAMPLE, TOKEN, replace_file, serving, start_command
from tests.support.http_server import example_server
from tests.support.receiver import receiving
from tests.support.uvicorn_server import address_of, run_uvicorn
from tests.support.waiting import free_port
from tests.support.wire_clients import LegacyWire, http
from tests.typescript.node import MODULES
from tidings import Live
from tidings.cluster.embedded import EmbeddedNats

__all__ = ["http"]

pytestmark = [pytest.mark.anyio, pytest.mark.browser, needs_browser]

PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}}
HOSTILE = {
    "markup": "<script>document.title = 'owned'</script><img src=x onerror=alert(1)>",
    "long": "x" * 10_000,
    "right-to-left": "\u202egnp.exe \u0627\u0633\u0645",
    "escapes": "\x1b[31mred\x1b[0m\x07\U000e0061",
}


@pytest.fixture(scope="module")
async def browser(anyio_backend: str) -> AsyncIterator[Browser]:
    async with chromium() as browser:
        yield browser


@dataclass
class Served:
    folder: Path
    url: str

    def page(self, view: str) -> str:
        return f"{self.url.removesuffix('/mcp')}/console#/{view}"

    def write(self, path: str, text: str) -> None:
        replace_file(self.folder / path, text)

    @asynccontextmanager
    async def client(self, name: str, **options: Any) -> AsyncIterator[Client]:
        """Connect a client, which listens to the tools if it is a modern one."""
        async with Client(self.url, client_info=Implementation(name=name, version="1.2"), **options) as client:
            if "mode" in options:
                yield client
                return
            async with client.listen(tools_list_changed=True):
                yield client


@asynccontextmanager
async def serving_board(folder: Path, *options: object) -> AsyncIterator[Served]:
    shutil.copytree(EXAMPLE, folder)
    async with start_command("serve", folder, "--port", 0, "--json", "--quiet", *options) as process:
        line = await asyncio.wait_for(process.stdout.readline(), DEADLINE)
        yield Served(folder, json.loads(line)["url"])


@asynccontextmanager
async def serving_live(server: Any) -> AsyncIterator[tuple[Live, str]]:
    """Serve in this process, with a console that may write."""
    live = Live(server)
    async with run_uvicorn(live.http_app(console="write")) as running:
        try:
            yield live, f"http://127.0.0.1:{address_of(running)[1]}"
        finally:
            live.stop()


@pytest.fixture(scope="module")
async def server(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """A server whose console may write, for all tests that need no server of their own."""
    async with serving_board(tmp_path_factory.mktemp("served") / "board", "--console=write") as served:
        yield served


def row(page: Page, table: str, text: str | re.Pattern[str]) -> Locator:
    """Return the first row of a table that contains a text."""
    return page.get_by_role("table", name=table, exact=True).locator("tbody tr").filter(has_text=text).first


def tool(name: str, description: str) -> str:
    return f'def {name}(text: str, times: int = 1) -> str:\n    """{description}"""\n    return text * times\n'


async def test_a_changed_file_appears_with_its_fields_and_what_became_of_it_for_each_client(
    browser: Browser, server: Served, http: Any
) -> None:
    server.write("tools/shout.py", tool("shout", "Say it."))
    old = LegacyWire(server.url, http, "2025-03-26")
    await old.shake_hands()
    async with (
        server.client("reader") as reader,
        server.client("sleeper"),
        old.stream(),
        open_page(browser, server.page("changes")) as page,
    ):
        await expect(row(page, "Changes", "added shout")).to_be_visible()
        await expect(row(page, "Clients", "reader")).to_have_count(0)
        server.write("tools/shout.py", tool("shout", "Say it loudly."))
        changed = row(page, "Changes", re.compile("updated shout.*description"))
        await changed.click()
        detail = page.get_by_role("complementary", name="Change")
        await expect(detail.locator("ins")).to_have_text(" loudly")
        await expect(detail.get_by_label("Before")).to_contain_text("Say it.")
        await expect(detail.get_by_role("list", name="Delivery")).to_contain_text(
            re.compile(r"workspace.*Digest.*told")
        )

        await reader.list_tools(cache_mode="bypass")
        await expect(row(page, "Deliveries", "reader")).to_contain_text(re.compile(r"told.*s.*after .* [µm]?s"))
        await expect(row(page, "Deliveries", "sleeper")).to_contain_text(re.compile(r"told.*not yet"))
        await detail.get_by_role("button", name="suppressed").click()
        await expect(row(page, "Deliveries", "suppressed")).to_contain_text("muted")
        await expect(row(page, "Deliveries", "reader")).to_have_count(0)


async def test_only_changes_that_a_client_was_told_of_and_never_fetched(browser: Browser, server: Served) -> None:
    async with (
        server.client("idle") as client,
        open_page(browser, server.page("changes?notFetched=1&text=forgotten")) as page,
    ):
        server.write("tools/forgotten.py", tool("forgotten", "Nobody fetches this."))
        await expect(row(page, "Changes", "forgotten")).to_be_visible()  # after 30 seconds
        await row(page, "Changes", "forgotten").click()
        await page.get_by_role("button", name="not refetched").click()
        await expect(row(page, "Deliveries", "idle")).to_contain_text("not in 30 s")
        await page.get_by_label("Told but never refetched").uncheck()
        await client.list_tools(cache_mode="bypass")
        await page.get_by_role("searchbox").fill("no such change")
        await expect(page.get_by_text("No change matches.")).to_be_visible()


async def test_clients_can_be_searched_sorted_opened_and_ended(browser: Browser, server: Served) -> None:
    async with (
        server.client("alpha") as alpha,
        server.client("beta", mode="legacy"),
        open_page(browser, server.page("clients")) as page,
    ):
        await expect(row(page, "Clients", "alpha")).to_contain_text(re.compile(r"alpha\s*1\.2\s*modern\s*http"))
        await expect(row(page, "Clients", "beta")).to_contain_text(re.compile(r"beta\s*1\.2\s*legacy\s*http"))
        await page.get_by_role("columnheader", name="Name").get_by_role("button").click()
        await expect(page.get_by_role("columnheader", name="Name")).to_have_attribute("aria-sort", "descending")
        names = await page.get_by_role("table", name="Clients").locator("tbody td:first-child").all_inner_texts()
        assert names == sorted(names, reverse=True)
        await page.get_by_role("searchbox").fill("ALPH")
        await expect(row(page, "Clients", "beta")).to_have_count(0)

        await row(page, "Clients", "alpha").click()
        detail = page.get_by_role("complementary", name="Client")
        await expect(detail).to_contain_text("2026-07-28 (modern)")
        await expect(row(page, "Topics of the client", "tools")).to_contain_text("current")
        server.write("tools/told.py", tool("told", "Tell the client."))
        await expect(row(page, "Last deliveries", "tools")).to_be_visible()
        await detail.get_by_role("link", name="What does this client see?").click()
        await expect(row(page, "Items that the client sees", "add_task")).to_be_visible()
        server.write("tools/seen.py", tool("seen", "Appear in the list."))
        await expect(row(page, "Items that the client sees", "seen")).to_be_visible()

        await detail.get_by_role("button", name="End stream").click()
        await detail.get_by_role("button", name="End it").click()
        await expect(detail.get_by_text("This client is no longer connected.")).to_be_visible()
        assert (await alpha.list_tools()).tools  # only the stream ended


async def test_items_show_their_history_and_are_used_with_a_form(browser: Browser, server: Served) -> None:
    async with open_page(browser, server.page("catalog/tools")) as page:
        server.write("tools/repeat.py", tool("repeat", "Say it again."))
        await expect(row(page, "Items: tools", "repeat")).to_be_visible()
        server.write("tools/repeat.py", tool("repeat", "Say it again and again."))
        await expect(row(page, "Items: tools", "again and again")).to_be_visible()
        await page.get_by_role("searchbox").fill("repea")
        await row(page, "Items: tools", "repeat").click()
        detail = page.get_by_role("complementary", name="Item")
        await expect(detail.locator("ins").first).to_have_text(" and again")
        await expect(detail.get_by_label("Definition")).to_contain_text('"inputSchema"')
        async with server.client("watcher"):
            await expect(row(page, "Clients that watch the item", "watcher")).to_be_visible()
        await expect(row(page, "Clients that watch the item", "watcher")).to_have_count(0)

        await detail.get_by_label("text").fill("ha")
        await detail.get_by_label("times").fill("3")
        await detail.get_by_role("button", name="Call").click()
        await expect(detail.get_by_role("region", name="Result")).to_contain_text("hahaha")

        await page.get_by_role("button", name="prompts").click()
        await expect(page.get_by_role("table", name="Items: prompts")).to_be_visible()  # with its own search field
        await page.get_by_role("searchbox").fill("")
        await row(page, "Items: prompts", "plan").click()
        await detail.get_by_label("days").fill("14")
        await detail.get_by_role("button", name="Get").click()
        await expect(detail.get_by_role("region", name="Result")).to_contain_text("a sprint of 14 days")

        await page.get_by_role("button", name="resources").click()
        await row(page, "Items: resources", "sprint").click()
        await expect(detail.get_by_label("URI")).to_have_value("workspace:///sprint.md")
        await detail.get_by_role("button", name="Read").click()
        await expect(detail.get_by_role("region", name="Result")).to_be_visible()


class Owner(BaseModel):
    name: str
    age: int | None = None


def send(
    title: str,
    kind: Literal["note", "task"],
    owner: Owner,
    tags: list[str] | None = None,
    urgent: bool = False,
    more: dict[str, int] | None = None,
) -> str:
    return json.dumps({"title": title, "kind": kind, "owner": owner.name, "tags": tags, "urgent": urgent, "more": more})


async def test_a_form_has_a_field_for_each_kind_of_argument(browser: Browser) -> None:
    server: Any = MCPServer("forms", log_level="CRITICAL")
    server.add_tool(send)
    async with serving_live(server) as (_, url), open_page(browser, f"{url}/console#/catalog/tools/send") as page:
        detail = page.get_by_role("complementary", name="Item")
        result = detail.get_by_role("region", name="Result")
        await detail.get_by_label("Title").fill("Tidy up")
        await detail.get_by_label("Kind").select_option("task")
        await detail.get_by_role("group", name="Owner").get_by_label("Name").fill("Ada")
        await detail.get_by_label("Tags").fill("home\ngarden")
        await detail.get_by_label("Urgent").select_option("true")
        await detail.get_by_label("More").fill("{")
        await detail.get_by_role("button", name="Call").click()
        await expect(detail.get_by_role("alert")).to_have_text("more: this is not valid JSON.")
        await detail.get_by_label("More").fill('{"a": 1}')
        await detail.get_by_role("button", name="Call").click()
        sent = {"title": "Tidy up", "kind": "task", "owner": "Ada", "tags": ["home", "garden"], "urgent": True}
        await expect(result).to_contain_text(json.dumps(sent | {"more": {"a": 1}}))
        await detail.get_by_role("button", name="JSON").click()
        arguments = detail.get_by_label("Arguments as JSON")
        assert json.loads(await arguments.input_value())["tags"] == ["home", "garden"]
        await arguments.fill('{"title": 1}')
        await detail.get_by_role("button", name="Call").click()
        await expect(result).to_contain_text("The tool failed")


WIDE = {f"p{number}": {"$ref": "#/$defs/wide"} for number in range(20)}


@pytest.mark.parametrize(
    "schema",
    [{"properties": {"a": None}}, {"required": 5}, {"properties": {"a": {"enum": "abc"}}}, {"properties": WIDE}],
    ids=["property", "required", "enum", "recursive"],
)
async def test_the_arguments_of_a_schema_without_a_form_are_written_as_json(browser: Browser, schema: Any) -> None:
    defined = {"type": "object", "$defs": {"wide": {"type": "object", "properties": WIDE}}} | schema

    async def list_tools(context: Any, params: Any) -> ListToolsResult:
        return ListToolsResult(tools=[Tool(name="odd", input_schema=defined)])

    async def call_tool(context: Any, params: Any) -> CallToolResult:
        return CallToolResult(content=[TextContent(text=json.dumps(params.arguments))])

    server = Server("odd", on_list_tools=list_tools, on_call_tool=call_tool)
    async with serving_live(server) as (_, url), open_page(browser, f"{url}/console#/catalog/tools/odd") as page:
        await page.get_by_label("Arguments as JSON").fill('{"a": 7}')
        await page.get_by_role("button", name="Call").click()
        await expect(page.get_by_role("region", name="Result")).to_contain_text('{"a": 7}')


async def test_the_overview_shows_streams_rates_and_a_problem_by_file_and_line(
    browser: Browser, server: Served
) -> None:
    async with server.client("counted"), open_page(browser, server.page("overview")) as page:
        server.write("tools/broken.py", "def broken(:\n")
        await expect(row(page, "Problems", "tools/broken.py:1")).to_be_visible()
        (server.folder / "tools/broken.py").unlink()
        await expect(page.get_by_text("No problem.")).to_be_visible()
        server.write("tools/counted.py", tool("counted", "Count."))
        await expect(page.locator(".tile", has_text="Deliveries per second")).to_contain_text(
            re.compile(r"[1-9].* since")
        )
        await expect(page.locator(".tile", has_text="Latency, median")).to_contain_text(re.compile(r"\d [µm]?s"))
        await expect(page.get_by_role("img", name="Deliveries per second: now")).to_be_visible()
        await page.locator(".tile", has_text="Clients").get_by_role("link").click()
        await expect(row(page, "Clients", "counted")).to_be_visible()


async def test_the_overview_shows_a_webhook_that_fails(browser: Browser) -> None:
    async with receiving() as receiver, serving_live(example_server()) as (live, url):
        receiver.answers(500)
        live.webhooks.put("ci", receiver.url, "tools")
        async with open_page(browser, f"{url}/console#/overview") as page:
            await expect(row(page, "Webhooks", "ci")).to_contain_text("active")
            live.server.add_tool(lambda: "", name="new")
            await expect(row(page, "Webhooks", "ci")).to_contain_text(re.compile(r"retrying.*[1-9].*500"))
            await expect(page.locator(".tile", has_text="Failures")).to_contain_text(re.compile("webhook [1-9]"))


async def test_the_overview_shows_each_replica_with_its_digests(browser: Browser, tmp_path: Path) -> None:
    with EmbeddedNats() as nats:
        async with (
            serving_board(tmp_path / "board", "--nats", nats.url) as server,
            serving(server.folder, "--nats", nats.url),
            open_page(browser, server.page("overview")) as page,
        ):
            await expect(page.get_by_role("table", name="Replicas").locator("tbody tr")).to_have_count(2)
            await expect(row(page, "Replicas", "this one")).to_be_visible()
            await expect(row(page, "Replicas", "differs")).to_have_count(0)


async def test_hostile_names_are_only_text(browser: Browser, server: Served) -> None:
    for number, text in enumerate(HOSTILE.values()):
        server.write(f"tools/hostile{number}.py", f"def hostile{number}() -> str:\n    return ''\n")
        server.write(f"tools/hostile{number}.meta.json", f'{{"description": {json.dumps(text)}}}')
    names = list(HOSTILE.values())
    async with (
        server.client(names[0]),
        server.client(names[1]),
        server.client(names[2]),
        server.client(names[3]),
        open_page(browser, server.page("clients")) as page,
    ):
        await expect(row(page, "Clients", "<script>document.title")).to_be_visible()
        await expect(row(page, "Clients", r"\u202egnp.exe")).to_be_visible()
        await expect(row(page, "Clients", r"\x1b[31mred\x1b[0m\x07\u{e0061}")).to_be_visible()
        await row(page, "Clients", "x" * 100).click()
        await expect(page.get_by_role("complementary", name="Client").get_by_role("heading").first).to_contain_text(
            "xxx"
        )
        await page.goto(server.page("catalog/tools/hostile0"))
        await expect(page.get_by_role("complementary", name="Item")).to_contain_text("<img src=x onerror=alert(1)>")
        await page.goto(server.page("changes?text=hostile3"))
        await row(page, "Changes", "hostile").click()
        await expect(page.get_by_role("complementary", name="Change")).to_contain_text(r"\x1b[31mred")
        assert await page.title() != "owned"
        assert await page.locator("script").count() == 2
        assert await page.locator("#app img, #app [style*=url]").count() == 0
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


async def test_the_page_says_that_it_is_disconnected_and_reconnects(browser: Browser, tmp_path: Path) -> None:
    folder = shutil.copytree(EXAMPLE, tmp_path / "board")
    port = free_port()
    options = ("--port", port, "--console=read")
    async with serving(folder, *options) as first:
        served = Served(folder, first.url)
        async with open_page(browser, served.page("catalog/tools"), is_interrupted=True) as page:
            await expect(page.locator(".status")).to_have_text("Live")
            await expect(row(page, "Items: tools", "add_task")).to_be_visible()
            first.process.send_signal(signal.SIGTERM)
            await first.process.wait()
            await expect(page.get_by_role("alert")).to_contain_text("Disconnected from the server")
            await expect(page.locator(".status")).to_have_text(re.compile("Disconnected|Connecting"))
            await expect(row(page, "Items: tools", "add_task")).to_be_visible()  # what was known stays
            (folder / "tools" / "later.py").write_text(tool("later", "Came while the page was alone."))
            async with serving(folder, *options):
                await expect(row(page, "Items: tools", "later")).to_be_visible()
                await expect(page.locator(".status")).to_have_text("Live")
                await expect(page.get_by_role("alert")).to_have_count(0)
                await row(page, "Items: tools", "later").click()
                await expect(page.get_by_text("The console is read-only.")).to_be_visible()


async def test_failed_load_is_repeated_after_a_reconnection(browser: Browser, server: Served) -> None:
    async with open_page(browser, server.page("overview"), is_interrupted=True) as page:
        await expect(page.locator(".status")).to_have_text("Live")
        await page.route("**/api/catalog", lambda route: route.abort())
        await page.goto(server.page("catalog/tools"))
        await expect(page.get_by_text("The server does not answer. The page tries again.")).to_be_visible()
        await page.unroute("**/api/catalog")
        await page.evaluate("dispatchEvent(new Event('online'))")  # the page reconnects
        await expect(row(page, "Items: tools", "add_task")).to_be_visible()


async def test_a_console_with_a_token_asks_for_it(browser: Browser, tmp_path: Path) -> None:
    async with (
        serving_board(tmp_path / "board", "--console=read", "--auth-token", TOKEN) as server,
        open_page(browser, server.page("clients"), is_interrupted=True) as page,
    ):
        await page.get_by_label("Token").fill("wrong")
        await page.get_by_role("button", name="Sign in").click()
        await expect(page.get_by_role("alert")).to_be_visible()
        await page.get_by_label("Token").fill(TOKEN)
        await page.get_by_role("button", name="Sign in").click()
        await expect(page.locator(".status")).to_have_text("Live")
        await expect(page.get_by_role("table", name="Clients")).to_be_visible()  # the view of the first address
        await page.get_by_role("button", name="Sign out").click()
        await expect(page.get_by_label("Token")).to_be_visible()


async def test_the_keyboard_reaches_everything(browser: Browser, server: Served) -> None:
    async with server.client("typed"), open_page(browser, server.page("overview")) as page:
        await expect(page.locator(".status")).to_have_text("Live")
        keys = page.keyboard
        await keys.press("?")
        await expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_contain_text("Search in the view")
        await keys.press("Escape")
        await expect(page.get_by_role("dialog")).to_have_count(0)
        for key, view in {"2": "Changes", "3": "Clients", "4": "Items: tools"}.items():
            await keys.press(key)
            await expect(page.get_by_role("table", name=view)).to_be_visible()
        await keys.press("/")
        await keys.type("add_")
        await expect(page.get_by_role("status").filter(has_text="1 item")).to_be_visible()
        await keys.press("Escape")
        await keys.press("j")
        await keys.press("Enter")
        detail = page.get_by_role("complementary", name="Item")
        await expect(detail.get_by_role("heading", name="add_task", exact=True)).to_be_visible()
        await keys.press("Escape")
        await expect(detail).to_have_count(0)
        ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        await keys.press("t")
        await keys.press("t")  # from the theme of the system to light to dark
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") != ground
        await page.reload()
        assert await page.evaluate("document.documentElement.dataset.theme") == "dark"


async def test_tables_are_copied_as_tab_separated_text(browser: Browser, server: Served) -> None:
    permissions = ["clipboard-read", "clipboard-write"]
    async with (
        server.client("a\tb"),
        open_page(browser, server.page("clients"), permissions=permissions) as page,
    ):
        await expect(row(page, "Clients", "a b")).to_be_visible()
        await page.keyboard.press("c")
        await expect(page.get_by_role("status").filter(has_text="Copied")).to_be_visible()
        head, *lines = (await page.evaluate("navigator.clipboard.readText()")).splitlines()
        assert head.split("\t")[:4] == ["Name", "Version", "Era", "Transport"]
        assert ["a b", "1.2", "modern", "http"] in [line.split("\t")[:4] for line in lines]


@pytest.mark.parametrize("view", ["overview", "changes", "changes/1", "clients", "catalog/tools/add_task"])
async def test_a_phone_shows_one_column_that_fits(browser: Browser, server: Served, view: str) -> None:
    server.write("tools/phone.py", tool("phone", "Ring."))  # the first change, if no other test ran
    async with server.client("phone"), open_page(browser, server.page(view), **PHONE) as page:
        await expect(page.locator(".status")).to_have_text("Live")
        await expect(page.get_by_role("table").first).to_be_visible()
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390
        assert await page.evaluate("document.querySelector('main').scrollWidth") <= 390
        for head in await page.locator("th:first-child:visible").all():
            box = await head.bounding_box()
            assert box is not None
            assert box["width"] > 60, await head.inner_text()


@pytest.fixture(scope="module")
def axe() -> str:
    """The script of axe, which checks accessibility."""
    script = MODULES / "axe-core" / "axe.min.js"
    if not script.exists():
        pytest.skip("needs npm packages: run `npm ci` in tests/typescript")
    return script.read_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_no_violation(browser: Browser, server: Served, axe: str, scheme: str) -> None:
    server.write("tools/broken.py", "def broken(:\n")
    async with (
        server.client("axe"),
        open_page(browser, server.page("overview"), color_scheme=scheme) as page,
    ):
        await page.evaluate(axe)  # a script of `evaluate` does not fall under the policy of the page
        await expect(row(page, "Problems", "tools/broken.py:1")).to_be_visible()
        (server.folder / "tools/broken.py").unlink()
        await check_accessibility(page)
        await page.keyboard.press("?")
        await check_accessibility(page)
        await page.keyboard.press("Escape")
        for view, table in {"changes": "Changes", "clients": "Clients", "catalog/tools": "Items: tools"}.items():
            await page.goto(server.page(view))
            table_row = page.get_by_role("table", name=table).locator("tbody tr").first
            await expect(table_row).to_be_visible()
            await check_accessibility(page)
            await table_row.click()
            await expect(page.get_by_role("complementary").locator(".body")).to_be_visible()
            await check_accessibility(page)


async def check_accessibility(page: Page) -> None:
    found = await page.evaluate("axe.run()")
    summary = [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found["violations"]]
    assert summary == []


CLIENTS, ITEMS = 5_000, 10_000
SCROLL = """async () => {
  const scroller = document.querySelector(".filling .scroller");
  let rows = 0;
  for (let step = 0; step < 100; step++) {
    scroller.scrollTop += step % 10 === 9 ? 10_000 : 300;
    await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
    rows = Math.max(rows, scroller.querySelectorAll("tr").length);
  }
  return rows;
}"""
"""Scrolls to all parts of the table, a frame for each step, and returns how many rows there were at most."""


@pytest.mark.alone
async def test_thousands_of_clients_and_items_scroll_without_a_long_task(
    browser: Browser, request: pytest.FixtureRequest
) -> None:
    server: Any = MCPServer("large", log_level="CRITICAL")
    for number in range(ITEMS):
        server.add_tool(example_tool, name=f"tool_{number}")
    async with AsyncExitStack() as stack:
        live, url = await stack.enter_async_context(serving_live(server))
        for _ in range(CLIENTS):
            await stack.enter_async_context(live.listen("tools"))
        for view, count in {"catalog/tools": f"{ITEMS:,} items", "clients": f"{CLIENTS:,} clients"}.items():
            async with open_page(browser, f"{url}/console#/{view}") as page:
                await expect(page.get_by_role("status").filter(has_text=count)).to_be_visible()
                server.add_tool(example_tool, name=f"new_{view}")  # each client is told meanwhile
                await browser.start_tracing(page=page, categories=["toplevel"])
                rows = await page.evaluate(SCROLL)
                longest = longest_task(json.loads(await browser.stop_tracing())["traceEvents"])
                text = f"{view}: at most {rows} rows in the page; the longest task took {longest:.0f} ms of CPU"
                request.node.add_report_section("call", view, text)  # -rP shows it
                assert rows < 100
                assert longest < 100


def example_tool(text: str) -> str:
    """Do something with a text."""
    return text


def longest_task(events: list[Any]) -> float:
    """Return the milliseconds of CPU of the longest task of a page: a busy machine makes all tasks last longer."""
    threads = {
        (event["pid"], event["tid"])
        for event in events
        if event.get("name") == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    tasks = [
        event["tdur"] / 1000
        for event in events
        if event.get("name") in ("RunTask", "ThreadControllerImpl::RunTask")
        and (event["pid"], event["tid"]) in threads
        and "tdur" in event
    ]
    assert tasks
    return float(max(tasks))
