"""`python -m gelo_cli`."""

from gelo_cli.main import app

app()
