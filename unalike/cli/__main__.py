"""`python -m unalike.cli` is the same as the command `unalike`."""

from unalike.cli import main

main()
