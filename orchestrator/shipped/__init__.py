"""Where an installed package carries conf/ and sweeps/; in a checkout they lie at the top."""
