"""The ``engine`` command, as the console script and as ``python -m engine``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs


def main() -> None:
    """Ctrl-C ends it without a traceback from its first import on."""
    sys.unraisablehook = _raised_again
    try:
        from engine.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python 3.11 wraps what a class meets as it is made
            sys.exit(130)
        raise


def _raised_again(discarded: UnraisableHookArgs) -> None:
    """Ctrl-C comes once more where it met code whose exceptions Python discards, such as callbacks of weak references."""
    import signal
    import threading

    if discarded.exc_type is KeyboardInterrupt:
        again = threading.Timer(0.01, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        again.daemon = True
        again.start()  # in here it would be discarded, too
    else:
        sys.__unraisablehook__(discarded)


if __name__ == "__main__":
    main()
