"""Engines: what runs one configuration. Knows vLLM, Ray and NVML; knows nothing of Optuna or MLflow."""
