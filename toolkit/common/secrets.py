"""What is a secret: by a variable's name, and by what a value carries."""

from __future__ import annotations

import re

_BY_NAME = re.compile(
    # Wherever they stand in a name,
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|PRIVATE_?KEY|API_?KEY|ACCESS_?KEY|SSHPASS"
    # as its last word, with a number behind it at most: TOKENIZERS_PARALLELISM, MAX_TOKENS and
    # BYPASS are none,
    r"|(?:^|_)(?:PASS|PWD|KEY|PAT|AUTH|CREDS?|JWT|COOKIE|DSN)_?\d*$"
    # or as its end.
    r"|TOKEN_?\d*$",
    re.IGNORECASE,
)
#: The shell's own, and where a secret lies, which is none.
_HARMLESS = re.compile(r"(?:OLD)?PWD|\w+_(?:FILE|PATH|DIR)", re.IGNORECASE)
#: A login in a URL, and the password of a connection string.
_LOGIN = re.compile(r"(?<=://)[^/\s@'\"]+@")
_BY_VALUE = re.compile(
    r"://[^/\s@]*:[^/\s@]+@|https?://[^/\s@]+@|\b(?:password|pwd)\s*=\s*\S", re.IGNORECASE
)


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable is not to be shown: its name says so, or its value has a login in it."""
    by_name = _BY_NAME.search(name) and not _HARMLESS.fullmatch(name)
    return bool(by_name or _BY_VALUE.search(value))


def hide_logins(text: str) -> str:
    """``text`` with user names and passwords in URLs replaced."""
    return _LOGIN.sub("***@", text)
