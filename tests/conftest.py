"""What all tiers share."""

from __future__ import annotations

import signal

from hypothesis import settings

# How long an example takes says nothing on a shared machine; the time limit of the test stands.
settings.register_profile("toolkit", deadline=None)
settings.load_profile("toolkit")

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every process
# that they start; the tests are about how these end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
