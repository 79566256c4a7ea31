"""Runs as ml_collections configs: each file imports `default` and overrides it."""
