"""Make docs/recording.svg, the picture in README.md: `make screenshot`, or `python docs/recording.py [FILE]`.

Runs two real servers and two real clients of the SDK in one folder, saves a tool, and draws what they print, line by
line, at the time at which they printed it. The servers differ in two lines. Only the title, the names of the panes, the
prompts and the bar at the bottom are not output.

The picture is an SVG that moves with CSS only, so that it also moves in an `<img>`. It ends with a still that has every
line, and shows only that to readers who prefer reduced motion.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

PICTURE = Path(__file__).with_name("recording.svg")
DEADLINE = 60.0
BEFORE, AFTER = 1.5, 3.0
"""Seconds between the last client that listens and the saved file, and between the notification and the end."""
STILL = 6.0
"""Seconds for which the end is shown before it starts again."""

WITHOUT = """\
import runpy
import sys
from pathlib import Path
from threading import Thread
from time import sleep
from mcp.server.mcpserver import MCPServer

mcp = MCPServer("board", log_level="WARNING")
added = set()

@mcp.tool()
def greet() -> str:
    return "Hello!"

def add_tools() -> None:
    while True:
        for path in Path("tools").glob("*.py"):
            tool = runpy.run_path(str(path)).get(path.stem)
            if tool and path not in added:
                added.add(path)
                print(f"server: add_tool({path.stem})", file=sys.stderr, flush=True)
                mcp.add_tool(tool)
        sleep(0.05)

Thread(target=add_tools, daemon=True).start()
mcp.run()
"""
WITH = WITHOUT.replace("import MCPServer\n", "import MCPServer\nfrom tidings import Live\n").replace(
    '"WARNING")\n', '"WARNING")\nlive = Live(mcp)\n'
)

CLIENT = """\
import asyncio
import sys
from time import monotonic
from mcp import Client, StdioServerParameters

async def main() -> None:
    server = StdioServerParameters(command=sys.executable, args=sys.argv[1:])
    async with Client(server) as client, client.listen(tools_list_changed=True) as events:

        async def tools() -> str:
            return ", ".join(tool.name for tool in (await client.list_tools(cache_mode="bypass")).tools)

        async def follow() -> None:
            nonlocal count
            async for _ in events:
                count += 1
                print("client: notified: the list of tools changed")
                print("client: tools:", await tools())

        count, start = 0, monotonic()
        print("client: tools:", await tools())
        print("client: listening (Enter ends)")
        following = asyncio.create_task(follow())
        await asyncio.to_thread(sys.stdin.readline)
        following.cancel()
        print(f"client: notifications in {monotonic() - start:.1f} s: {count}")
        print("client: asks the server; tools:", await tools())

asyncio.run(main())
"""

TOOL = """echo 'def hello() -> str: return "hi"' > tools/hello.py"""


@dataclass
class Pane:
    """The lines of a terminal, each with its time."""

    lines: list[tuple[float, str]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, line: str) -> None:
        self.lines.append((time.monotonic(), line))
        self.changed.set()

    async def until(self, start: str) -> None:
        async with asyncio.timeout(DEADLINE):
            while not any(line.startswith(start) for _, line in self.lines):
                self.changed.clear()
                await self.changed.wait()

    async def run(self, command: str, folder: Path) -> asyncio.subprocess.Process:
        """Start a command, and add its lines as they come."""
        self.add(f"$ {command}")
        # `exec`, so that kill() reaches the client and not only its shell.
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        process = await asyncio.create_subprocess_shell(
            f"exec {command}" if command.startswith("python ") else command,
            cwd=folder,
            env={**os.environ, "PATH": programs, "PYTHONUNBUFFERED": "1"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        self._reader = asyncio.create_task(self._read(process))
        return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self.add(line.decode().rstrip())

    async def wait(self, process: asyncio.subprocess.Process) -> None:
        """Wait until the command has ended, and until all that it printed was read."""
        async with asyncio.timeout(DEADLINE):
            await process.wait()
            await self._reader


async def record(folder: Path) -> tuple[Pane, Pane, Pane]:
    """Return what the shell, the client of the plain server and the client of the live server print."""
    for name, text in {"without.py": WITHOUT, "with.py": WITH, "listen.py": CLIENT}.items():
        (folder / name).write_text(text)
    (folder / "tools").mkdir()
    shell, without, with_tidings = Pane(), Pane(), Pane()
    await shell.wait(await shell.run("diff without.py with.py", folder))
    clients = []
    try:
        for pane, server in ((without, "without.py"), (with_tidings, "with.py")):
            clients.append(await pane.run(f"python listen.py {server}", folder))
        for pane in (without, with_tidings):
            await pane.until("client: listening")
        await asyncio.sleep(BEFORE)
        await shell.wait(await shell.run(TOOL, folder))
        await with_tidings.until("client: tools: greet, hello")
        await without.until("server: add_tool(hello)")
        await asyncio.sleep(AFTER)
        for client in clients:
            assert client.stdin is not None
            client.stdin.write(b"\n")
        for pane, client in zip((without, with_tidings), clients, strict=True):
            await pane.wait(client)
    finally:
        for client in clients:
            if client.returncode is None:
                client.kill()
                await client.wait()
    for pane in (without, with_tidings):
        assert pane.lines[-1][1] == "client: asks the server; tools: greet, hello", pane.lines
    return shell, without, with_tidings


WIDTH, LINE, SIZE, MARGIN, GAP = 960, 22, 15, 14, 16

STYLE = f"""
svg {{ color-scheme: light dark; --page: #f6f8fa; --pane: #ffffff; --edge: #d0d7de; --text: #1f2328; --dim: #59636e;
  --bad: #b42318; --good: #116329; --mark: #dafbe1; }}
@media (prefers-color-scheme: dark) {{
  svg {{ --page: #0d1117; --pane: #161b22; --edge: #3d444d; --text: #e6edf3; --dim: #9198a1; --bad: #ff9492;
    --good: #4ae168; --mark: #12351f; }}
}}
.page {{ fill: var(--page); stroke: var(--edge); }} .pane {{ fill: var(--pane); stroke: var(--edge); }}
text {{ font: {SIZE}px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  fill: var(--text); white-space: pre; }}
.name {{ font: bold {SIZE}px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }}
.dim {{ fill: var(--dim); }} .bad {{ fill: var(--bad); font-weight: bold; }}
.good {{ fill: var(--good); font-weight: bold; }} .mark {{ fill: var(--mark); }} .bar {{ fill: var(--dim); }}
"""


def style_of(line: str, is_live: bool) -> str:
    if line.startswith("$ "):
        return ""
    if line.startswith(("client: notified:", "> ")):
        return "good"
    if line.startswith("client: notifications in"):
        return "good" if is_live else "bad"
    return "" if line.startswith(("client: tools:", "client: asks")) else "dim"


def draw(shell: Pane, without: Pane, with_tidings: Pane) -> str:
    """Return the picture."""
    every = [at for pane in (shell, without, with_tidings) for at, _ in pane.lines]
    start, length = min(every), max(every) - min(every) + STILL
    keyframes: list[str] = []
    body: list[str] = []

    def appearing(at: float) -> str:
        """Return the attribute of something that appears at a time."""
        share = (at - start) / length * 100
        if share < 1:
            return ""
        name = f"line{len(keyframes)}"
        keyframes.append(
            f"@keyframes {name} {{ 0%, {share:.2f}% {{ opacity: 0 }} {share + 0.01:.2f}%, 100% {{ opacity: 1 }} }}"
        )
        return f' style="animation: {name} {length:.2f}s infinite"'

    def pane(left: int, top: int, width: int, height: int, name: str, of: Pane, is_live: bool) -> None:
        body.append(f'<rect class="pane" x="{left}" y="{top}" width="{width}" height="{height}" rx="8"/>')
        body.append(f'<text class="name" x="{left + MARGIN}" y="{top + 25}">{escape(name)}</text>')
        for number, (at, line) in enumerate(of.lines):
            y = top + 52 + number * LINE
            when = appearing(at)
            kind = style_of(line, is_live)
            if line.startswith("client: notified:"):
                body.append(
                    f'<rect class="mark" x="{left + 1}" y="{y - 16}" width="{width - 2}" height="{LINE}"{when}/>'
                )
            body.append(f'<text class="{kind}" x="{left + MARGIN}" y="{y}"{when}>{escape(line)}</text>')

    rows = max(len(without.lines), len(with_tidings.lines))
    upper = 44 + len(shell.lines) * LINE
    lower = 44 + rows * LINE
    height = GAP * 3 + upper + lower + 8
    pane(
        GAP,
        GAP,
        WIDTH - 2 * GAP,
        upper,
        "The same server, without and with Tidings: a tool is saved while a client listens",
        shell,
        False,
    )
    half = (WIDTH - 3 * GAP) // 2
    pane(GAP, 2 * GAP + upper, half, lower, "Without Tidings", without, False)
    pane(2 * GAP + half, 2 * GAP + upper, half, lower, "With Tidings", with_tidings, True)
    body.append(
        f'<rect class="bar" x="{GAP}" y="{height - 12}" width="{WIDTH - 2 * GAP}" height="3" rx="1.5" '
        f'style="transform-origin: {GAP}px 0; animation: bar {length:.2f}s linear infinite"/>'
    )
    end = (length - STILL) / length * 100
    keyframes.append(f"@keyframes bar {{ 0% {{ transform: scaleX(0) }} {end:.2f}%, 100% {{ transform: scaleX(1) }} }}")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            "<title>A tool is saved. Only the client of the server with Tidings is notified.</title>",
            f"<style>{STYLE}",
            *keyframes,
            "@media (prefers-reduced-motion: reduce) { * { animation: none !important } }",
            "</style>",
            f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10"/>',
            *body,
            "</svg>",
            "",
        ]
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        picture = draw(*asyncio.run(record(Path(folder))))
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    target.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
