"""The real vLLM, in its own environment, on a tiny random model. Skipped where no vLLM is found.

A start takes 50 seconds or more on two cores, most of it imports, so all tests of this folder share one server.
"""
