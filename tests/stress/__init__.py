"""Kill and soak harnesses: the long form is scripts/stress.py, the short one in tests/faults."""
