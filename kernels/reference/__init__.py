"""Plain torch oracles: short, slow, obviously right."""
