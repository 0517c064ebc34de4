"""The ``engine`` command, as the console script and as ``python -m engine``."""

import _thread
import sys
import threading


def _not_lost(unraisable: "sys.UnraisableHookArgs") -> None:
    """Ctrl-C that came where Python drops exceptions, as in a weak reference's callback, comes again a little later."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        threading.Timer(0.05, _thread.interrupt_main).start()
    else:
        sys.__unraisablehook__(unraisable)


def main() -> None:
    """Ctrl-C ends it without a traceback from its first import on."""
    sys.unraisablehook = _not_lost
    try:
        from engine.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
