"""Files between a door and the worker: who is next (``admission``), who is in hand (``dispatch``), what has come of each."""
