"""Samples: bytes to mono float32 at 16 kHz (``decode``), where there is speech in them (``vad``), where it is quiet."""
