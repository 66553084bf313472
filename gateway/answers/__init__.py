"""What goes out: transcripts in every format, event streams, errors."""
