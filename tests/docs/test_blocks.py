"""The runner of the pages finds what is wrong on a page."""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path

import pytest

from tests.support.doc_blocks import Session, read_blocks


def run(folder: Path, text: str) -> None:
    page = folder / "page.md"
    page.write_text(text)
    with Session.open(folder) as session:
        for block in read_blocks(page):
            session.run(block)


@pytest.mark.parametrize(
    "page",
    [
        "```console\n$ echo 12:30:00 port 8765\n11:22:33 port 8765\n```\n",
        "```console\n$ printf 'a\\nb\\nc\\n'\na\n…\n```\n",
        "```console\n$ echo one\none\n$ echo two three\ntwo …\n```\n",
        "<!-- file: a.txt -->\n```text\nhello\n```\n```console\n$ cat a.txt\nhello\n```\n",
        "<!-- terminal: one -->\n```console\n$ echo a; echo b; sleep 100\na\n```\n"
        "<!-- terminal: one -->\n```console\nb\n```\n",
        "<!-- setup python\nx = 1\n-->\n```python\nassert x == 1\n```\n",
        "```python\nimport asyncio\nawait asyncio.to_thread(print)\n```\n",
        "<!-- not run: it fails -->\n```sh\nfalse\n```\n",
    ],
)
def test_true_pages_pass(page: str, tmp_path: Path) -> None:
    run(tmp_path, page)


@pytest.mark.parametrize(
    "page",
    [
        "```console\n$ echo one\ntwo\n```\n",
        "```console\n$ echo one\n```\n",
        "```console\n$ true\none\n```\n",
        "```console\n$ false\n```\n",
        "```sh\nfalse\n```\n",
        "<!-- terminal: one -->\n```console\n$ echo a\nb\n```\n",
        "```python\nassert False\n```\n",
    ],
)
def test_false_pages_fail(page: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        run(tmp_path, page)


def test_servers_of_a_page_are_closed_if_a_block_fails(tmp_path: Path) -> None:
    page = """
<!-- setup python
from pathlib import Path
cleanup.callback(Path("closed").touch)
-->
```python
import asyncio

started = asyncio.Event()

async def wait():
    started.set()
    try:
        await asyncio.Event().wait()
    finally:
        assert not Path("closed").exists()

waiting = asyncio.create_task(wait())
await started.wait()
assert False, "broken"
```
"""
    with chdir(tmp_path), pytest.raises(AssertionError, match="broken"):
        run(tmp_path, page)
    assert (tmp_path / "closed").exists()
