"""`python -m kvxfer.cli`: the `kvxfer` command of this very interpreter."""

from kvxfer.cli import main

main()
