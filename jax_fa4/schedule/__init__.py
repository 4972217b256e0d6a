"""Which tiles exist and in what order: masks and schedules as plain data."""
