"""The attack as a test: random and malicious inputs at every door, and kills at every moment.

Each file here is one door or one way to be ended. Its tests do not mirror a source file: what they find is fixed at
its owner, and the input that found it stays as a named case in the owner's ordinary test. `make test` runs a cut of
it, `make test-full` all of it, and both print how much was tried, one line a kind (`tests/harness/attack_counts.py`):

    def test_...(tally: Tally) -> None:
        tally("command lines", inputs=1, tracebacks=0, wrong_exit_codes=0)
"""
