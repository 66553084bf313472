"""What both processes know: wire messages, errors, settings, time and units. Standard library and msgspec only."""
