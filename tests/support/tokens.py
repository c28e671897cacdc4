"""Tokens, and the authentication of a server that requires them."""

from __future__ import annotations

from typing import Any

from mcp.server.auth.provider import AccessToken, TokenVerifier
from mcp.server.auth.settings import AuthSettings
from pydantic import AnyHttpUrl

TOKENS = {
    "alice": {"client_id": "alice", "scopes": ["read"]},
    "bob": {"client_id": "bob", "scopes": ["read"]},
    "weak": {"client_id": "weak", "scopes": []},
}
"""By token. All but the last have the required scope."""


def authentication(verifier: TokenVerifier | None = None) -> dict[str, Any]:
    """Return the options of the SDK's servers that require tokens, by default those of `TOKENS`."""
    settings = AuthSettings(
        issuer_url=AnyHttpUrl("https://issuer.example"), resource_server_url=None, required_scopes=["read"]
    )
    return {"auth": settings, "token_verifier": verifier or Verifier()}


class Verifier:
    async def verify_token(self, token: str) -> AccessToken | None:
        known = TOKENS.get(token)
        return AccessToken.model_validate({"token": token, **known}) if known else None
