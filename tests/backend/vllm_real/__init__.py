"""The real vLLM, in its own environment, on tiny random models. Skipped where no vLLM is found.

A start takes half a minute or more on two cores, most of it imports, so all tests of this folder share one server, but for
those of the families.
"""
