"""`python -m unalike.cli`, the same as the command."""

from unalike.cli import main

main()
