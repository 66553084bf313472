"""The worker's life: when it runs (``lifecycle``), who makes it so (``supervisor``), its process, the channel to it."""
