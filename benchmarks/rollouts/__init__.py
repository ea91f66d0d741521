"""Sampling throughput of the engines against plain `generate`, and what a swap of the adapter costs."""
