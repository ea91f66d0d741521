"""What runs in vLLM's own interpreter, which may hold nothing of this project: the standard library, and what vLLM brings.

The engine puts the folder above this one on that interpreter's path.
"""
