"""`python -m quire` is the `quire` command."""

from quire.cli import main

main()
