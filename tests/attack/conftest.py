"""The attack tests: random and malicious inputs at every entry point, and kills at any moment.

Each test file here attacks one entry point or kills processes in one way. The tests do not mirror a source file: a bug
that they reveal is fixed in the code that owns it, and the input becomes a named case in that code's ordinary test.
`make test` runs a subset, `make test-full` runs all, and both print how much was tried, one line per kind
(`tests/harness/attack_counts.py`):

    def test_...(tally: Tally) -> None:
        tally("command lines", inputs=1, tracebacks=0, wrong_exit_codes=0)
"""
