"""`python -m lmms_engine` is the `lmms-engine` command."""

from lmms_engine.cli import app

if __name__ == "__main__":
    app()
