"""Tokens that a server may ask for, and what it needs to do so."""

from __future__ import annotations

from typing import Any

from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from pydantic import AnyHttpUrl

TOKENS = {
    "alice": {"client_id": "alice", "scopes": ["read"]},
    "bob": {"client_id": "bob", "scopes": ["read"]},
    "weak": {"client_id": "weak", "scopes": []},
}
"""By the token itself; all but the last have the scope that is required."""


def authentication() -> dict[str, Any]:
    """What the SDK's servers need to ask for tokens."""
    settings = AuthSettings(
        issuer_url=AnyHttpUrl("https://issuer.example"), resource_server_url=None, required_scopes=["read"]
    )
    return {"auth": settings, "token_verifier": Verifier()}


class Verifier:
    async def verify_token(self, token: str) -> AccessToken | None:
        known = TOKENS.get(token)
        return AccessToken.model_validate({"token": token, **known}) if known else None
