"""The process that holds the model: spawned on demand, killed when idle. Never imported by the gateway."""

import os

# ONNX Runtime reports to its maker from 1.29 on, also from Linux, unless it is told not to before it is loaded. Nobody's calls
# or files are its business, and a server without a network would keep trying.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
