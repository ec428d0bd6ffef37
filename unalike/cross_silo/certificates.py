"""Certificates of startup kits and deployments: whose they are and until when they hold."""

import time
from pathlib import Path

from unalike.base.errors import UserError

SOON = 14 * 86400  # seconds before its end at which a certificate should be renewed


def read_certificate(path: Path) -> tuple[str, float, float]:
    """The name a certificate was made for, and from when and until when it holds (seconds).

    Raises: UserError where the file is no certificate.
    """
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no certificate that can be read: {error}") from None
    names = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    name = str(names[0].value) if names else ""
    start = certificate.not_valid_before_utc.timestamp()
    return name, start, certificate.not_valid_after_utc.timestamp()


def check_certificate(path: Path) -> None:
    """Raise UserError where a certificate does not hold now: nobody would connect with it."""
    _, start, end = read_certificate(path)
    now = time.time()
    if now > end:
        raise UserError(
            f"{path} expired on {format_day(end)}: no connection is made with it. Ask whoever made "
            "it for a new one"
        )
    if now < start:
        raise UserError(
            f"{path} holds from {format_day(start)} on, and by this machine's clock it is "
            f"{format_day(now)}: set the clock"
        )


def format_day(seconds: float) -> str:
    """A date, such as 2026-11-18 16:00 UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
