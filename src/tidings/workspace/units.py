"""What a unit of a workspace gives: items, each with its definition and with what serves it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp.server.mcpserver.prompts.base import Prompt
from mcp.server.mcpserver.resources import ResourceTemplate
from mcp.server.mcpserver.tools.base import Tool

from tidings.model import Feature
from tidings.sources.definitions import dump, key_of, shown

__all__ = ["Piece", "piece_of"]


@dataclass(frozen=True, slots=True)
class Piece:
    feature: Feature
    key: str
    definition: dict[str, Any]
    component: Any
    """What the SDK's high-level server keeps in its registry."""
    etag: str | None = None
    """Of a resource's content."""
    files: tuple[Path, ...] = ()
    """What it is made of, whether or not it lies in the unit: a change of any may make it another one."""

    @property
    def registry(self) -> str:
        """The name of that registry."""
        return "templates" if isinstance(self.component, ResourceTemplate) else self.feature.value


def piece_of(component: Any, *, etag: str | None = None, files: tuple[Path, ...] = ()) -> Piece:
    feature = Feature.RESOURCES
    if isinstance(component, Tool):
        feature = Feature.TOOLS
    elif isinstance(component, Prompt):
        feature = Feature.PROMPTS
    return Piece(feature, key_of(component), dump(shown(component)), component, etag, files)
