"""The figures that Napscribe promises, measured: ``make bench``. Programs, not tests; nothing here runs under pytest."""
