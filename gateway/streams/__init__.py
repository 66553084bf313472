"""Live audio: the core that every dialect shares (``live``, ``hub``, ``replay``), and one module a dialect."""
