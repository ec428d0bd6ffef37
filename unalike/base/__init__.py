"""What everything else stands on: messages, ledger, errors, named randomness, settings. Imports nothing of ours."""
