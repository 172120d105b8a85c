"""What fusion groups cost: bytes, messages and time, beside what they could cost and beside a pipeline."""
