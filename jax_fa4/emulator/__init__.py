"""The Python door to the emulated GPU."""
