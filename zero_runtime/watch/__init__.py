"""Ranks watch each other, so that a hung or dead rank is reported within seconds."""
