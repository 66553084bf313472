"""Calls, from bytes to utterances (``ear``, ``endpointing``) and from hypotheses to events (``stream``)."""
