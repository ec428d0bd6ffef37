"""The lowest layer: messages, ledger, errors, named randomness, settings.

Imports nothing else of this package.
"""
