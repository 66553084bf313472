"""Engines: what turns audio into text. ``base`` is the contract, every other module one engine."""
