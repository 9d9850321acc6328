"""User tokens with an expiry, signed with a secret: `x-user-token: NAME.EXPIRES.SIGNATURE`.

The secret is in the environment variable EXAMPLE_TOKEN_SECRET. Only `admin` may manage models.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections.abc import Mapping

from tsx_runtime.plugins import Refused


def sign(name: str, expires: int, secret: str) -> str:
    signature = hmac.new(secret.encode(), f"{name}.{expires}".encode(), hashlib.sha256).hexdigest()
    return f"{name}.{expires}.{signature}"


def check(role: str, headers: Mapping[str, str]) -> None:
    token = headers.get("x-user-token", "")
    name, _, tail = token.partition(".")
    expires = tail.partition(".")[0]
    if (
        not expires.isdecimal()
        or len(expires) > 20
        or not hmac.compare_digest(
            token.encode(), sign(name, int(expires), os.environ["EXAMPLE_TOKEN_SECRET"]).encode()
        )
    ):
        raise Refused("The x-user-token is missing or wrong.")
    if int(expires) < time.time():
        raise Refused("The x-user-token is over; ask for a new one.")
    if role == "management" and name != "admin":
        raise Refused(f"{name} may ask models, but not manage them.", status=403)
