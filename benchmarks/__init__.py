"""What is measured, as programs: `python -m benchmarks.NAME`, every size a flag; README.md has the list."""
