"""`python -m unalike`, the same as the command."""

from unalike.cli import main

main()
