"""`python -m unalike`, the same as the command."""

from unalike.base.interrupts import exit_on_interrupt

exit_on_interrupt()

from unalike.cli import main  # noqa: E402

main()
