"""The process that holds the model: spawned on demand, killed when idle. Never imported by the gateway."""
