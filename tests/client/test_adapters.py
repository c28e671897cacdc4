"""The adapters, in an environment without their frameworks. tests/client/adapters has the tests with them."""

from __future__ import annotations

import importlib
import sys

import pytest

from tidings import TidingsError

EXTRAS = {
    "google_adk": ("google-adk", "google.adk"),
    "langchain": ("langchain", "langchain"),
    "openai_agents": ("openai-agents", "agents"),
    "pydantic_ai": ("pydantic-ai", "pydantic_ai"),
}
"""The extra and the module that each adapter needs."""


@pytest.mark.parametrize("adapter", EXTRAS)
def test_adapter_without_its_framework_names_the_extra(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    extra, module = EXTRAS[adapter]
    monkeypatch.delitem(sys.modules, f"tidings.client.adapters.{adapter}", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TidingsError, match=f'adapters.{adapter} needs the extra "{extra}"'):
        importlib.import_module(f"tidings.client.adapters.{adapter}")
