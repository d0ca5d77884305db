"""From what the user gave to a case: read, substituted, shrunk where it is large, and cut into windows."""
