"""The `quire` command: a file for each subcommand, and the table of them."""
