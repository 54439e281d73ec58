"""Texts of other people's errors, without what may be a secret."""

from __future__ import annotations

import os
import re

_SECRET_NAMES = re.compile(r"SECRET|TOKEN|PASSWORD|ACCESS_KEY|ACCOUNT_KEY|SAS_KEY|CREDENTIAL|SERVICE_ACCOUNT_KEY")
_PREFIXES = ("AWS_", "GOOGLE_", "AZURE_")
_PARAMETERS = re.compile(
    r"(?i)((?:X-Amz|X-Goog)-(?:Signature|Credential|Security-Token)|sig|AWSAccessKeyId)=[^&\s\"'<>]+"
)
_ELEMENTS = re.compile(
    r"(?is)<(AWSAccessKeyId|SignatureProvided|StringToSign|StringToSignBytes|CanonicalRequest|"
    r"CanonicalRequestBytes|SecurityToken|Token)>.*?</\1>"
)
_USERINFO = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/\s\"'<>]*@")
_HIDDEN = "(hidden)"
_MAX_CHARS = 600
_MIN_SECRET_CHARS = 4


def redacted(text: str) -> str:
    """A text of an error for logs and records: one line, not long, without credentials.

    Left out are values of the environment that are credentials by their names, user and password in URLs (of an
    endpoint, a proxy), signatures in them, and what a server repeats of a signed request.
    """
    text = text.partition("\n\nDebug source:")[0]  # obstore's: the same once more, at length
    for name, value in os.environ.items():
        is_secret = name.startswith(_PREFIXES) and _SECRET_NAMES.search(name)
        if is_secret and len(value) >= _MIN_SECRET_CHARS:
            text = text.replace(value, _HIDDEN)
    text = _ELEMENTS.sub(lambda found: f"<{found[1]}>{_HIDDEN}</{found[1]}>", text)
    text = _USERINFO.sub(lambda found: f"{found[1]}{_HIDDEN}@", text)
    text = _PARAMETERS.sub(lambda found: f"{found[1]}={_HIDDEN}", text)
    text = " ".join(text.split())
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 4] + " ..."
