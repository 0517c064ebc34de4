"""The ``engine`` command, as the console script and as ``python -m engine``."""

import sys


def main() -> None:
    """Ctrl-C ends it without a traceback from its first import on."""
    try:
        from engine.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
