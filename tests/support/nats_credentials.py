"""The keys of a NATS operator, for a server that accepts .creds files only."""

from __future__ import annotations

import base64
import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

import nkeys  # type: ignore[import-untyped]  # it has no types

__all__ = ["make_credentials"]

UNLIMITED = {**dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1), "wildcards": True}
JETSTREAM = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)


def make_credentials(path: Path, publish: list[str], subscribe: list[str]) -> str:
    """Write the .creds file of a user who may use these subjects. Return the configuration of the server."""
    operator, system, account, user = (
        nkeys.from_seed(_seed(prefix))
        for prefix in (
            nkeys.PREFIX_BYTE_OPERATOR,
            nkeys.PREFIX_BYTE_ACCOUNT,
            nkeys.PREFIX_BYTE_ACCOUNT,
            nkeys.PREFIX_BYTE_USER,
        )
    )
    account_jwt = _jwt(operator, account, {"type": "account", "limits": UNLIMITED | JETSTREAM})
    system_jwt = _jwt(operator, system, {"type": "account", "limits": UNLIMITED})
    allowed = {"pub": {"allow": publish}, "sub": {"allow": subscribe}, "subs": -1, "data": -1, "payload": -1}
    user_jwt = _jwt(account, user, {"type": "user", **allowed})
    path.write_text(
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n",
        encoding="utf-8",
    )
    return (
        f"operator: {_jwt(operator, operator, {'type': 'operator'})}\n"
        f"system_account: {_public(system)}\n"
        "resolver: MEMORY\n"
        f"resolver_preload: {{ {_public(account)}: {account_jwt}\n {_public(system)}: {system_jwt} }}\n"
    )


def _seed(prefix: int) -> bytearray:
    return bytearray(nkeys.encode_seed(os.urandom(32), prefix))


def _public(key: Any) -> str:
    public: str = key.public_key.decode()
    return public


def _jwt(issuer: Any, subject: Any, claims: dict[str, Any]) -> str:
    body = {
        "jti": uuid.uuid4().hex,
        "iat": int(time.time()),
        "iss": _public(issuer),
        "sub": _public(subject),
        "name": claims["type"],
        "nats": {**claims, "version": 2},
    }
    signed = f"{_part({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{_part(body)}"
    return f"{signed}.{_base64(issuer.sign(signed.encode()))}"


def _part(value: dict[str, Any]) -> str:
    return _base64(json.dumps(value).encode())


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
