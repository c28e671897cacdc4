"""A live server with everything that the MCP conformance suite tests.

    python examples/everything.py --port 8000            # live
    python examples/everything.py --port 8000 --plain    # the same server on the SDK alone

The suite prescribes names and results. The end of the file shows the difference: the live server contains no code for
notifications, and needs no handler for `resources/subscribe`. The conformance test runs both and compares each check.
"""

import argparse
import asyncio
import base64
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Annotated, Any

import mcp_types as types
from mcp.server import ServerRequestContext
from mcp.server.mcpserver import Context, MCPServer, RequestStateSecurity, UserMessage
from mcp.server.mcpserver.prompts.base import Prompt
from mcp.server.mcpserver.tools import Tool
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp.shared.exceptions import MCPError
from pydantic import Field

from tidings import Live

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGP4z8DwHwAFAAH/iZk9HQAAAABJRU5ErkJggg=="
SILENCE = "UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAEAfAAABAAgAZGF0YQAAAAA="
WATCHED = "test://watched-resource"


def json_schema_2020_12_tool() -> str:
    """An input schema with the keywords of JSON Schema 2020-12."""
    return "ok"


SCHEMA_2020_12: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}


schema_tool = Tool.from_function(json_schema_2020_12_tool).model_copy(update={"parameters": SCHEMA_2020_12})

# Every replica must be able to read the state that another one issued. A real server reads its key from a secret store.
security = RequestStateSecurity(keys=["not a secret " * 3])
mcp = MCPServer("everything", version="1", tools=[schema_tool], request_state_security=security)


# Tools that return content


def png() -> types.ImageContent:
    return types.ImageContent(data=PIXEL, mime_type="image/png")


def text(words: str) -> types.TextContent:
    return types.TextContent(text=words)


def embedded(uri: str, mime_type: str, words: str) -> types.EmbeddedResource:
    return types.EmbeddedResource(resource=types.TextResourceContents(uri=uri, mime_type=mime_type, text=words))


@mcp.tool()
def test_simple_text() -> str:
    """Text."""
    return "This is a simple text response for testing."


@mcp.tool()
def test_image_content() -> list[types.ImageContent]:
    """An image."""
    return [png()]


@mcp.tool()
def test_audio_content() -> list[types.AudioContent]:
    """An empty sound."""
    return [types.AudioContent(data=SILENCE, mime_type="audio/wav")]


@mcp.tool()
def test_embedded_resource() -> list[types.EmbeddedResource]:
    """A resource."""
    return [embedded("test://embedded-resource", "text/plain", "This is an embedded resource content.")]


@mcp.tool()
def test_multiple_content_types() -> list[types.TextContent | types.ImageContent | types.EmbeddedResource]:
    """Text, an image and a resource."""
    data = embedded("test://mixed-content-resource", "application/json", json.dumps({"test": "data", "value": 123}))
    return [text("Multiple content types test:"), png(), data]


@mcp.tool()
def test_error_handling() -> str:
    """An error."""
    raise RuntimeError("This tool intentionally returns an error for testing")


@mcp.tool()
def test_header(region: Annotated[str, Field(json_schema_extra={"x-mcp-header": "Region"})]) -> str:
    """An argument that is sent as an HTTP header too."""
    return region


# Tools that send messages while they run


@mcp.tool()
async def test_tool_with_logging(ctx: Context) -> str:
    """Three log messages."""
    for words in ("Tool execution started", "Tool processing data", "Tool execution completed"):
        await ctx.info(words)
        await asyncio.sleep(0.05)  # the suite requires it
    return "Logged."


@mcp.tool()
async def test_tool_with_progress(ctx: Context) -> str:
    """Three progress notifications."""
    for percent in (0, 50, 100):
        await ctx.report_progress(percent, 100)
        await asyncio.sleep(0.05)  # the suite requires it
    return "Done."


@mcp.tool()
async def test_reconnection(ctx: Context) -> str:
    """Close the connection, and return the result after the client has reconnected."""
    await ctx.info("Hanging up.")  # after this, the client has an open stream
    await ctx.close_sse_stream()
    await asyncio.sleep(0.2)  # twice the time after which the client should reconnect
    return "Here I am again."


class Events(EventStore):
    """Keeps events for clients that reconnect. Works for one session at a time, as in the suite: the SDK uses the same
    stream names for all sessions, so that one session would get the events of another."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, types.JSONRPCMessage | None]] = []

    async def store_event(self, stream_id: str, message: types.JSONRPCMessage | None) -> str:
        self._kept.append((stream_id, message))
        return str(len(self._kept))

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str:
        last = int(last_event_id)
        stream_id, _ = self._kept[last - 1]
        for number, (of, message) in enumerate(self._kept[last:], start=last + 1):
            if of == stream_id and message is not None:
                await send_callback(EventMessage(message, str(number)))
        return stream_id


@mcp.tool()
async def test_sampling(prompt: str, ctx: Context) -> str:
    """Ask the client's model."""
    messages = [types.SamplingMessage(role="user", content=text(prompt))]
    answer = await ctx.session.create_message(messages, max_tokens=100, related_request_id=ctx.request_id)
    return f"LLM response: {getattr(answer.content, 'text', answer.content)}"


async def ask(ctx: Context, message: str, **properties: dict[str, Any]) -> str:
    """Show a form to the client's user."""
    required = [name for name, schema in properties.items() if "default" not in schema]
    form = {"type": "object", "properties": properties, "required": required}
    answer = await ctx.session.elicit_form(message, form, related_request_id=ctx.request_id)
    return f"action={answer.action}, content={json.dumps(answer.content or {})}"


@mcp.tool()
async def test_elicitation(message: str, ctx: Context) -> str:
    """Ask the client's user."""
    name = {"type": "string", "description": "User's response"}
    address = {"type": "string", "description": "User's email address"}
    return "User response: " + await ask(ctx, message, username=name, email=address)


@mcp.tool()
async def test_elicitation_sep1034_defaults(ctx: Context) -> str:
    """Ask with a default for each type."""
    return "Elicitation completed: " + await ask(
        ctx,
        "Is this right?",
        name={"type": "string", "default": "John Doe"},
        age={"type": "integer", "default": 30},
        score={"type": "number", "default": 95.5},
        status={"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
        verified={"type": "boolean", "default": True},
    )


@mcp.tool()
async def test_elicitation_sep1330_enums(ctx: Context) -> str:
    """Ask with each kind of choice."""
    options = ["option1", "option2", "option3"]
    titled = [{"const": f"value{number}", "title": f"Number {number}"} for number in (1, 2, 3)]
    return "Elicitation completed: " + await ask(
        ctx,
        "Which one?",
        untitledSingle={"type": "string", "enum": options},
        titledSingle={"type": "string", "oneOf": titled},
        legacyEnum={"type": "string", "enum": options, "enumNames": ["Option One", "Option Two", "Option Three"]},
        untitledMulti={"type": "array", "items": {"type": "string", "enum": options}},
        titledMulti={"type": "array", "items": {"anyOf": titled}},
    )


# Tools, and a prompt, that need input from the client


def question(message: str, field: str, kind: str = "string") -> types.ElicitRequest:
    form = {"type": "object", "properties": {field: {"type": kind}}, "required": [field]}
    return types.ElicitRequest(params=types.ElicitRequestFormParams(message=message, requested_schema=form))


def sample(words: str, max_tokens: int) -> types.CreateMessageRequest:
    messages = [types.SamplingMessage(role="user", content=text(words))]
    return types.CreateMessageRequest(params=types.CreateMessageRequestParams(messages=messages, max_tokens=max_tokens))


def need(state: str | None = None, /, **requests: types.InputRequest) -> types.InputRequiredResult:
    return types.InputRequiredResult(input_requests=requests or None, request_state=state)


def filled_in(ctx: Context, key: str) -> Mapping[str, Any] | None:
    """Return the form that the user filled in, if the client sent it."""
    answer = (ctx.input_responses or {}).get(key)
    return answer.content if isinstance(answer, types.ElicitResult) else None


NAME = question("What is your name?", "name")
CONFIRM = question("Please confirm", "ok", "boolean")


@mcp.tool()
async def test_input_required_result_elicitation(ctx: Context) -> str | types.InputRequiredResult:
    """Needs the user."""
    form = filled_in(ctx, "user_name")
    return need(user_name=NAME) if form is None else f"Hello, {form.get('name')}!"


@mcp.tool()
async def test_input_required_result_sampling(ctx: Context) -> str | types.InputRequiredResult:
    """Needs the model."""
    answer = (ctx.input_responses or {}).get("capital_question")
    if not isinstance(answer, types.CreateMessageResult):
        return need(capital_question=sample("What is the capital of France?", 100))
    return str(getattr(answer.content, "text", answer.content))


@mcp.tool()
async def test_input_required_result_list_roots(ctx: Context) -> str | types.InputRequiredResult:
    """Needs the roots."""
    answer = (ctx.input_responses or {}).get("client_roots")
    if not isinstance(answer, types.ListRootsResult):
        return need(client_roots=types.ListRootsRequest())
    return " ".join(str(root.uri) for root in answer.roots)


@mcp.tool()
async def test_input_required_result_request_state(ctx: Context) -> str | types.InputRequiredResult:
    """Needs the user, and its own state."""
    if filled_in(ctx, "confirm") is None or ctx.request_state != "asked":
        return need("asked", confirm=CONFIRM)
    return "state-ok"


@mcp.tool()
async def test_input_required_result_tampered_state(ctx: Context) -> str | types.InputRequiredResult:
    """Accepts only its own state, which the SDK has signed."""
    return need("asked", confirm=CONFIRM) if ctx.request_state is None else "state-ok"


@mcp.tool()
async def test_input_required_result_multiple_inputs(ctx: Context) -> str | types.InputRequiredResult:
    """Needs the user, the model and the roots."""
    requests: dict[str, types.InputRequest] = {
        "user_name": NAME,
        "greeting": sample("Generate a greeting", 50),
        "client_roots": types.ListRootsRequest(),
    }
    return "Thank you." if requests.keys() <= (ctx.input_responses or {}).keys() else need("asked", **requests)


@mcp.tool()
async def test_input_required_result_multi_round(ctx: Context) -> str | types.InputRequiredResult:
    """Needs the user twice; the state has the first input."""
    name, colour = filled_in(ctx, "step1"), filled_in(ctx, "step2")
    if ctx.request_state is not None and name is not None:
        return need(str(name.get("name")), step2=question("Step 2: What is your favorite color?", "color"))
    if ctx.request_state is not None and colour is not None:
        return f"{ctx.request_state} likes {colour.get('color')}."
    return need("asked", step1=question("Step 1: What is your name?", "name"))


@mcp.tool()
async def test_input_required_result_capabilities(ctx: Context) -> types.InputRequiredResult:
    """Needs what the client can provide."""
    can = ctx.client_capabilities or types.ClientCapabilities()
    requests: dict[str, types.InputRequest] = {}
    if can.sampling is not None:
        requests["sample"] = sample("Say hello", 50)
    if can.elicitation is not None:
        requests["ask"] = NAME
    return need("asked", **requests)


@mcp.tool()
async def test_missing_capability(ctx: Context) -> str:
    """Refuses a client that has no model."""
    if ctx.client_capabilities is None or ctx.client_capabilities.sampling is None:
        required: dict[str, Any] = {"requiredCapabilities": {"sampling": {}}}
        raise MCPError(types.MISSING_REQUIRED_CLIENT_CAPABILITY, "This tool needs sampling", required)
    return "ok"


@mcp.prompt()
async def test_input_required_result_prompt(ctx: Context) -> list[UserMessage] | types.InputRequiredResult:
    """A prompt that needs the user."""
    form = filled_in(ctx, "user_context")
    if form is None:
        return need(user_context=question("What context should the prompt use?", "context"))
    return [UserMessage(f"Context: {form.get('context')}")]


# Prompts and resources


@mcp.prompt()
def test_simple_prompt() -> str:
    """Text."""
    return "This is a simple prompt for testing."


@mcp.prompt()
def test_prompt_with_arguments(arg1: str, arg2: str) -> str:
    """Text, with arguments."""
    return f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"


@mcp.prompt()
def test_prompt_with_embedded_resource(
    resource_uri: Annotated[str, Field(alias="resourceUri")],
) -> list[UserMessage]:
    """A resource, and text."""
    resource = embedded(resource_uri, "text/plain", "Embedded resource content for testing.")
    return [UserMessage(resource), UserMessage("Please process the embedded resource above.")]


@mcp.prompt()
def test_prompt_with_image() -> list[UserMessage]:
    """An image, and text."""
    return [UserMessage(png()), UserMessage("Please analyze the image above.")]


@mcp.resource("test://static-text", mime_type="text/plain")
def static_text() -> str:
    """Text."""
    return "This is the content of the static text resource."


@mcp.resource("test://static-binary", mime_type="image/png")
def static_binary() -> bytes:
    """An image."""
    return base64.b64decode(PIXEL)


@mcp.resource("test://template/{id}/data", mime_type="application/json")
def template(id: str) -> str:
    """The requested text."""
    return json.dumps({"id": id, "templateTest": True, "data": f"Data for ID: {id}"})


@mcp.completion()  # type: ignore[no-untyped-call, untyped-decorator]  # the SDK's decorator has no types
async def complete(
    ref: types.PromptReference | types.ResourceTemplateReference,
    argument: types.CompletionArgument,
    context: types.CompletionContext | None,
) -> types.Completion:
    cities = [city for city in ("paris", "prague", "porto") if city.startswith(argument.value)]
    return types.Completion(values=cities, total=len(cities), has_more=False)


async def set_level(ctx: ServerRequestContext[Any, Any], params: types.SetLevelRequestParams) -> types.EmptyResult:
    return types.EmptyResult()


# Changes


state = SimpleNamespace(is_plain=False, changes=0)


@mcp.resource(WATCHED, mime_type="text/plain")
def watched() -> str:
    """A text that changes with every call of test_trigger_resource_change."""
    return f"It has changed {state.changes} times."


@mcp.tool()
async def test_trigger_resource_change(ctx: Context) -> str:
    """Change the watched resource."""
    state.changes += 1
    # Tidings cannot know what a function will return next time, so the server has to report this change.
    await ctx.notify_resource_updated(WATCHED)
    return watched()


def dynamic() -> str:
    """A tool that is added and removed."""
    return "Here I am."


async def is_there(name: str) -> bool:
    return name in {item.name for item in [*await mcp.list_tools(), *await mcp.list_prompts()]}


@mcp.tool()
async def test_trigger_tool_change(ctx: Context) -> str:
    """Add a tool, or remove it."""
    if await is_there("dynamic_tool"):
        mcp.remove_tool("dynamic_tool")
    else:
        mcp.add_tool(dynamic, name="dynamic_tool")
    if state.is_plain:
        await ctx.notify_tools_changed()
    return "The list of tools is another one."


@mcp.tool()
async def test_trigger_prompt_change(ctx: Context) -> str:
    """Add a prompt, or remove it."""
    if await is_there("dynamic_prompt"):
        mcp.remove_prompt("dynamic_prompt")
    else:
        mcp.add_prompt(Prompt.from_function(dynamic, name="dynamic_prompt"))
    if state.is_plain:
        await ctx.notify_prompts_changed()
    return "The list of prompts is another one."


# Live, or plain


async def accept(ctx: ServerRequestContext[Any, Any], params: types.RequestParams) -> types.EmptyResult:
    """Accept the subscription of a legacy client and never notify it: the SDK alone can do no more."""
    return types.EmptyResult()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--plain", action="store_true", help="on the SDK alone, without Tidings")
    options = parser.parse_args()
    state.is_plain = options.plain
    lowlevel = mcp._lowlevel_server  # MCPServer takes no handlers for protocol methods
    lowlevel.add_request_handler("logging/setLevel", types.SetLevelRequestParams, set_level)
    if state.is_plain:
        lowlevel.add_request_handler("resources/subscribe", types.SubscribeRequestParams, accept)
        lowlevel.add_request_handler("resources/unsubscribe", types.UnsubscribeRequestParams, accept)
        mcp.run("streamable-http", port=options.port, event_store=Events(), retry_interval=100)
    else:
        Live(mcp).run("http", port=options.port, log_level="warning", event_store=Events(), retry_interval=100)


if __name__ == "__main__":
    main()
