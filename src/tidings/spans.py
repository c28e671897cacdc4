"""The names of spans, of their attributes and of the event on one, each with what it says.

Only names: whoever does a piece of work that is worth a span takes them from here, whether or not anybody traces.
"""

from __future__ import annotations

from tidings.model import Feature

__all__ = ["ATTRIBUTES", "SPANS"]

SUBSCRIBE = "change_notifier.subscribe"
UNSUBSCRIBE = "change_notifier.unsubscribe"
CLEANUP = "change_notifier.cleanup_client"
NOTIFY_LIST = "change_notifier.notify_list_changed"
NOTIFY_CONTENT = "change_notifier.notify_resource_updated"
SEND = {feature: f"{feature.singular}_list_changed.send" for feature in Feature}
READ_LIST = "source.read_list"
SCAN = "workspace.scan"
RUN_TOOL = "source.run_tool"
WRITE = "store.write"

SPANS = {
    SUBSCRIBE: "A client, or an in-process subscriber, watches something.",
    UNSUBSCRIBE: "Subscriptions have ended of one who stays: by itself, by their time to live, or with their resource.",
    CLEANUP: "It is gone, and nothing is left of it.",
    NOTIFY_LIST: "A list changed: from the change until everybody was told who could be.",
    NOTIFY_CONTENT: "The same for the content of a resource.",
    SEND[Feature.TOOLS]: "The fan-out of a change of the tools.",
    SEND[Feature.PROMPTS]: "The fan-out of a change of the prompts.",
    SEND[Feature.RESOURCES]: "The fan-out of a change of the resources.",
    READ_LIST: "A server that only answers as it answers a client was asked what it lists.",
    SCAN: "Files of a workspace that may have changed were read.",
    RUN_TOOL: "A tool ran.",
    WRITE: "A batch of changes and durable subscriptions was written to the store.",
}

FEATURE = "tidings.feature"
URI = "tidings.uri"
OPERATION = "tidings.operation"
CLIENT = "tidings.client"
ERA = "tidings.era"
TRANSPORT = "tidings.transport"
SUBSCRIBERS = "tidings.subscribers"
REVISION = "tidings.revision"
DIGEST = "tidings.digest"
OUTCOME = "tidings.outcome"
SERVER = "tidings.server"
CLEANED = "tidings.cleaned"
PENDING = "tidings.pending"
SENT = "tidings.sent"
TOOL = "gen_ai.tool.name"
METHOD = "mcp.method.name"
UNITS = "tidings.units"
CHANGES = "tidings.changes"

ATTRIBUTES = {
    FEATURE: "The lists it is about: `tools`, `prompts`, `resources`.",
    URI: "The resource, without user, query and fragment.",
    OPERATION: "`added`, `removed`, `updated`, `deleted`: each that occurs.",
    CLIENT: "The subscriber's label, which is never a secret.",
    ERA: "`modern`, `legacy` or `none`.",
    TRANSPORT: "`http`, `stdio`, `webhook` or `process`.",
    SUBSCRIBERS: "How many there are; of a change, how many watch its topic.",
    REVISION: "The topic's, after the change.",
    DIGEST: "The topic's, after the change.",
    OUTCOME: "How it ended: `ok`, why a client was closed or a subscription ended, or how a tool or a reading failed.",
    SERVER: "The server's name.",
    CLEANED: "Subscriptions that ended, or went with a client.",
    PENDING: "Topics that still waited for it.",
    SENT: "Notifications handed over, on the event `fan-out`.",
    TOOL: "The tool's name.",
    METHOD: "The notification's method.",
    UNITS: "How many units of a workspace were read.",
    CHANGES: "How many changes were written.",
}

FAN_OUT = "fan-out"
