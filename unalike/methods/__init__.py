"""What several algorithms share: averaging, submodels, prompt tuning, public data."""
