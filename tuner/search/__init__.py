"""What is proposed after the first trials: models of what was measured, and the point that promises most.

Pure functions on arrays: they know neither Optuna nor the loop, and no engine.
"""
