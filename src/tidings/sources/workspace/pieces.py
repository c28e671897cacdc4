"""What a unit of a workspace gives: items, each with its definition and with what serves it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mcp_types as types
from mcp.server.mcpserver.prompts.base import Prompt
from mcp.server.mcpserver.resources import Resource, ResourceTemplate
from mcp.server.mcpserver.tools.base import Tool
from pydantic import BaseModel

from tidings.model import Feature

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

    @property
    def registry(self) -> str:
        """The name of that registry."""
        return "templates" if isinstance(self.component, ResourceTemplate) else self.feature.value


def piece_of(component: Any, *, etag: str | None = None) -> Piece:
    """A component of the SDK with the definition that its server lists."""
    if isinstance(component, Tool):
        return Piece(
            Feature.TOOLS,
            component.name,
            _dump(
                types.Tool(
                    name=component.name,
                    title=component.title,
                    description=component.description,
                    input_schema=component.parameters,
                    output_schema=component.output_schema,
                    annotations=component.annotations,
                    icons=component.icons,
                    _meta=component.meta,
                )
            ),
            component,
        )
    if isinstance(component, Prompt):
        arguments = [
            types.PromptArgument(name=each.name, description=each.description, required=each.required)
            for each in component.arguments or ()
        ]
        definition = types.Prompt(
            name=component.name,
            title=component.title,
            description=component.description,
            arguments=arguments or None,
            icons=component.icons,
        )
        return Piece(Feature.PROMPTS, component.name, _dump(definition), component)
    if isinstance(component, ResourceTemplate):
        template = types.ResourceTemplate(
            uri_template=component.uri_template,
            name=component.name,
            title=component.title,
            description=component.description,
            mime_type=component.mime_type,
            icons=component.icons,
            annotations=component.annotations,
            _meta=component.meta,
        )
        return Piece(Feature.RESOURCES, component.uri_template, _dump(template), component)
    assert isinstance(component, Resource)
    resource = types.Resource(
        uri=component.uri,
        name=component.name or "",
        title=component.title,
        description=component.description,
        mime_type=component.mime_type,
        icons=component.icons,
        annotations=component.annotations,
        _meta=component.meta,
    )
    return Piece(Feature.RESOURCES, component.uri, _dump(resource), component, etag)


def _dump(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(by_alias=True, mode="json", exclude_none=True)
