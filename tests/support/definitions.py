"""One definition of each kind of item, with all fields of the protocol, and a strategy of names."""

from hypothesis import strategies as st

PROMPT = {
    "name": "review",
    "title": "Review",
    "description": "",
    "arguments": [
        {"name": "diff", "required": True, "description": "A unified diff"},
        {"name": "tone", "required": False},
    ],
    "icons": [{"src": "data:image/png;base64,aGk=", "mimeType": "image/png", "sizes": ["48x48"]}],
    "_meta": {"com.example/owner": "ädä 🦊"},
}
TOOL = {
    "name": "add",
    "inputSchema": {"type": "object", "properties": {"a": {"type": "number", "default": None}}, "required": ["a"]},
    "outputSchema": {"type": "object"},
    "annotations": {"readOnlyHint": True},
    "execution": {"taskSupport": "optional"},
}
RESOURCE = {
    "uri": "file:///ä b",
    "name": "notes",
    "mimeType": "text/plain",
    "size": 12,
    "annotations": {"audience": ["user"], "priority": 0.5, "lastModified": "2026-07-28T00:00:00Z"},
}
TEMPLATE = {"uriTemplate": "board://{sprint}", "name": "sprint", "description": "One sprint"}

names = st.sampled_from(["a", "b", "c", "d"])
