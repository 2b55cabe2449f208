"""The twin: vLLM's own scheduler on a virtual clock, with a cost model in the place of the model's execution.

Behind the same protocol as the real engine; everything it returns is marked as predicted.
"""
