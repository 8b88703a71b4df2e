"""The papers' experiments, one module each: what was measured of what, by which protocol, and what was printed."""
