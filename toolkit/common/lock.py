"""A lock on storage that several nodes share, for work that may take long.

flock does not reach other nodes on every file system; a hard link to a name that is free is atomic
on all of them, NFS included. The holder touches its lock every few seconds. One that was not
touched for ``STALE_S``, by the file system's own clock, or whose process on this machine has ended,
is stale, and the next one takes it away. The limit is longer than NFS keeps old times (60 s).
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any, Self

from toolkit.entrypoint import processes
from toolkit.errors import ImportImageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STALE_S = 120.0
BEAT_S = 10.0
POLL_S = 0.5


def pause(waited: float, poll_s: float) -> float:
    """Seconds until the next look at a lock that is held.

    A tenth of the time waited so far, from ``poll_s`` to ten times that: who waits for minutes is
    kept seconds longer at most, and a thousand who wait ask the shared storage 200 times a second
    instead of 2,000.
    """
    return min(max(poll_s, waited / 10), 10 * poll_s)


class Lock:
    """``with Lock(path, …) as lock``: one at a time, or ImportImageError after ``timeout_s``."""

    def __init__(
        self,
        path: Path,
        *,
        timeout_s: float,
        say: Callable[[str], None] = lambda _: None,
        needless: Callable[[], bool] = lambda: False,
        stale_s: float = STALE_S,
        beat_s: float = BEAT_S,
        poll_s: float = POLL_S,
    ) -> None:
        """Nothing happens yet.

        Args:
            path: the lock.
            timeout_s: how long to wait for it.
            say: gets a line when there is a wait, and when a stale lock is taken away.
            needless: asked while waiting; once true, the wait is over without the lock.
            stale_s: seconds after which a lock that nobody touched is stale.
            beat_s: seconds between touches.
            poll_s: seconds between the first looks at a lock that is held; see :func:`pause`.
        """
        self.path = path
        self.held = False
        self._timeout_s = timeout_s
        self._say = say
        self._needless = needless
        self._stale_s = stale_s
        self._beat_s = beat_s
        self._poll_s = poll_s
        self._me = {**processes.identify(os.getpid()), "token": uuid.uuid4().hex}
        self._scratch = path.with_name(f"{path.name}.{self._me['token']}")
        self._over = threading.Event()
        self._beat: threading.Thread | None = None

    def __enter__(self) -> Self:
        begun = time.monotonic()
        said = False
        try:
            while not self._needless():
                self._scratch.write_text(json.dumps(self._me), encoding="utf-8")  # the clock, too
                with contextlib.suppress(FileExistsError):
                    os.link(self._scratch, self.path)
                    self.held = True
                    break
                holder = self._holder()
                if holder is None:
                    continue
                owner, age = holder
                if age > self._stale_s or processes.lives(owner) is False:
                    self._break(owner)
                    continue
                if not said:
                    self._say(f"waiting for {_who(owner)}, which holds {self.path}")
                    said = True
                if time.monotonic() - begun > self._timeout_s:
                    msg = (
                        f"{_who(owner)} has held {self.path} for longer than the"
                        f" {self._timeout_s:g} s that were to be waited. Wait for it and try again,"
                        " or wait longer with --lock-timeout."
                    )
                    raise ImportImageError(msg)
                time.sleep(pause(time.monotonic() - begun, self._poll_s))
        except OSError as error:
            msg = f"{self.path.parent} takes no lock: {error.strerror}. Choose another folder."
            raise ImportImageError(msg) from error
        finally:
            self._scratch.unlink(missing_ok=True)
        if self.held:
            self._beat = threading.Thread(target=self._touch, daemon=True)
            self._beat.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._beat:
            self._beat.join()
        if self.held and self._is_mine():
            self.path.unlink(missing_ok=True)

    def _holder(self) -> tuple[dict[str, Any], float] | None:
        """Who holds the lock, and how long ago it was touched; None where nobody does any more."""
        try:
            with self.path.open(encoding="utf-8") as file:  # opening makes NFS look again
                owner = json.load(file)
                touched = os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return None
        except ValueError:  # damaged: the file system was full, say
            owner, touched = None, self.path.stat().st_mtime
        owner = owner if isinstance(owner, dict) else {}
        return owner, self._scratch.stat().st_mtime - touched

    def _break(self, owner: dict[str, Any]) -> None:
        """Take a stale lock away, and give it back if it is another's by now."""
        aside = self._scratch.with_suffix(".stale")
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(aside)
            if _token(aside) != owner.get("token"):
                with contextlib.suppress(FileExistsError):
                    os.link(aside, self.path)
            else:
                self._say(f"took away the stale lock of {_who(owner)}")
            aside.unlink()

    def _touch(self) -> None:
        while not self._over.wait(self._beat_s):
            with contextlib.suppress(OSError):
                if self._is_mine():
                    os.utime(self.path)

    def _is_mine(self) -> bool:
        return _token(self.path) == self._me["token"]


def _token(path: Path) -> str | None:
    try:
        token: str | None = json.loads(path.read_text(encoding="utf-8")).get("token")
    except (OSError, ValueError, AttributeError):
        return None
    return token


def _who(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
