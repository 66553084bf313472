"""Text after the engine: runs shortened, words made certain, two hearings joined, times estimated."""
