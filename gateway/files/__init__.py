"""Doors for files: a request read and checked, its upload spooled, its job queued and waited for."""
