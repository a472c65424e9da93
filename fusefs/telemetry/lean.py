"""structlog, imported without rich.

Decided here and only here: that structlog does without rich. Where rich is installed structlog takes it along for the
tracebacks of its console form, which is not used here: 80 of the 720 ms that a daemon's imports take (medians). None
in `sys.modules` is Python's own way to say that a module is not to be had; structlog then does what it does without
rich. Anybody else imports rich as ever afterwards.

Threading: at import, when a program has one thread.
"""

from __future__ import annotations

import sys

_hidden = "rich" not in sys.modules
if _hidden:
    sys.modules["rich"] = None  # type: ignore[assignment]
try:
    import structlog
    from structlog.typing import FilteringBoundLogger
finally:
    if _hidden:
        del sys.modules["rich"]

__all__ = ["FilteringBoundLogger", "structlog"]
