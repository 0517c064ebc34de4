"""``python -m engine``: the ``engine`` command."""

from engine.cli.main import main

if __name__ == "__main__":
    main()
