"""A wing: what a configuration needs and how fast it is, before anything runs; the verbs fit, choose and calibrate."""
